"""`reread eval`: methods over tasks, sample by sample, into one folder."""
