"""`adapterhub predict`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from adapterhub.errors import DataError, printable

if TYPE_CHECKING:
    from adapterhub.inference.record import TrainingRecord


@click.command("predict")
@click.argument("folder", metavar="DIR")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--data", help="A file with texts, or - for standard input, one text a line.")
@click.option("--text", help="The column with the text, if not the one of the training data.")
@click.option(
    "--pair",
    multiple=True,
    help="The second text or a further one (with TEXT), or the column with it (with --data).",
)
@click.option("--backbone", help="Where to load the backbone from, if not from its own id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def command(
    folder: str,
    texts: tuple[str, ...],
    data: str | None,
    text: str | None,
    pair: tuple[str, ...],
    backbone: str | None,
    as_json: bool,
) -> None:
    """Predict with the adapter in DIR: for each TEXT, for the rows of --data, or for each line of
    standard input.

    On standard input the texts of one example are one line, with tabs between them.
    """
    from adapterhub.inference.open import open_adapter
    from adapterhub.inference.record import read_training_record

    known = read_training_record(folder)
    if pair and known.task.fields(known.data) == 1:
        raise DataError("the adapter was trained on single texts, and a second text is given")
    if texts:
        examples = [known.task.example([each, *pair], known.data) for each in texts]
    elif data not in (None, "-"):
        options = replace(known.data, text=text or known.data.text)
        examples = known.task.read(
            str(data), replace(options, pair=(*pair, options.pair)[0]), "eval", labelled=False
        )
    else:
        examples = _read_lines(known)
    opened = open_adapter(folder, backbone)
    for example, prediction in zip(examples, opened.predict(examples), strict=True):
        shown = known.task.shown(example)
        if as_json:
            row = {"text": shown[0], **prediction.as_dict()}
            click.echo(printable(json.dumps(row, ensure_ascii=False)))
        else:
            click.echo(printable("\t".join(map(_one_line, [str(prediction), *shown]))))


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\t", "\\t")


def _read_lines(known: TrainingRecord) -> list[Any]:
    if sys.stdin.isatty():
        click.echo("one text a line, then Ctrl-D:", err=True)
    lines = [line.rstrip("\r\n") for line in sys.stdin]
    if not lines:
        raise DataError("nothing to predict on", hint='adapterhub predict DIR "a text"')
    tabs = known.task.fields(known.data) - 1
    return [known.task.example(line.split("\t", tabs), known.data) for line in lines]
