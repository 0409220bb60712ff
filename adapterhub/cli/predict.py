"""`adapterhub predict`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import click

from adapterhub.errors import DataError
from adapterhub.training.data import DataOptions, Example, read_lines, read_texts


@click.command("predict")
@click.argument("folder", metavar="DIR")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--data", help="A file with texts, or - for standard input, one text a line.")
@click.option("--text", help="The column with the text, if not the one of the training data.")
@click.option("--pair", help="The second text (with TEXT), or the column with it (with --data).")
@click.option("--backbone", help="Where to load the backbone from, if not from its own id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def command(
    folder: str,
    texts: tuple[str, ...],
    data: str | None,
    text: str | None,
    pair: str | None,
    backbone: str | None,
    as_json: bool,
) -> None:
    """Predict with the adapter in DIR: for each TEXT, for the rows of --data, or for each line of
    standard input.

    On standard input a pair of texts is one line with a tab between them.
    """
    from adapterhub.training.restore import open_adapter, trained_columns

    trained = trained_columns(folder)
    if texts:
        examples = [Example(each, pair) for each in texts]
    else:
        examples = _read(
            data, replace(trained, text=text or trained.text, pair=pair or trained.pair)
        )
    _check_pairs(examples, trained)
    opened = open_adapter(folder, backbone)
    for example, prediction in zip(examples, opened.predict(examples), strict=True):
        if as_json:
            click.echo(
                json.dumps({"text": example.text, **prediction.as_dict()}, ensure_ascii=False)
            )
        else:
            click.echo(_line(example, prediction.label, prediction.scores))


def _read(data: str | None, options: DataOptions) -> list[Example]:
    if data not in (None, "-"):
        return read_texts(str(data), options)
    if sys.stdin.isatty():
        click.echo("one text a line, then Ctrl-D:", err=True)
    lines = read_lines(sys.stdin)
    if not lines:
        raise DataError("nothing to predict on", hint='adapterhub predict DIR "a text"')
    if options.pair is None:
        return lines
    split = [line.text.partition("\t") for line in lines]
    return [Example(first, second if tab else None) for first, tab, second in split]


def _check_pairs(examples: list[Example], trained: DataOptions) -> None:
    given = [example.pair is not None for example in examples]
    if trained.pair is not None and not all(given):
        raise DataError(
            "the adapter was trained on pairs of texts, and a second text is missing",
            hint='adapterhub predict DIR "first text" --pair "second text"',
        )
    if trained.pair is None and any(given):
        raise DataError("the adapter was trained on single texts, and a second text is given")


def _line(example: Example, label: str | float, scores: dict[str, float]) -> str:
    shown = f"{label:.3f}" if isinstance(label, float) else f"{label} {scores[label]:.3f}"
    return f"{shown}\t{example.text}" + (f"\t{example.pair}" if example.pair is not None else "")
