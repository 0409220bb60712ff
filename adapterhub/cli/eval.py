"""`adapterhub eval`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click


@click.command("eval")
@click.argument("folder", metavar="DIR")
@click.option("--data", required=True, help="The labelled data: a file, or a Hub data set.")
@click.option("--text", help="The column with the text, if not the one of the training data.")
@click.option("--pair", help="The column with the second text.")
@click.option("--label", help="The column with the label.")
@click.option("--target", "eval_target", help="A file with the target texts, one a line.")
@click.option("--backbone", help="Where to load the backbone from, if not from its own id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(folder: str, data: str, backbone: str | None, as_json: bool, **columns: Any) -> None:
    """Evaluate the adapter in DIR (a run's output, or an adapter's folder) on labelled data."""
    from adapterhub.training.restore import open_adapter, trained

    known = trained(folder)
    given = {name: value for name, value in columns.items() if value is not None}
    examples = known.task.read(data, replace(known.data, **given), "eval")
    metrics = open_adapter(folder, backbone).evaluate(examples)
    if as_json:
        click.echo(json.dumps({"examples": len(examples), **metrics}))
        return
    for name, value in {"examples": f"{len(examples):,}", **metrics}.items():
        click.echo(f"{name:12} {value if isinstance(value, str) else f'{value:.4f}'}")
