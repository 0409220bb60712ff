"""Reading examples: CSV, TSV, JSON lines, Parquet and Hugging Face Hub datasets, read strictly.

A broken line is an error that names the line, never a row dropped or a field shifted.
"""

from __future__ import annotations

import collections
import csv
import gzip
import hashlib
import io
import json
import math
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from adapterhub.config import option
from adapterhub.errors import DataError, did_you_mean

_JSON_LINES = dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl")
_SUFFIXES = {".csv": "csv", ".tsv": "tsv", **_JSON_LINES, ".parquet": "parquet"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_SHOWN = 10  # offenders that one error lists before it counts the rest


@dataclass(frozen=True)
class DataOptions:
    """Where the examples are and which columns hold what."""

    train: str | None = option(None, "training data: a file, or a dataset id on the Hub")
    eval: str | None = option(None, "evaluation data: a file, or a dataset id on the Hub")
    text: str = option("text", "the column with the text")
    pair: str | None = option(None, "the column with the second text, for tasks on pairs")
    label: str = option("label", "the column with the label")
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "hub"] = option(
        "auto", "the format of the data; auto goes by the file's suffix"
    )
    quoted: bool | None = option(None, "whether quotes enclose TSV fields; null finds it out")
    header: bool = option(True, "whether the first line names the columns; else they are 0, 1, ...")
    rows: int | None = option(None, "train on this many rows, drawn with the run's seed")
    subset: str | None = option(None, "the configuration of a Hub dataset, such as sst2 of glue")
    train_split: str = option("train", "the split of a Hub dataset to train on")
    eval_split: str = option("validation", "the split of a Hub dataset to evaluate on")


@dataclass(frozen=True)
class Example:
    """One text or pair of texts; the label is a class name, a number (regression) or unknown."""

    text: str
    pair: str | None = None
    label: str | float | None = None


@dataclass(frozen=True)
class _Table:
    """Named columns, read when asked for; `lines` says where in the source each row is."""

    source: str
    unit: str
    columns: tuple[str, ...]
    lines: Sequence[int]
    column: Callable[[str], Iterable[object]]


def read_examples(
    source: str,
    options: DataOptions,
    *,
    labelled: bool,
    regression: bool = False,
    split: str = "train",
) -> list[Example]:
    """The examples in a file or Hub dataset, in order.

    Labels are strings as they stand in the data, without outer blanks (the class names of a Hub
    dataset that has them), or floats for `regression`. Without `labelled` the label column is not
    read. `split` is "train" or "eval", which stand for the options `train_split` and `eval_split`,
    or the name of a Hub split.

    Raises DataError where the source is missing, empty, broken or lacks a column, or where a text
    or label is missing or of a wrong kind.
    """
    table = _read_table(source, options, split)
    names = (options.text, options.pair, options.label if labelled else None)
    _check_columns(table, [name for name in names if name is not None])
    blank: list[object] = [None] * len(table.lines)
    texts, pairs, labels = (blank if n is None else list(table.column(n)) for n in names)
    wrong: list[str] = []
    examples = []
    for line, text, pair, label in zip(table.lines, texts, pairs, labels, strict=True):
        named = ((options.text, text), (options.pair, pair))
        problems = [_text_problem(value, name) for name, value in named if name is not None]
        read, problem = _read_label(label, regression) if labelled else (None, "")
        wrong += [f"{table.unit} {line}: {p}" for p in (*problems, problem) if p]
        examples.append(Example(str(text), None if pair is None else str(pair), read))
    if wrong:
        raise DataError(f"{source} has rows that cannot be used", offenders=_first(wrong))
    return examples


def read_texts(source: str, options: DataOptions) -> list[Example]:
    """The texts of a source, without labels; raises DataError as `read_examples` does."""
    return read_examples(source, options, labelled=False, split="eval")


def read_lines(stream: TextIO) -> list[Example]:
    """One text a line; a blank line is an empty text, so that predictions stay aligned."""
    return [Example(line.rstrip("\r\n")) for line in stream]


def sample(examples: Sequence[Example], rows: int | None, seed: int) -> list[Example]:
    """`rows` examples drawn with `seed`, in their first order; all, if there are not more."""
    if rows is not None and rows < 1:
        raise DataError(f"rows is {rows}", expected="1 or more, or null for all")
    if rows is None or rows >= len(examples):
        return list(examples)
    chosen = random.Random(seed).sample(range(len(examples)), rows)
    return [examples[i] for i in sorted(chosen)]


def labels_of(examples: Iterable[Example]) -> list[str]:
    """The distinct class labels, sorted; in the order of numbers if all are numbers."""
    labels = sorted({e.label for e in examples if isinstance(e.label, str)})
    if all(_NUMBER.fullmatch(label) for label in labels):
        labels.sort(key=float)
    return labels


def check_labels(train_labels: Sequence[str], eval_examples: Iterable[Example]) -> None:
    """Raise DataError if training has fewer than two labels or evaluation has one it lacks."""
    if len(train_labels) < 2:
        raise DataError(
            f"the training data has {len(train_labels)} label(s)",
            offenders=[repr(label) for label in train_labels],
            expected="two or more classes",
            hint="check the option label, the name of the label column",
        )
    unseen = collections.Counter(e.label for e in eval_examples if e.label not in train_labels)
    if unseen:
        raise DataError(
            "the evaluation data has labels that the training data lacks",
            offenders=[
                f"{label!r}: {unseen[label]} example(s)" for label in sorted(unseen, key=str)
            ],
            expected=f"one of {', '.join(_first([repr(label) for label in train_labels]))}",
        )


def data_hash(examples: Iterable[Example]) -> str:
    """The sha256, in hex, of the examples as JSON lines `[text, pair, label]`, in order."""
    digest = hashlib.sha256()
    for e in examples:
        row = json.dumps([e.text, e.pair, e.label], separators=(",", ":"))
        digest.update(f"{row}\n".encode("ascii"))
    return digest.hexdigest()


def _first(items: Sequence[str]) -> list[str]:
    rest = len(items) - _SHOWN
    return [*items[:_SHOWN], *([f"... and {rest} more"] if rest > 0 else [])]


def _text_problem(value: object, column: str | None) -> str:
    if value is None:
        return f"{column!r} is missing"
    if not isinstance(value, str):
        return f"{column!r} is a {type(value).__name__}, not text"
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        return f"{column!r} holds half of a surrogate pair, which is not Unicode text"
    return ""


def _read_label(value: object, regression: bool) -> tuple[str | float | None, str]:
    text = "" if value is None else str(value).strip()
    if not text or value != value:  # NaN is how a table of floats says missing.
        return None, "the label is empty"
    if not isinstance(value, (str, int, float)):
        return None, f"the label is a {type(value).__name__}, not a string or number"
    if not regression:
        return text, ""
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(number):
        return None, f"the label {text[:40]!r} is not a number"
    return number, ""


def _check_columns(table: _Table, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise DataError(
            f"{table.source} has no such column",
            offenders=[f"{name!r}{did_you_mean(name, table.columns)}" for name in missing],
            expected=f"one of {', '.join(map(repr, table.columns))}",
            hint="set the options text, pair and label; header: false if no line names columns",
        )
    twice = [repr(name) for name in names if table.columns.count(name) > 1]
    if twice:
        raise DataError(f"{table.source} has two columns of one name", offenders=twice)


def _read_table(source: str, options: DataOptions, split: str) -> _Table:
    kind = _format_of(source, options)
    if kind == "hub":
        roles = {"train": options.train_split, "eval": options.eval_split}
        table = _read_hub(source, options.subset, roles.get(split, split))
    elif kind == "parquet":
        table = _read_parquet(source)
    elif kind == "jsonl":
        table = _read_json_lines(source, _read_text(source))
    else:
        table = _read_delimited(source, kind, options)
    if not table.lines:
        raise DataError(f"{source} names its columns but has no rows")
    return table


def _format_of(source: str, options: DataOptions) -> str:
    if options.format != "auto":
        return options.format
    suffix = Path(source.lower().removesuffix(".gz")).suffix
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if Path(source).exists():
        raise DataError(
            f"the format of {source} cannot be told from its name",
            expected=f"a file that ends in {', '.join(_SUFFIXES)} (text also with .gz)",
            hint="set the option format, as in format: tsv",
        )
    # What cannot be a Hub id can only be a file, which is not there: reading it says so.
    return "hub" if _HUB_ID.fullmatch(source) else "csv"


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        near = did_you_mean(path.name, (entry.name for entry in path.parent.glob("*")))
        raise DataError(f"there is no file {str(path)!r}{near}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _read_text(source: str) -> str:
    data = _read_bytes(Path(source))
    try:
        data = gzip.decompress(data) if source.lower().endswith(".gz") else data
        text = data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source} is not a whole gzip file: {error}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{source}, line {line}: not UTF-8", hint="save it as UTF-8") from error
    if not text.strip():
        raise DataError(f"{source} is empty")
    return text


def _read_delimited(source: str, kind: str, options: DataOptions) -> _Table:
    text = _read_text(source)
    delimiter, quoted = ("\t", options.quoted) if kind == "tsv" else (",", True)
    if quoted is None:
        quoted = _looks_quoted(text)
    rows = list(_quoted_rows(source, text, delimiter) if quoted else _plain_rows(text))
    names = list(map(str, range(len(rows[0][1]))))
    if options.header:
        names = [name.strip() for name in rows.pop(0)[1]]
        while not names[-1] and len(names) > 1:
            names.pop()
    _check_widths(source, rows, len(names))
    cells = {name: [row[i] for _, row in rows] for i, name in enumerate(names)}
    return _Table(source, "line", tuple(names), [line for line, _ in rows], cells.__getitem__)


def _check_widths(source: str, rows: list[tuple[int, list[str]]], width: int) -> None:
    ragged = [(line, row) for line, row in rows if len(row) < width or any(row[width:])]
    if ragged:
        raise DataError(
            f"{source} has lines of another width",
            offenders=_first([f"line {line}: {len(row)} fields" for line, row in ragged]),
            expected=f"{width} fields in each line",
            hint="set quoted: false for a TSV file where quotes are text, true where they enclose",
        )


def _plain_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        fields = line.removesuffix("\r").split("\t")
        if fields != [""]:
            yield number, fields


def _quoted_rows(source: str, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    limit = csv.field_size_limit(max(len(text), 1))
    line = 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{source}, line {line}: {error}",
            expected='fields such as one, "one, two" or "a ""quoted"" word"',
            hint="in TSV files where quotes are text, set quoted: false",
        ) from error
    finally:
        csv.field_size_limit(limit)


_FIELD = re.compile(r'("(?:[^"]|"")*"|[^"\t\r\n]*)(\t|\r\n|\r|\n|\Z)')


def _looks_quoted(text: str) -> bool:
    """Whether the quotes in a TSV file enclose fields, rather than being text as in GLUE's files.

    They do where every quote encloses a field, and either an enclosed field needs it (it holds a
    tab, a line end or a doubled quote, or is empty), or each row has an enclosed field.
    """
    text = text.rstrip("\r\n")
    if '"' not in text:
        return False
    position, needed, in_row, in_each_row = 0, False, False, True
    while position < len(text):
        match = _FIELD.match(text, position)
        if match is None:
            return False
        field, end = match.groups()
        if field.startswith('"'):
            in_row = True
            needed = needed or field == '""' or bool(re.search(r'[\t\r\n"]', field[1:-1]))
        if end != "\t":
            in_each_row, in_row = in_each_row and in_row, False
        position = match.end()
    return needed or in_each_row


def _read_json_lines(source: str, text: str) -> _Table:
    lines, rows, wrong = [], [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__}, not an object")
            lines.append(number)
            rows.append(row)
        except (ValueError, RecursionError) as error:
            wrong.append(f"line {number}: {error}")
    if wrong:
        expected = 'one object a line, such as {"text": "good", "label": "1"}'
        raise DataError(f"{source} is not JSON lines", offenders=_first(wrong), expected=expected)
    columns = tuple(dict.fromkeys(key for row in rows for key in row))
    return _Table(source, "line", columns, lines, lambda name: (row.get(name) for row in rows))


def _read_parquet(source: str) -> _Table:
    import pyarrow.parquet

    data = _read_bytes(Path(source))
    try:
        table = pyarrow.parquet.read_table(io.BytesIO(data))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{source} is not a Parquet file: {error}") from error
    lines, columns = range(1, table.num_rows + 1), tuple(table.column_names)
    return _Table(source, "row", columns, lines, lambda name: table.column(name).to_pylist())


def _read_hub(name: str, subset: str | None, split: str) -> _Table:
    import datasets

    try:
        data = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # The Hub, its client and the cache each raise their own.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{name!r} is no file here, and cannot be loaded as a Hub dataset: {reason}",
            expected=f"a dataset id with the split {split!r}, or a file",
            hint="without network, give a file, or load it once with network: the cache keeps it",
        ) from error
    lines = range(1, data.num_rows + 1)
    return _Table(name, "row", tuple(data.column_names), lines, lambda n: _hub_column(data, n))


def _hub_column(data: Any, name: str) -> list[object]:
    names: Sequence[str] | None = getattr(data.features[name], "names", None)
    if names is None:
        return list(data[name])
    # The Hub writes -1 for a label that is not public.
    return [None if index is None or index < 0 else names[index] for index in data[name]]
