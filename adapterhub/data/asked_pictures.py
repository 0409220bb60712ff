"""Examples of a picture, what is asked about it, and the answer: from tables, row by row.

The picture is a file or bytes, as in `adapterhub.data.media`. A table without questions has
captions, one for each picture: the answer to the same question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterhub.data.columns import Wants, choose_columns
from adapterhub.data.examples import EmptyCell, read_rows, refuse, text_problem
from adapterhub.data.media import MediaFile, open_media, opened_cell
from adapterhub.data.options import DataOptions
from adapterhub.data.picture_chats import Turn

Open = Callable[[bytes], Any]


@dataclass(frozen=True)
class AskedPicture(MediaFile):
    """A picture and what is asked about it; the label is the answer.

    Attributes:
        question: what is asked; "" if the data has no questions.
    """

    question: str = ""

    @property
    def pictures(self) -> tuple[MediaFile, ...]:
        """The picture, as the only one."""
        return (self,)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The question on the picture, as the only message."""
        return (("user", (None, self.question)),)


def ask(name: str, question: str, decode: Open) -> AskedPicture:
    """Return the picture of a path with a question, as they are typed on a command line.

    Args:
        name: the path.
        question: the question.
        decode: decodes the bytes of a file.

    Raises:
        DataError: the file cannot be read or decoded.
    """
    return AskedPicture(**vars(open_media(name, decode)), question=question)


def read_asked(
    source: str, options: DataOptions, split: str, wants: Wants, decode: Open, *, labelled: bool
) -> list[AskedPicture]:
    """Read the pictures of a table, with their questions and answers, in order.

    Args:
        source: the table, a folder with one, or the dataset id.
        options: the format and the columns; `pair` is that of the questions.
        split: "train", "eval" or the name of a Hub split.
        wants: the kind of column for each option.
        decode: decodes the bytes of a file, or raises a ValueError that says what is wrong.
        labelled: whether to read the answers.

    Raises:
        DataError: the source is missing, empty or malformed, or rows are invalid; lists all.
    """
    options = choose_columns(source, options, split, wants, labelled=labelled).options
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    columns = {"picture": options.text_column}
    columns |= {"question": options.pair} if options.pair else {}
    columns |= {"answer": options.label_column} if labelled else {}

    def build(*cells: object) -> AskedPicture:
        row = dict(zip(columns, cells, strict=True))
        question, answer = row.get("question", ""), row.get("answer")
        refuse(
            text_problem(question, str(options.pair), allow_empty="question" not in row),
            _answer_problem(answer, options.label_column) if labelled else "",
        )
        label = str(answer) if labelled else None
        file = opened_cell(row["picture"], label, folder, decode)
        return AskedPicture(**vars(file), question=str(question))

    return read_rows(source, options, split, list(columns.values()), build)


def _answer_problem(answer: object, column: str) -> str:
    """Describe why a cell is no answer, or return ""; numbers are answers as they are written."""
    if isinstance(answer, float) and answer != answer:  # NaN marks a missing number
        return EmptyCell(f"{column!r} is missing")
    is_number = isinstance(answer, int | float)
    return text_problem(str(answer) if is_number else answer, column, allow_empty=False)
