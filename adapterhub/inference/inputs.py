"""Inputs for prediction: texts, rows and chats, read as the examples of a task."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from adapterhub.config.user_folders import is_file
from adapterhub.data.chat_formats import messages_of
from adapterhub.data.columns import ColumnChoice
from adapterhub.data.options import PREDICT, DataOptions
from adapterhub.data.parquet import plain_values
from adapterhub.data.table import Table
from adapterhub.data.tables import first_few, keep_table, read_table, table_of_objects
from adapterhub.errors import DataError
from adapterhub.tasks import Encoded, Task
from adapterhub.tasks.common.batches import Setting

_FORMS = (
    "a text; a tuple of texts, such as a pair; a row, {column: value}; for language models a list "
    "of messages; or a list or table of these"
)
_TYPED = re.compile(r'adapterhub predict ADAPTER (".*)')
_TEXTS = ("", ".txt", ".csv", ".tsv", ".tab")
_ROWS = "the rows"  # the place in errors, since there is no file
_LOOKED_AT = 200  # characters of a text: one with an ASCII letter or digit has tokens
_reading = threading.Lock()  # tables are looked up by their source, which is the same for all rows


class EmptyInputError(DataError):
    """Inputs without a text, for which no prediction is possible."""


def empty_inputs(task: Task, examples: Sequence[Any], setting: Setting) -> list[int]:
    """Return the indices of examples without a text: empty, blank, or without tokens."""
    return [
        number
        for number, example in enumerate(examples)
        if any(_is_nothing(text, setting) for text in task.read_texts(example))
    ]


def _is_nothing(text: str, setting: Setting) -> bool:
    if not text.strip():
        return True
    if any(letter.isascii() and letter.isalnum() for letter in text[:_LOOKED_AT]):
        return False
    return not setting.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


_KEEP = (
    '--keep-empty, keep_empty=True in Python or {"keep_empty": true} in a request: an empty '
    "prediction in its place"
)


def empty_error(
    empty: Sequence[int], places: Sequence[str], count: int, hint: str = _KEEP
) -> EmptyInputError:
    """Build the error for empty inputs; `places` are their names."""
    return EmptyInputError(
        f"{len(empty):,} of {count:,} inputs {'have' if len(empty) > 1 else 'has'} no text"
        if count > 1
        else "the input has no text",
        offenders=first_few([f"{places[n]}: empty, blank, or without a token" for n in empty]),
        expected="a text in each field of each input",
        hint=hint,
    )


def read_inputs(
    task: Task, source: str, options: DataOptions, *, keep_empty: bool = False
) -> tuple[list[Any], ColumnChoice]:
    """Read the examples of a file for prediction, one per row, and their columns.

    With `keep_empty`, a missing cell is an empty text.

    Raises:
        DataError: the file cannot be read, or its columns are ambiguous.
    """
    options = replace(options, skip_empty=False)
    if (table := _nameless(task, source, options)) is not None:
        rows = zip(*(map(str, table.column(name)) for name in table.columns), strict=True)
        notes = (f"{table.shown_source}: {table.described()}", *table.notes)
        examples = [task.example(texts_of(list(row), task, options), options) for row in rows]
        return examples, ColumnChoice(options, table, notes)
    fitted, choice = task.fitted(source, options, PREDICT, labelled=False)
    if keep_empty:
        table = without_missing(read_table(source, choice.options, PREDICT), choice.options)
        keep_table(table, source, choice.options, PREDICT)
    return fitted.read(source, choice.options, PREDICT, labelled=False), choice


def without_missing(table: Table, options: DataOptions) -> Table:
    """Return a table in which missing texts are empty."""
    texts = {options.text_column, options.pair}

    def read(name: str) -> Iterable[Any]:
        values = table.column(name)
        return ["" if plain_cell(v) is None else v for v in values] if name in texts else values

    return replace(table, column=read)


def texts_of(cells: list[str], task: Task, options: DataOptions) -> list[str]:
    """Return the texts of a line: a single cell is split at tabs into as many as the task reads."""
    return cells[0].split("\t", task.fields(options) - 1) if len(cells) == 1 else cells


def _nameless(task: Task, source: str, options: DataOptions) -> Table | None:
    """Return the table of a file whose lines are texts, in order; None if columns are chosen.

    Such files have no column names, and no other columns than a prediction reads.
    """
    if Path(source).suffix.lower() not in _TEXTS or not is_file(source):
        return None
    table = read_table(source, options, PREDICT)
    count, most = len(table.columns), task.fields(options)
    named = {options.text, options.pair} & {*table.columns}
    is_plain = table.columns == ("text",)
    lines = table.header is False and table.unit == "line" and (is_plain or not named)
    return table if lines and count in (1, most or count) else None


def examples_of(
    inputs: Any, task: Task, options: DataOptions, *, keep_empty: bool = False
) -> tuple[list[Any], bool]:
    """Return examples, and whether the input is a single one instead of a list.

    Args:
        inputs: the user's input.
        task: the task of the adapter.
        options: the data options that it was trained with.
        keep_empty: accept a missing value as an empty text.

    Raises:
        DataError: it has another form, or rows lack the columns of the training data.
    """
    one = isinstance(inputs, str | os.PathLike | tuple | Mapping) or is_dataclass(inputs)
    single = one or plain_cell(inputs) is None
    items = [inputs] if single else items_of(inputs)
    if not single and messages_of(items) is not None and _is_message(items[0]):
        single, items = True, [items]
    rows = [isinstance(item, Mapping) for item in items]
    try:
        if items and all(rows):
            return _read_rows(items, task, options, keep_empty), single
        if wrong := [f"item {n}: {type(items[n]).__name__}" for n, row in enumerate(rows) if row]:
            raise DataError("rows and other inputs in one list", offenders=first_few(wrong))
        return [_example(_filled(item), task, options) for item in items], single
    except DataError as error:
        raise _in_python(error, options) from error


def _filled(item: Any) -> Any:
    """Return an input with empty texts for missing ones, whose numbers are reported."""
    if isinstance(item, tuple):
        return tuple("" if plain_cell(text) is None else text for text in item)
    return "" if plain_cell(item) is None else item


def _is_message(item: Mapping[str, Any]) -> bool:
    """Return whether an object is a chat message instead of a row with such columns."""
    return item.keys() >= {"role", "content"} or item.keys() >= {"from", "value"}


def read_example(value: Any, task: Task, options: DataOptions) -> Any:
    """Return one input as an example of the task.

    Raises:
        DataError: it has another form, lacks a column or a text, or holds several inputs.
    """
    refuse_half_characters(value)
    examples, single = examples_of(value, task, options)
    if not single:
        raise DataError(
            f"a list of {len(examples)} inputs",
            expected="one input for each request: a text, a tuple of texts, or a row",
            hint="submit each of them; they are computed together",
        )
    return examples[0]


def refuse_half_characters(value: Any) -> None:
    """Refuse texts with half of a surrogate pair, which tokenizers do not accept.

    Raises:
        DataError: a text contains one.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"a text with half a character, U+{ord(value[error.start]):04X}",
                expected="text of whole characters",
            ) from None
    elif isinstance(value, Mapping):
        refuse_half_characters([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            refuse_half_characters(each)


def encoded_example(example: Any, task: Task, setting: Setting) -> Encoded:
    """Encode one example.

    Raises:
        EmptyInputError: it has no text.
    """
    if empty_inputs(task, [example], setting):
        raise empty_error([0], ["the input"], 1)
    return task.encode([example], setting, labelled=False)


def items_of(inputs: Any, action: str = "predict on", expected: str = _FORMS) -> list[Any]:
    """Return the items of a list, or the rows of a table: pandas, polars, pyarrow, datasets."""
    if hasattr(inputs, "column_names") and hasattr(inputs, "to_list"):
        inputs = inputs.with_format("arrow")[:]  # a datasets table: files are not decoded
    if hasattr(inputs, "column_names") and hasattr(inputs, "to_pylist"):  # of Arrow
        columns = [plain_values(inputs.column(name)) for name in inputs.column_names]
        return [
            dict(zip(inputs.column_names, row, strict=True)) for row in zip(*columns, strict=True)
        ]
    for rows in ("to_pylist", "to_dicts"):
        if hasattr(inputs, rows):
            return list(getattr(inputs, rows)())
    if hasattr(inputs, "columns") and hasattr(inputs, "to_dict"):
        return list(inputs.to_dict("records"))
    if isinstance(inputs, Iterable) and not isinstance(inputs, bytes):
        return list(inputs)
    raise DataError(f"cannot {action} {type(inputs).__name__}", expected=expected)


def _read_rows(
    rows: Sequence[Mapping[Any, Any]], task: Task, options: DataOptions, keep_empty: bool
) -> list[Any]:
    """Read rows like a table with the columns of the training data."""
    plain = [{str(name): plain_cell(value) for name, value in row.items()} for row in rows]
    table = table_of_objects(_ROWS, "row", dict(enumerate(plain)))
    with _reading:
        # A format prevents rows from being taken for a file of that name.
        options = replace(options, format="jsonl", skip_empty=False)
        keep_table(table, _ROWS, options, PREDICT)
        return read_inputs(task, _ROWS, options, keep_empty=keep_empty)[0]


def plain_cell(value: Any) -> Any:
    """Return a cell of a row; None for NaN, which pandas uses for an empty one."""
    return None if isinstance(value, float) and value != value else value


def _example(item: Any, task: Task, options: DataOptions) -> Any:
    if is_dataclass(item):  # an example of the task
        return item
    if isinstance(item, list) and (messages := messages_of(item)) is not None:
        if (chat := task.chat_example(messages)) is not None:
            return chat
        raise DataError(
            f"this adapter, for {task.name}, takes no chats",
            expected="an adapter for a language model with a chat template",
            hint='predict("a text")',
        )
    texts = [item] if isinstance(item, str | os.PathLike) else item
    if not isinstance(texts, list | tuple) or not all(
        isinstance(text, str | os.PathLike) for text in texts
    ):
        raise DataError(f"cannot predict on {type(item).__name__}", expected=_FORMS)
    most = task.fields(options)
    if not texts or (most and len(texts) > most):
        raise DataError(
            f"{len(texts)} texts for one prediction; this adapter reads {most or 'at least 1'}",
            expected=_FORMS,
        )
    return task.example([os.fspath(text) for text in texts], options)


def _in_python(error: DataError, options: DataOptions) -> DataError:
    """Return an error with a hint for Python instead of the command line."""
    hint = error.hint
    if match := _TYPED.match(hint):
        texts = re.findall(r'"[^"]*"', match[1])
        hint = f"predict(({', '.join(texts)}))"
    elif "--" in hint:
        read = map(repr, filter(None, (options.text_column, options.pair)))
        hint = f"rows with the columns of the training data: {', '.join(read)}"
    return DataError(error.problem, expected=error.expected, hint=hint, offenders=error.offenders)
