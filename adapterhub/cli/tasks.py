"""`adapterhub tasks`."""

from __future__ import annotations

from dataclasses import asdict

import click

from adapterhub.cli._format import print_json, print_table
from adapterhub.cli._options import as_json_option
from adapterhub.cli._options_text import print_options, task_options
from adapterhub.config.options import options_of
from adapterhub.files.shown_table import ShownTable


@click.command("tasks")
@click.argument("name", required=False)
@as_json_option
def command(name: str | None, as_json: bool) -> None:
    """List the tasks, or show the options of one."""
    from adapterhub.tasks import TASKS, task_class

    chosen = {name: task_class(name)} if name else dict(sorted(TASKS.items()))
    if as_json:
        described = {
            key: {"summary": task.summary, "options": [asdict(o) for o in options_of(task)]}
            for key, task in chosen.items()
        }
        print_json(described, indent=2)
    elif name:
        print_options(*task_options(chosen[name]))
    else:
        rows = [(key, task.summary) for key, task in chosen.items()]
        print_table(ShownTable(("task", "description"), rows))
