"""`adapterhub methods`."""

from __future__ import annotations

from dataclasses import asdict

import click

from adapterhub.cli._format import print_json, print_table
from adapterhub.cli._options import as_json_option
from adapterhub.cli._options_text import method_options, print_options
from adapterhub.config.options import options_of
from adapterhub.errors import spelled_like
from adapterhub.files.shown_table import ShownTable
from adapterhub.methods.common.base import DescribedMethod, described_method, described_methods


@click.command("methods")
@click.argument("name", required=False)
@as_json_option
def command(name: str | None, as_json: bool) -> None:
    """List the methods with their papers, or show the options of one."""
    methods = dict(sorted(described_methods().items()))
    name = name and spelled_like(name, methods)
    chosen = {name: described_method(name)} if name else methods
    if as_json:
        print_json({key: _facts(method) for key, method in chosen.items()}, indent=2)
    elif name:
        print_options(*method_options(name, chosen[name]))
    else:
        rows = [(key, method.summary, method.paper) for key, method in chosen.items()]
        print_table(ShownTable(("method", "description", "paper"), rows), unbroken=["paper"])


def _facts(method: DescribedMethod) -> dict[str, object]:
    return {
        "summary": method.summary,
        "paper": method.paper,
        "learning_rate": method.learning_rate,
        "options": [asdict(option) for option in options_of(method.options)],
    }
