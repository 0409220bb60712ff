"""Run the `adapterhub` command by `python -m adapterhub`."""

from adapterhub.cli import main

main()
