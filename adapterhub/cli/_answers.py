"""Output of `adapterhub predict`: predictions, and texts while they are generated."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import print_json, say_text
from adapterhub.errors import ConfigError, one_line, printable
from adapterhub.files.atomic import replace_file
from adapterhub.recipe.output_folder import writing

if TYPE_CHECKING:
    from adapterhub.inference.open import Predictor
    from adapterhub.tasks import Prediction, Task
    from adapterhub.tasks.common.language_models import Writing


@dataclass(frozen=True)
class HowToWrite:
    """The generation options, and whether texts are printed while they are generated."""

    options: Writing
    stream: bool


@dataclass(frozen=True)
class Shape:
    """The output format of predictions; `output` is a file to write them to instead.

    `every` adds the probabilities of all labels.
    """

    as_json: bool
    every: bool
    output: str | None = None

    def check(self) -> None:
        """Reject a file that cannot be written, and two kinds of output.

        Raises:
            ConfigError: the file has an unknown format, or JSON output is requested as well.
            OutputError: the file exists already.
        """
        if self.output is None:
            return
        if self.as_json:
            raise ConfigError("--json with --output", hint="--output FILE.jsonl")
        if not self.is_picture:  # whose file names depend on the prompts
            from adapterhub.inference.table_file import check_table_file

            check_table_file(Path(self.output))

    @property
    def is_picture(self) -> bool:
        """Return whether the output is an image file."""
        return (self.output or "").lower().endswith(".png")

    def check_use(self, task: Task, typed: bool) -> None:
        """Reject options that do not fit the task, or lines that are `typed`.

        Raises:
            ConfigError: an option does not fit.
        """
        if self.every and not task.has_scores:
            raise ConfigError(f"--all: {task.name} has no probabilities of labels")
        makes = task.outcomes == "images"
        if makes and not (self.is_picture or self.as_json):
            raise ConfigError(
                f"{task.name} generates images, which need an output file",
                expected="a file that ends in .png; of several prompts, it gets a number",
                hint='adapterhub predict ADAPTER "a prompt" --output picture.png',
            )
        if self.is_picture and not makes:
            raise ConfigError(
                f"--output {self.output}: {task.name} makes no images",
                expected="a table: .csv, .tsv, .jsonl or .parquet",
            )
        if self.output and typed:
            raise ConfigError(
                "--output without rows", hint="adapterhub predict ADAPTER FILE --output OUT.csv"
            )

    def files(self, count: int) -> list[Path]:
        """Return new file names for `count` images; several images get numbers.

        Raises:
            OutputError: one of the files exists already.
        """
        from adapterhub.inference.table_file import check_new

        path = Path(str(self.output))
        numbered = [path.with_stem(f"{path.stem}-{number}") for number in range(1, count + 1)]
        files = numbered if count > 1 else [path]
        for file in files:
            check_new(file)
        return files

    def save_pictures(self, predictions: Sequence[Any]) -> list[Path]:
        """Write the image of each prediction; return the files."""
        files = self.files(len(predictions))
        for file, prediction in zip(files, predictions, strict=True):
            with writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                replace_file(file, prediction.png)
        return files

    def show(
        self, task: Task, example: Any, prediction: Prediction, *, alone: bool = False
    ) -> None:
        """Print a prediction, with its input unless it is `alone`."""
        if self.as_json:
            cut = {"truncated": prediction.truncated} if prediction.truncated else {}
            print_json(task.printed(example, prediction) | cut)
            return
        shown = task.shown(example)
        # The whole text, however long: it is the user's own, or was requested.
        cells = (*prediction.cells(self.every), *([] if alone else shown))
        say_text("\t".join(one_line(cell, sys.maxsize) for cell in cells))


def answers(
    opened: Predictor, examples: Sequence[Any], writing: HowToWrite | None, **empty: Any
) -> list[Prediction]:
    """Return a prediction for each example; `writing` is only set for tasks that generate.

    `empty` is the argument of `Predictor.predict_examples` for empty inputs.
    """
    if writing is None or not writing.options.given:
        return opened.predict_examples(examples, **empty)
    with writing.options.sampling():
        return opened.writing(writing.options).predict_examples(examples, **empty)


def print_pieces(pieces: Iterable[str]) -> str:
    """Print the pieces of a text as they arrive, and return the text."""
    text = ""
    for piece in pieces:
        text += piece
        click.echo(printable(piece), nl=False)
    click.echo()
    return text
