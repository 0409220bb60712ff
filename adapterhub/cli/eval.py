"""`adapterhub eval`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from adapterhub.errors import ConfigError

if TYPE_CHECKING:
    from adapterhub.training.restore import Trained


@click.command("eval")
@click.argument("folder", metavar="[DIR]", required=False)
@click.option("--data", required=True, help="The labelled data: a file, or a Hub data set.")
@click.option("--text", help="The column with the text, if not the one of the training data.")
@click.option("--pair", help="The column with the second text.")
@click.option("--label", help="The column with the label.")
@click.option("--target", "eval_target", help="A file with the target texts, one a line.")
@click.option("--task", help="Without DIR: what to evaluate the backbone on, as it is.")
@click.option("--backbone", help="Where to load the backbone from, if not from its own id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    folder: str | None,
    data: str,
    task: str | None,
    backbone: str | None,
    as_json: bool,
    **columns: Any,
) -> None:
    """Evaluate the adapter in DIR (a run's output, or an adapter's folder) on labelled data.

    Without DIR, --backbone and --task evaluate a backbone that no one trained for the task: the
    baseline of language-model tasks, such as zero-shot classification by a prompt.
    """
    from adapterhub.training.restore import open_adapter, open_backbone, trained

    known = trained(folder) if folder else _untrained(backbone, task)
    given = {name: value for name, value in columns.items() if value is not None}
    examples = known.task.read(data, replace(known.data, **given), "eval")
    opened = open_adapter(folder, backbone) if folder else open_backbone(str(backbone), known.task)
    metrics = opened.evaluate(examples)
    if as_json:
        click.echo(json.dumps({"examples": len(examples), **metrics}))
        return
    for name, value in {"examples": f"{len(examples):,}", **metrics}.items():
        click.echo(f"{name:12} {value if isinstance(value, str) else f'{value:.4f}'}")


def _untrained(backbone: str | None, task: str | None) -> Trained:
    from adapterhub.training.data import DataOptions
    from adapterhub.training.restore import Trained
    from adapterhub.training.tasks import task_of

    if not backbone or not task:
        raise ConfigError(
            "there is nothing to evaluate",
            expected="the folder of an adapter, or --backbone and --task",
            hint="adapterhub eval DIR --data FILE",
        )
    return Trained(task_of(task), DataOptions())
