"""`adapterhub tasks`."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from adapterhub.cli._format import plain_table
from adapterhub.config.options import options_of


@click.command("tasks")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(name: str | None, as_json: bool) -> None:
    """List the tasks, or the options of one task."""
    from adapterhub.tasks import TASKS, task_class

    chosen = {name: task_class(name)} if name else dict(sorted(TASKS.items()))
    if as_json:
        described = {
            key: {"summary": task.summary, "options": [asdict(o) for o in options_of(task)]}
            for key, task in chosen.items()
        }
        click.echo(json.dumps(described, indent=2))
        return
    if name:
        table = Table("option", "values", "default", "what it is")
        for option in options_of(chosen[name]):
            table.add_row(option.name, option.type, str(option.default), option.help)
        click.echo(f"{name}: {chosen[name].summary}\n")
    else:
        table = Table("task", "what it does")
        for key, task in chosen.items():
            table.add_row(key, task.summary)
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table if console.is_terminal else plain_table(table))
