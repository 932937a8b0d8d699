"""The vLLM plug-in: slow-fast decoding for each request of a vLLM engine. Importing this changes
nothing anywhere; `plugin.register` is what vLLM calls."""
