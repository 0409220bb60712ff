"""`adapterhub methods`."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click
from rich.table import Column
from rich.text import Text

from adapterhub.cli._format import PlainTable, print_json, print_table
from adapterhub.cli._options_text import print_options
from adapterhub.config.options import OptionDoc, options_of
from adapterhub.methods import METHODS, method_class


@click.command("methods")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(name: str | None, as_json: bool) -> None:
    """List the methods with their papers, or show the options of one."""
    chosen = {name: method_class(name)} if name else dict(sorted(METHODS.items()))
    if as_json:
        print_json({key: _described(method) for key, method in chosen.items()}, indent=2)
    elif name:
        _print_options(name)
    else:
        table = PlainTable("method", "description", Column("paper", no_wrap=True))
        gap = "\n" if sys.stdout.isatty() else " "
        for key, method in chosen.items():
            table.add_row(key, method.summary, Text(method.paper.replace(", http", f",{gap}http")))
        print_table(table)


def _described(method: type) -> dict[str, object]:
    return {
        "summary": method.summary,  # type: ignore[attr-defined]
        "paper": method.paper,  # type: ignore[attr-defined]
        "learning_rate": method.learning_rate,  # type: ignore[attr-defined]
        "options": [asdict(option) for option in options_of(method)],
    }


def _print_options(name: str) -> None:
    method = method_class(name)
    rate = OptionDoc(
        "train.learning_rate", "float", method.learning_rate, "the default of this method"
    )
    print_options([*options_of(method), rate], f"{name}: {method.summary}\n{method.paper}\n")
