"""Measuring: comparisons with dense, fidelity on text, provenance of results."""
