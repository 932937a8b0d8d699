"""Hugging Face transformers: attach a model, its cache layers, its vocabulary, loading
checkpoints."""
