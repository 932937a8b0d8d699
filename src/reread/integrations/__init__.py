"""Where reread meets other libraries, one package each."""
