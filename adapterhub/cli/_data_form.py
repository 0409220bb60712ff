"""Options on the form of a data file, for commands that read new data."""

from __future__ import annotations

from typing import Any

import click


def data_form_options(command: Any) -> Any:
    """Add options for what is detected about a file: data.delimiter, data.encoding and so on."""
    flags = (
        click.option("--delimiter", help="The character between fields; otherwise detected."),
        click.option("--encoding", help="The encoding of the file; otherwise detected."),
        click.option(
            "--header/--no-header", default=None, help="Whether the first line names columns."
        ),
        click.option("--quoted/--no-quoted", default=None, help="Whether quotes enclose fields."),
    )
    for flag in reversed(flags):
        command = flag(command)
    return command
