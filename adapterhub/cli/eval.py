"""`adapterhub eval`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import print_facts, print_json, print_table, say, shown_score
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
from adapterhub.cli.compare import difference_lines
from adapterhub.data.examples import classes_in, notes_on_scores
from adapterhub.errors import ConfigError
from adapterhub.files.shown_table import ShownTable
from adapterhub.status import doing, reading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapterhub.data.options import DataOptions
    from adapterhub.inference.open import Predictor
    from adapterhub.inference.record import TrainingRecord
    from adapterhub.pages.evaluation import EvaluationResult
    from adapterhub.tasks import Task


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
@click.option(
    "--against-backbone",
    is_flag=True,
    help="Also evaluate with the adapter off, and test the difference.",
)
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
    against_backbone: bool,
    as_json: bool,
    **columns: Any,
) -> None:
    """Evaluate an adapter, or an untrained backbone, on labelled data.

    ADAPTER is a run folder, an adapter folder or a published name. Without it, --backbone and
    --task evaluate a language model that was not trained for the task (zero-shot); --examples and
    --shots put labelled examples in front of each prompt (few-shot), never a row's own.

    --against-backbone shows what an adapter adds to its backbone, or what it makes it forget on
    other data.
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
        _refuse_against(against_backbone)
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
    scored, bare = _evaluate(opened, rows, choice.places(len(rows)), against_backbone)
    for note in notes_on_scores(len(rows), classes_in(rows, opened.task.labels(rows))):
        say(note, err=True)
    if bare is not None:
        _show_both(scored, bare, Path(str(reference)).name, as_json)
    else:
        _show(scored, as_json)


def _show(scored: EvaluationResult, as_json: bool) -> None:
    """Print the scores."""
    if as_json:
        print_json({"examples": scored.examples, **_json(scored)})
        return
    errors = scored.errors
    scores = {name: shown_score(value, errors.get(name)) for name, value in scored.metrics.items()}
    print_facts({"examples": f"{scored.examples:,}", **scores}, width=12)


def _evaluate(
    opened: Predictor, rows: Sequence[Any], places: Sequence[str], against_backbone: bool
) -> tuple[EvaluationResult, EvaluationResult | None]:
    """Evaluate with the adapter, and without it if required."""
    if against_backbone:
        bare, scored = opened.scored_off_and_on(rows, places)
        return scored, bare
    with doing("evaluating"):
        return opened.scored(rows, places), None


def _json(scored: EvaluationResult) -> dict[str, Any]:
    intervals = {name: [e.low, e.high] for name, e in scored.errors.items() if e.interval}
    return {**scored.metrics, "intervals": intervals}


def _show_both(scored: EvaluationResult, bare: EvaluationResult, name: str, as_json: bool) -> None:
    """Print the scores with and without the adapter, and their difference."""
    from dataclasses import asdict

    from adapterhub.pages.row_scores import difference

    pair = None
    if scored.outcomes is not None and bare.outcomes is not None:
        pair = difference(bare.outcomes, scored.outcomes)
    if as_json:
        both = {**_json(scored), "backbone": _json(bare)}
        change = {**asdict(pair), "significant": pair.is_significant} if pair else None
        print_json({"examples": scored.examples, **both, "difference": change})
        return
    rows = [
        [metric, *(shown_score(s.metrics[metric], s.errors.get(metric)) for s in (bare, scored))]
        for metric in scored.metrics
        if metric in bare.metrics
    ]
    counts = ["examples", *(f"{each.examples:,}" for each in (bare, scored))]
    print_table(ShownTable(["", "backbone", name], [counts, *rows], numbers=True))
    for line in difference_lines(name, "backbone", pair) if pair else ():
        say(line)


def _with_shots(
    task: Task, examples: str | None, shots: int | None, seed: int, options: DataOptions
) -> Task:
    if not examples and not shots:
        return task
    if not examples or not shots:
        raise _shots_error("--examples and --shots go together")
    return task.with_shots(task.read(examples, options, "train"), shots, seed)


def _refuse_against(against_backbone: bool) -> None:
    if against_backbone:
        raise ConfigError(
            "--against-backbone has no adapter to compare with the backbone",
            expected="adapterhub eval ADAPTER --data FILE --against-backbone",
        )


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
