"""Tables of named columns: CSV, TSV, JSON lines, Parquet, plain text, CoNLL columns, Hub datasets.

A broken line is an error that names the line, never a row dropped or a field shifted.
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
from typing import TYPE_CHECKING, Any

from adapterhub.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from adapterhub.data.options import DataOptions

_JSON_LINES = dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl")
_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    **_JSON_LINES,
    ".parquet": "parquet",
    ".txt": "text",
    ".conll": "conll",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SHOWN = 10  # offenders that one error lists before it counts the rest


@dataclass(frozen=True)
class Table:
    """Named columns, read when asked for; `lines` says where in the source each row is."""

    source: str
    unit: str
    columns: tuple[str, ...]
    lines: Sequence[int]
    column: Callable[[str], Iterable[object]]

    def take(self, names: Sequence[str]) -> list[Iterable[object]]:
        """The columns of these names.

        Raises DataError where there is none of a name, or two.
        """
        _check_columns(self, names)
        return [self.column(name) for name in names]


def first_few(items: Sequence[str]) -> list[str]:
    """The first ten, and how many more there are."""
    rest = len(items) - _SHOWN
    return [*items[:_SHOWN], *([f"... and {rest} more"] if rest > 0 else [])]


def _check_columns(table: Table, names: Sequence[str]) -> None:
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


def read_table(source: str, options: DataOptions, split: str) -> Table:
    """The table in a file or Hub dataset; `split` is "train", "eval" or a Hub split.

    Raises DataError where it is missing, empty or broken.
    """
    kind = _format_of(source, options)
    if kind == "hub":
        roles = {"train": options.train_split, "eval": options.eval_split}
        table = _read_hub(source, options.subset, roles.get(split, split))
    elif kind == "parquet":
        table = _read_parquet(source)
    elif kind == "jsonl":
        table = _read_json_lines(source, read_text(source))
    elif kind == "text":
        table = _read_plain(source)
    elif kind == "conll":
        table = _read_conll(source)
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


def read_text(source: str) -> str:
    """The text of a file, gzip or not.

    Raises DataError where it is missing, empty or not UTF-8.
    """
    data = _read_bytes(Path(source))
    try:
        data = _unpack(source, data) if source.lower().endswith(".gz") else data
        text = data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source} is not a whole gzip file: {error}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{source}, line {line}: not UTF-8", hint="save it as UTF-8") from error
    if not text.strip():
        raise DataError(f"{source} is empty")
    return text


def _unpack(source: str, data: bytes) -> bytes:
    most = max(100 * len(data), 64 << 20)
    with gzip.open(io.BytesIO(data)) as stream:
        text = stream.read(most + 1)
    if len(text) > most:
        raise DataError(
            f"{source} has {len(data)} bytes, and unpacks to more than {most}",
            expected="text, which unpacks to some 3 to 20 times its size",
            hint="unpack it yourself if you trust it",
        )
    return text


def read_parallel(source: str, target: str) -> Table:
    """Two plain-text files, line by line, as the columns `text` and `target`.

    Raises DataError where they differ in their number of lines.
    """
    sides = [read_text(name).removesuffix("\n").split("\n") for name in (source, target)]
    first, second = ([line.removesuffix("\r") for line in side] for side in sides)
    if len(first) != len(second):
        raise DataError(
            f"{source} and {target} are not parallel",
            offenders=[f"{source}: {len(first)} lines", f"{target}: {len(second)} lines"],
            expected="one target a line, in the order of the source",
        )
    columns = {"text": first, "target": second}
    return Table(source, "line", tuple(columns), range(1, len(first) + 1), columns.__getitem__)


def _read_plain(source: str) -> Table:
    lines = [line.removesuffix("\r") for line in read_text(source).split("\n")]
    kept = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    texts = [line for _, line in kept]
    return Table(source, "line", ("text",), [number for number, _ in kept], lambda name: texts)


def _read_conll(source: str) -> Table:
    """A sentence a row, each column a list; the first column is also `text`, the last `label`."""
    starts: list[int] = []
    sentences: list[list[tuple[int, list[str]]]] = []
    ended = True
    for number, line in enumerate(read_text(source).split("\n"), start=1):
        fields = line.split("\t") if "\t" in line.strip() else line.split()
        if not line.strip() or fields[0] == "-DOCSTART-":
            ended = True
            continue
        if ended:
            starts.append(number)
            sentences.append([])
        sentences[-1].append((number, [field.strip() for field in fields]))
        ended = False
    if not sentences:
        raise DataError(f"{source} has no sentences")
    width = len(sentences[0][0][1])
    _check_widths(source, [row for sentence in sentences for row in sentence], width)
    names = (
        {str(i): i for i in range(width)}
        | {"text": 0}
        | ({"label": width - 1} if width > 1 else {})
    )

    def column(name: str) -> list[object]:
        return [[fields[names[name]] for _, fields in sentence] for sentence in sentences]

    return Table(source, "sentence at line", tuple(names), starts, column)


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
            f"{source} has lines of another width",
            offenders=first_few([f"line {line}: {len(row)} fields" for line, row in ragged]),
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


def _read_json_lines(source: str, text: str) -> Table:
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
        raise DataError(
            f"{source} is not JSON lines", offenders=first_few(wrong), expected=expected
        )
    columns = tuple(dict.fromkeys(key for row in rows for key in row))
    return Table(source, "line", columns, lines, lambda name: (row.get(name) for row in rows))


def _read_parquet(source: str) -> Table:
    import pyarrow.parquet

    data = _read_bytes(Path(source))
    try:
        table = pyarrow.parquet.read_table(io.BytesIO(data))
        lines, columns = range(1, table.num_rows + 1), tuple(table.column_names)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(f"{source} is not a Parquet file: {error}") from error

    def column(name: str) -> list[object]:
        try:
            values: list[object] = table.column(name).to_pylist()
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:
            raise DataError(f"{source}, column {name!r} cannot be read: {error}") from error
        return values

    return Table(source, "row", columns, lines, column)


def _read_hub(name: str, subset: str | None, split: str) -> Table:
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
    return Table(name, "row", tuple(data.column_names), lines, lambda n: _hub_column(data, n))


def _hub_column(data: Any, name: str) -> list[object]:
    feature = data.features[name]
    names: Sequence[str] | None = getattr(feature, "names", None)
    if names is not None:
        # The Hub writes -1 for a label that is not public.
        return [None if index is None or index < 0 else names[index] for index in data[name]]
    tags: Sequence[str] | None = getattr(getattr(feature, "feature", None), "names", None)
    return [[tags[i] for i in row] for row in data[name]] if tags else list(data[name])
