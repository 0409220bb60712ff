"""`adapterhub eval`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click

from adapterhub.training.data import check_labels, read_examples


@click.command("eval")
@click.argument("folder", metavar="DIR")
@click.option("--data", required=True, help="The labelled data: a file, or a Hub data set.")
@click.option("--text", help="The column with the text, if not the one of the training data.")
@click.option("--pair", help="The column with the second text.")
@click.option("--label", help="The column with the label.")
@click.option("--backbone", help="Where to load the backbone from, if not from its own id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(folder: str, data: str, backbone: str | None, as_json: bool, **columns: Any) -> None:
    """Evaluate the adapter in DIR (a run's output, or an adapter's folder) on labelled data."""
    from adapterhub.training.restore import open_adapter, trained_columns

    options = replace(
        trained_columns(folder), **{k: v for k, v in columns.items() if v is not None}
    )
    opened = open_adapter(folder, backbone)
    examples = read_examples(
        data, options, labelled=True, regression=opened.task.regression, split="eval"
    )
    if opened.adapter.labels:
        check_labels(opened.adapter.labels, examples)
    metrics = opened.task.metrics(examples, opened.predict(examples))
    if as_json:
        click.echo(json.dumps({"examples": len(examples), **metrics}))
        return
    for name, value in {"examples": f"{len(examples):,}", **metrics}.items():
        click.echo(f"{name:12} {value if isinstance(value, str) else f'{value:.4f}'}")
