"""Tasks: what is read, what is asked, and the share of it that is answered right."""
