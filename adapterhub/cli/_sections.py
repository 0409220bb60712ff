"""Help texts whose options are in sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click


class SectionedCommand(click.Command):
    """A command that lists its options in sections; the last one has the others.

    Args:
        sections: the titles, each with the names of its options.
        rest: other arguments of a command.
    """

    def __init__(self, *rest: Any, sections: Mapping[str, tuple[str, ...]], **others: Any) -> None:
        super().__init__(*rest, **others)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        records = {o.name: o.get_help_record(ctx) or ("", "") for o in options}
        width = max(len(name) for name, _ in records.values())
        rest = tuple(n for n in records if not any(n in names for names in self.sections.values()))
        for title, names in (*self.sections.items(), ("Other options", rest)):
            lines = [(records[n][0].ljust(width), records[n][1]) for n in names if n]
            with formatter.section(title):
                formatter.write_dl(lines)
