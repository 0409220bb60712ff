"""Options of dataclasses as text of 80 columns, for terminals and files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from adapterhub.cli._format import say_text
from adapterhub.config.options import WIDTH, OptionDoc, help_in_words, options_of, values_in_words
from adapterhub.methods.common.base import DescribedMethod
from adapterhub.tasks import Task
from adapterhub.tasks.common.base import aliases_of


def print_options(title: str, options: Sequence[OptionDoc], required: Sequence[str] = ()) -> None:
    """Print options with their help texts, values and defaults, below the lines of a title.

    `required` are the names of options that a recipe must have.
    """
    column = max((len(option.name) for option in options), default=0) + 4
    lines = [textwrap.fill(line, WIDTH, break_on_hyphens=False) for line in title.splitlines()]
    for option in options:
        lines += _lines(option, column, option.name in required)
    say_text("\n".join([*lines, "" if options else "  no options\n"]))


def task_options(task: type[Task]) -> tuple[str, Sequence[OptionDoc]]:
    """Return the description of a task, with its other names, and its options."""
    others = ", ".join(aliases_of(task.name))
    title = f"{task.name}: {task.summary}" + (f"\nalso called {others}" if others else "")
    return title, options_of(task)


def method_options(name: str, method: DescribedMethod) -> tuple[str, Sequence[OptionDoc]]:
    """Return the description of a method, and its options with its default learning rate."""
    rate = OptionDoc(
        "train.learning_rate", "float", method.learning_rate, "the default of this method"
    )
    return f"{name}: {method.summary}\n{method.paper}\n", [*options_of(method.options), rate]


def _lines(option: OptionDoc, column: int, required: bool) -> Iterator[str]:
    """Yield the lines of an option: its name and help text, then its values and default."""
    texts = [help_in_words(option)[0], values_in_words(option, required)]
    lines = [
        line
        for text in texts
        for line in textwrap.wrap(text, WIDTH - column, break_on_hyphens=False)
    ]
    for number, line in enumerate(lines):
        yield f"{'' if number else f'  {option.name}':{column}}{line}"
