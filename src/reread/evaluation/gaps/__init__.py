"""`reread eval gaps`: what budget, indexer and sharing of a sparse prefill each cost."""
