"""The options of dataclasses as text that fits 80 columns, on a terminal and in a file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from adapterhub.cli._format import say_text
from adapterhub.config.commented_yaml import WIDTH, values_text
from adapterhub.config.options import OptionDoc
from adapterhub.tasks import Task
from adapterhub.tasks._registry import aliases_of


def print_options(
    options: Sequence[OptionDoc], title: str = "", required: Sequence[str] = ()
) -> None:
    """Print options with their help texts, values and defaults, below a title.

    Args:
        options: the options.
        title: lines above them, or "".
        required: the names of those that a recipe must have.
    """
    column = max((len(option.name) for option in options), default=0) + 4
    lines = [textwrap.fill(line, WIDTH) for line in title.splitlines()]
    for option in options:
        lines += _lines(option, column, option.name in required)
    say_text("\n".join([*lines, "" if options else "  no options\n"]))


def task_title(task: type[Task]) -> str:
    """Return the lines above the options of a task: what it is, and its other names."""
    others = ", ".join(aliases_of(task.name))
    return f"{task.name}: {task.summary}" + (f"\nalso called {others}" if others else "")


def _lines(option: OptionDoc, column: int, required: bool) -> Iterator[str]:
    """Yield the lines of an option: its name and help text, then its values and default."""
    texts = [option.help, values_text(option, required)]
    lines = [line for text in texts for line in textwrap.wrap(text, WIDTH - column)]
    for number, line in enumerate(lines):
        yield f"{'' if number else f'  {option.name}':{column}}{line}"
