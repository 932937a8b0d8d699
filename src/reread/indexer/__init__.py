"""The head-collapsed indexer of sparse prefill (OSP, arXiv 2606.07703)."""
