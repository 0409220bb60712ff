"""`adapterhub eval`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from adapterhub.errors import ConfigError

if TYPE_CHECKING:
    from adapterhub.data.options import DataOptions
    from adapterhub.inference.record import TrainingRecord
    from adapterhub.tasks import Task


@click.command("eval")
@click.argument("folder", metavar="[DIR]", required=False)
@click.option("--data", required=True, help="The labelled data: a file, or a Hub data set.")
@click.option("--text", help="The column with the text, if not the one of the training data.")
@click.option("--pair", help="The column with the second text.")
@click.option("--label", help="The column with the label.")
@click.option("--target", "eval_target", help="A file with the target texts, one a line.")
@click.option("--task", help="Without DIR: what to evaluate the backbone on, as it is.")
@click.option("--examples", help="Without DIR: labelled data to draw worked examples from.")
@click.option("--shots", type=click.IntRange(1), help="Worked examples of each label.")
@click.option("--seed", default=0, show_default=True, help="Which examples are drawn.")
@click.option("--backbone", help="Where to load the backbone from, if not from its own id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    folder: str | None,
    data: str,
    task: str | None,
    backbone: str | None,
    examples: str | None,
    shots: int | None,
    seed: int,
    as_json: bool,
    **columns: Any,
) -> None:
    """Evaluate the adapter in DIR (a run's output, or an adapter's folder) on labelled data.

    Without DIR, --backbone and --task evaluate a backbone that no one trained for the task: the
    baseline of language-model tasks, such as zero-shot classification by a prompt. With --examples
    and --shots each prompt begins with worked examples: few-shot.
    """
    from adapterhub.inference.open import open_adapter, open_backbone
    from adapterhub.inference.record import read_training_record

    known = read_training_record(folder) if folder else _untrained(backbone, task)
    given = {name: value for name, value in columns.items() if value is not None}
    options = replace(known.data, **given)
    rows = known.task.read(data, options, "eval")
    if examples or shots:
        known = replace(known, task=_few_shot(known.task, folder, examples, shots, seed, options))
    opened = open_adapter(folder, backbone) if folder else open_backbone(str(backbone), known.task)
    metrics = opened.evaluate(rows)
    if as_json:
        click.echo(json.dumps({"examples": len(rows), **metrics}))
        return
    for name, value in {"examples": f"{len(rows):,}", **metrics}.items():
        click.echo(f"{name:12} {value if isinstance(value, str) else f'{value:.4f}'}")


def _few_shot(
    task: Task,
    folder: str | None,
    examples: str | None,
    shots: int | None,
    seed: int,
    options: DataOptions,
) -> Task:
    if folder or not (examples and shots):
        raise ConfigError(
            "worked examples are for a backbone without an adapter",
            expected="--backbone, --task, --examples FILE and --shots N",
        )
    return task.with_shots(task.read(examples, options, "train"), shots, seed)


def _untrained(backbone: str | None, task: str | None) -> TrainingRecord:
    from adapterhub.data.options import DataOptions
    from adapterhub.inference.record import TrainingRecord
    from adapterhub.tasks import parse_task

    if not backbone or not task:
        raise ConfigError(
            "there is nothing to evaluate",
            expected="the folder of an adapter, or --backbone and --task",
            hint="adapterhub eval DIR --data FILE",
        )
    return TrainingRecord(parse_task(task), DataOptions())
