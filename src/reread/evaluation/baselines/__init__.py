"""Methods of others, run in an environment of their own."""
