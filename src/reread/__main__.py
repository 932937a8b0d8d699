"""`python -m reread` is the `reread` command."""

from .cli import main

main()
