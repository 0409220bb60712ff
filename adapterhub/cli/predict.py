"""`adapterhub predict`."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import print_json, say, say_text
from adapterhub.cli._options import (
    backbone_place_option,
    data_form_options,
    head_option,
    registry_option,
    require_signature_option,
    task_option,
    text_column_option,
)
from adapterhub.cli._predict_table import (
    TABLE_OPTIONS,
    predict_table,
    refuse_beside_input,
    refuse_without_input,
    table_options,
)
from adapterhub.errors import DataError, one_line
from adapterhub.status import doing, reading

if TYPE_CHECKING:
    from adapterhub.inference.record import TrainingRecord


@click.command("predict")
@click.argument("reference", metavar="ADAPTER", required=False)
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--data", help="File of texts, or - for standard input.")
@text_column_option
@click.option(
    "--pair",
    multiple=True,
    help="With TEXT: the second or a further text; with --data: its column.",
)
@data_form_options
@table_options
@task_option
@head_option
@backbone_place_option
@registry_option
@require_signature_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def command(
    reference: str | None,
    texts: tuple[str, ...],
    data: str | None,
    text: str | None,
    pair: tuple[str, ...],
    task: str | None,
    head: str | None,
    backbone: str | None,
    registry: str | None,
    as_json: bool,
    **more: Any,
) -> None:
    """Predict on each TEXT, each row of --data or --input, or each line of standard input.

    ADAPTER is a run folder, an adapter folder or a published name. On standard input, tabs
    separate the texts of an example. --input takes Parquet files of any size; their rows and
    predictions are written to --output. If it is stopped, the same command goes on.
    """
    tables = {name: more.pop(name) for name in TABLE_OPTIONS}
    if tables["source"] is not None:
        refuse_beside_input(texts, {"--data": data, "--json": as_json or None, **more})
        columns: dict[str, Any] = {"text": text, "pair": pair}
        predict_table(
            reference,
            task=task,
            head=head,
            backbone=backbone,
            registry=registry,
            **columns,
            **tables,
        )
        return
    refuse_without_input(tables)
    if reference is None:
        raise click.UsageError("Missing argument 'ADAPTER'.")
    from adapterhub.backbones.early_checks import check_backbone_options
    from adapterhub.inference.record import read_training_record

    if backbone:
        check_backbone_options(backbone)
    record = read_training_record(reference, registry, head, task)
    examples = _examples(record, texts, data, text, pair, more)
    with doing("loading torch"):
        from adapterhub.inference.open import open_adapter

    opened = open_adapter(reference, backbone, registry=registry, head=head, task=task)
    for example, prediction in zip(examples, opened.predict(examples), strict=True):
        shown = record.task.shown(example)
        if as_json:
            print_json({record.task.input_name: shown[0], **prediction.as_dict()})
        else:
            # The whole text, however long: it is the user's own, or was asked for.
            say_text("\t".join(one_line(t, sys.maxsize) for t in (str(prediction), *shown)))


def _examples(
    record: TrainingRecord,
    texts: tuple[str, ...],
    data: str | None,
    text: str | None,
    pair: tuple[str, ...],
    form: dict[str, Any],
) -> list[Any]:
    """Return the examples of the command line, of a file or of standard input.

    Args:
        record: the task of the adapter, and the form of its data.
        texts: the texts of the command line.
        data: a file of texts, or - for standard input.
        text: the text column.
        pair: further texts, or the column with second texts.
        form: the options on the form of the file.
    """
    from adapterhub.data.options import PREDICT

    task = record.task
    if pair and task.fields(record.data) == 1:
        raise DataError("--pair gives a second text, but the adapter was trained on single texts")
    if texts:
        return [task.example([first, *pair], record.data) for first in texts]
    if data in (None, "-"):
        return _read_lines(record)
    given = {name: value for name, value in form.items() if value is not None}
    given |= {"text": text or record.data.text, "pair": pair[0] if pair else record.data.pair}
    options = replace(record.data, **given, skip_empty=False)
    with reading(str(data)):
        _, choice = task.fitted(str(data), options, PREDICT, labelled=False)
        examples = task.read(str(data), choice.options, PREDICT, labelled=False)
    for note in choice.notes:
        say(note, err=True)
    return examples


def _typed() -> str:
    """Read standard input to its end; it is UTF-8 whatever the terminal's encoding is."""
    from adapterhub.data.decode import decode_text

    raw = getattr(sys.stdin, "buffer", None)  # a test's stream may have texts only
    return sys.stdin.read() if raw is None else decode_text(raw.read(), "standard input")


def _read_lines(record: TrainingRecord) -> list[Any]:
    """Read the examples on standard input, one per line, texts separated by tabs."""
    if sys.stdin.isatty():
        say("enter one text per line, then Ctrl-D:", err=True)
    lines = [line.rstrip("\n") for line in io.StringIO(_typed(), newline=None)]
    if not lines:
        raise DataError("nothing to predict on", hint='adapterhub predict ADAPTER "a text"')
    tabs = record.task.fields(record.data) - 1
    return [record.task.example(line.split("\t", tabs), record.data) for line in lines]
