"""Tables of named columns: CSV, TSV, JSON lines, Parquet, plain text, CoNLL columns, Hub datasets.

A malformed line raises an error with its line number; no row is dropped, no field shifted.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterhub.data.decode import decode_text
from adapterhub.data.options import DataOptions
from adapterhub.data.parquet import ExpansionError, open_parquet
from adapterhub.errors import DataError, did_you_mean, read_problem

_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".conll": "conll",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MOST_LISTED = 10  # offenders of one error; the rest are counted


@dataclass(frozen=True)
class Table:
    """Named columns, read on demand.

    Attributes:
        source: the file or dataset id, for errors.
        unit: what `lines` counts: "line", "row" or "sentence at line".
        columns: the column names, in order.
        lines: the location of each row in the source.
        column: reads the values of one column.
    """

    source: str
    unit: str
    columns: tuple[str, ...]
    lines: Sequence[int]
    column: Callable[[str], Iterable[object]]

    def take(self, names: Sequence[str]) -> list[Iterable[object]]:
        """Read the columns of these names.

        Raises:
            DataError: a column is missing, or its name is not unique.
        """
        _check_columns(self, names)
        return [self.column(name) for name in names]


def first_few(items: Sequence[str]) -> list[str]:
    """List the first ten items and the number of the others."""
    rest = len(items) - _MOST_LISTED
    return [*items[:_MOST_LISTED], *([f"... and {rest} more"] if rest > 0 else [])]


def _check_columns(table: Table, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise DataError(
            f"columns not found in {table.source}",
            offenders=[f"{name!r}{did_you_mean(name, table.columns)}" for name in missing],
            expected=f"one of {', '.join(map(repr, table.columns))}",
            hint="set the options text, pair and label; header: false if no line names columns",
        )
    duplicates = [repr(name) for name in names if table.columns.count(name) > 1]
    if duplicates:
        raise DataError(f"{table.source} has duplicate column names", offenders=duplicates)


def read_table(source: str, options: DataOptions, split: str) -> Table:
    """Read the table in a file or Hub dataset.

    Args:
        source: the file or dataset id.
        options: the format and its details.
        split: "train", "eval" or the name of a Hub split.

    Raises:
        DataError: the source is missing, empty or malformed.
    """
    table = _read_format(_format_of(source, options), source, options, split)
    if not table.lines:
        raise DataError(f"{source} has columns but no rows")
    return table


def _read_format(name: str, source: str, options: DataOptions, split: str) -> Table:
    if name == "hub":
        splits = {"train": options.train_split, "eval": options.eval_split}
        return _read_hub(source, options.subset, splits.get(split, split))
    if name == "parquet":
        return _read_parquet(source)
    if name == "jsonl":
        return _read_json_lines(source)
    if name == "text":
        return _read_plain(source)
    if name == "conll":
        return _read_conll(source)
    return _read_delimited(source, name, options)


def _format_of(source: str, options: DataOptions) -> str:
    if options.format != "auto":
        return options.format
    suffix = Path(source.lower().removesuffix(".gz")).suffix
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if Path(source).exists():
        raise DataError(
            f"cannot infer the format of {source} from its name",
            expected=f"a name ending in {', '.join(_SUFFIXES)} (text formats also with .gz)",
            hint="set the option format, as in format: tsv",
        )
    # Not a valid Hub id, so a missing file: reading it raises the right error.
    return "hub" if _HUB_ID.fullmatch(source) else "csv"


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(read_problem(path, error)) from error


def read_text(source: str) -> str:
    """Read a UTF-8 text file, gzipped if its name ends in .gz.

    Raises:
        DataError: the file is missing, empty or not UTF-8.
    """
    data = _read_bytes(Path(source))
    try:
        data = _decompress(source, data) if source.lower().endswith(".gz") else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source} is not a complete gzip file: {error}") from error
    text = decode_text(data, source)
    if not text.strip():
        raise DataError(f"{source} is empty")
    return text


def _decompress(source: str, data: bytes) -> bytes:
    limit = max(100 * len(data), 64 << 20)  # bytes
    with gzip.open(io.BytesIO(data)) as stream:
        text = stream.read(limit + 1)
    if len(text) > limit:
        raise DataError(
            f"{source} has {len(data)} bytes and decompresses to more than {limit}",
            expected="text, which decompresses to about 3 to 20 times its size",
            hint="decompress it yourself if you trust it",
        )
    return text


def _split_lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.split("\n")]


def read_parallel(source: str, target: str) -> Table:
    """Read two plain-text files, line by line, as the columns `text` and `target`.

    Raises:
        DataError: the files differ in their number of lines.
    """
    texts, targets = (_split_lines(read_text(name).removesuffix("\n")) for name in (source, target))
    if len(texts) != len(targets):
        raise DataError(
            f"{source} and {target} are not parallel",
            offenders=[f"{source}: {len(texts)} lines", f"{target}: {len(targets)} lines"],
            expected="one target per line, in the order of the source",
        )
    columns = {"text": texts, "target": targets}
    return Table(source, "line", tuple(columns), range(1, len(texts) + 1), columns.__getitem__)


def _read_plain(source: str) -> Table:
    lines = enumerate(_split_lines(read_text(source)), start=1)
    texts = {number: line for number, line in lines if line.strip()}
    return Table(source, "line", ("text",), list(texts), lambda name: texts.values())


def _read_conll(source: str) -> Table:
    """Read one sentence per row; the first column is also named `text`, the last `label`."""
    sentences = _conll_sentences(read_text(source))
    if not sentences:
        raise DataError(f"{source} has no sentences")
    width = len(sentences[0][0][1])
    _check_widths(source, [token for sentence in sentences for token in sentence], width)
    indices = {str(i): i for i in range(width)} | {"text": 0}
    if width > 1:
        indices["label"] = width - 1

    def column(name: str) -> list[object]:
        return [[fields[indices[name]] for _, fields in sentence] for sentence in sentences]

    starts = [sentence[0][0] for sentence in sentences]
    return Table(source, "sentence at line", tuple(indices), starts, column)


def _conll_sentences(text: str) -> list[list[tuple[int, list[str]]]]:
    """Split CoNLL text into sentences of (line number, fields) tokens."""
    sentences: list[list[tuple[int, list[str]]]] = [[]]
    for number, line in enumerate(text.split("\n"), start=1):
        fields = line.split("\t") if "\t" in line.strip() else line.split()
        if not line.strip() or fields[0] == "-DOCSTART-":
            sentences.append([])
        else:
            sentences[-1].append((number, [field.strip() for field in fields]))
    return [sentence for sentence in sentences if sentence]


def _read_delimited(source: str, kind: str, options: DataOptions) -> Table:
    text = read_text(source)
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
    return Table(source, "line", tuple(names), [line for line, _ in rows], cells.__getitem__)


def _check_widths(source: str, rows: list[tuple[int, list[str]]], width: int) -> None:
    ragged = [(line, row) for line, row in rows if len(row) < width or any(row[width:])]
    if ragged:
        raise DataError(
            f"{source} has rows with the wrong number of fields",
            offenders=first_few([f"line {line}: {len(row)} fields" for line, row in ragged]),
            expected=f"{width} fields in each line",
            hint="for TSV, set quoted: false if quotes are text, true if they enclose fields",
        )


def _plain_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(_split_lines(text), start=1):
        if line:
            yield number, line.split("\t")


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
            hint="for TSV files in which quotes are text, set quoted: false",
        ) from error
    finally:
        csv.field_size_limit(limit)


_FIELD = re.compile(r'("(?:[^"]|"")*"|[^"\t\r\n]*)(\t|\r\n|\r|\n|\Z)')


def _looks_quoted(text: str) -> bool:
    """Return whether the quotes in a TSV file enclose fields, or are text as in GLUE's files.

    They enclose fields if every quote is part of an enclosed field, and either some field needs its
    quotes (it contains a tab, a line end or a doubled quote, or is empty) or every row has an
    enclosed field.
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


def _read_json_lines(source: str) -> Table:
    rows: dict[int, dict[str, Any]] = {}
    problems = []
    for number, line in enumerate(read_text(source).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
        else:
            if isinstance(row, dict):
                rows[number] = row
            else:
                problems.append(f"line {number}: {type(row).__name__}, not an object")
    if problems:
        raise DataError(
            f"{source} is not JSON lines",
            offenders=first_few(problems),
            expected='one object per line, such as {"text": "good", "label": "1"}',
        )
    columns = tuple(dict.fromkeys(key for row in rows.values() for key in row))
    return Table(
        source, "line", columns, list(rows), lambda name: (row.get(name) for row in rows.values())
    )


def _read_parquet(source: str) -> Table:
    import pyarrow

    data = _read_bytes(Path(source))
    try:
        columns = open_parquet(data)
        names, lines = columns.names, range(1, columns.rows + 1)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(f"{source} is not a Parquet file: {error}") from error

    def column(name: str) -> list[object]:
        try:
            return columns.values(name)
        except ExpansionError as error:
            raise DataError(
                f"{source}, column {name!r}: {error}",
                expected="text, which expands to about 3 to 20 times its size",
                hint="if you trust it, convert it to JSON lines",
            ) from error
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
            raise DataError(f"{source}: cannot read column {name!r}: {error}") from error

    return Table(source, "row", names, lines, column)


def _read_hub(name: str, subset: str | None, split: str) -> Table:
    import datasets
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    from adapterhub.backbones.hub_guard import guarded_hub

    try:
        with guarded_hub():
            data = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the Hub, its client and the cache have no common base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, HTTPError):  # it quotes the server, which may repeat a token
            reason = type(error).__name__
        raise DataError(
            f"{name!r} is not a local file and cannot be loaded as a Hub dataset: {reason}",
            expected=f"a dataset id with the split {split!r}, or a file",
            hint="without a network, give a file, or load it once online to fill the cache",
        ) from None
    lines = range(1, data.num_rows + 1)
    return Table(name, "row", tuple(data.column_names), lines, lambda n: _hub_column(data, n))


def _hub_column(data: Any, name: str) -> list[object]:
    feature = data.features[name]
    names: Sequence[str] | None = getattr(feature, "names", None)
    if names is not None:
        # -1 marks a hidden label.
        return [None if index is None or index < 0 else names[index] for index in data[name]]
    tags: Sequence[str] | None = getattr(getattr(feature, "feature", None), "names", None)
    return [[tags[i] for i in row] for row in data[name]] if tags else list(data[name])
