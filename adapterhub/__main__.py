"""`python -m adapterhub` is the `adapterhub` command."""

from adapterhub.cli import main

main()
