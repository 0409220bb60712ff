"""`adapterhub eval`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import print_facts, print_json, say, shown_score
from adapterhub.cli._options import (
    as_json_option,
    backbone_place_option,
    data_form_options,
    head_option,
    max_length_option,
    registry_option,
    require_signature_option,
    text_column_option,
)
from adapterhub.data.examples import classes_in, notes_on_scores
from adapterhub.errors import ConfigError
from adapterhub.status import doing, reading

if TYPE_CHECKING:
    from adapterhub.data.options import DataOptions
    from adapterhub.inference.record import TrainingRecord
    from adapterhub.tasks import Prediction, Task


@click.command("eval")
@click.argument("reference", metavar="[ADAPTER]", required=False)
@click.option("--data", required=True, help="Labelled data: a file or a Hub dataset.")
@text_column_option
@click.option("--pair", help="Column of the second text.")
@click.option("--label", help="Label column.")
@click.option("--target", "eval_target", help="File of target texts, one per line.")
@data_form_options
@head_option
@max_length_option
@click.option("--task", help="The task of the backbone, or of an ADAPTER that records none.")
@click.option("--examples", help="Without ADAPTER: data for few-shot examples.")
@click.option(
    "--shots",
    type=click.IntRange(1),
    help="Few-shot examples: per label, or in all where answers are generated.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the few-shot sample.")
@backbone_place_option
@registry_option
@require_signature_option
@as_json_option
def command(
    reference: str | None,
    data: str,
    head: str | None,
    max_length: int | None,
    task: str | None,
    backbone: str | None,
    registry: str | None,
    examples: str | None,
    shots: int | None,
    seed: int,
    as_json: bool,
    **columns: Any,
) -> None:
    """Evaluate an adapter, or an untrained backbone, on labelled data.

    ADAPTER is a run folder, an adapter folder or a published name. Without it, --backbone and
    --task evaluate a language model that was not trained for the task (zero-shot); --examples and
    --shots put labelled examples in front of each prompt (few-shot), never a row's own.
    """
    from adapterhub.backbones.torch_free_checks import check_backbone_options
    from adapterhub.inference.record import LONGEST_UNRECORDED, read_training_record

    if backbone:
        check_backbone_options(backbone)
    if reference:
        record = read_training_record(reference, registry, head, task)
        _refuse_shots(examples, shots)
    else:
        record = _untrained(backbone, task)
    chosen = {name: value for name, value in columns.items() if value is not None}
    options = replace(record.data, **chosen)
    with reading(data):
        task_of_data, choice = record.task.fitted(data, options, "eval")
        rows = task_of_data.read(data, choice.options, "eval")
        prompted = _with_shots(task_of_data, examples, shots, seed, options)
    for note in choice.notes:
        say(note, err=True)
    with doing("loading torch"):
        from adapterhub.inference.open import open_adapter, open_backbone

    if reference:
        named = {"registry": registry, "head": head, "task": task, "max_length": max_length}
        opened = open_adapter(reference, backbone, **named)  # type: ignore[arg-type]
    else:
        opened = open_backbone(str(backbone), prompted, max_length or LONGEST_UNRECORDED)
        if opened.task != prompted and opened.task.model_note:
            say(opened.task.model_note, err=True)
    predicted: list[Prediction] = []
    with doing("evaluating"):
        metrics = opened.evaluate(rows, record=predicted, places=choice.places(len(rows)))
        errors = opened.errors(metrics, rows, predicted)
    for note in notes_on_scores(len(rows), classes_in(rows, opened.task.labels(rows))):
        say(note, err=True)
    if as_json:
        intervals = {name: [e.low, e.high] for name, e in errors.items() if e.interval}
        print_json({"examples": len(rows), **metrics, "intervals": intervals})
        return
    scores = {name: shown_score(value, errors.get(name)) for name, value in metrics.items()}
    print_facts({"examples": f"{len(rows):,}", **scores}, width=12)


def _with_shots(
    task: Task, examples: str | None, shots: int | None, seed: int, options: DataOptions
) -> Task:
    if not examples and not shots:
        return task
    if not examples or not shots:
        raise _shots_error("--examples and --shots go together")
    return task.with_shots(task.read(examples, options, "train"), shots, seed)


def _refuse_shots(examples: str | None, shots: int | None) -> None:
    if examples or shots:
        raise _shots_error("few-shot examples are for a backbone without an adapter")


def _shots_error(problem: str) -> ConfigError:
    return ConfigError(problem, expected="--backbone, --task, --examples FILE and --shots N")


def _untrained(backbone: str | None, task: str | None) -> TrainingRecord:
    from adapterhub.data.options import DataOptions
    from adapterhub.inference.record import TrainingRecord
    from adapterhub.tasks import parse_task

    if not backbone or not task:
        raise ConfigError(
            "nothing to evaluate",
            expected="ADAPTER, or --backbone and --task",
            hint="adapterhub eval ADAPTER --data FILE",
        )
    return TrainingRecord(parse_task(task), DataOptions())
