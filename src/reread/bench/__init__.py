"""Timing on a GPU. Importing it needs no GPU; calling it does."""
