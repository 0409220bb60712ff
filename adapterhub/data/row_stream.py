"""Stream any number of rows in blocks, with one block in memory at a time.

Sources are files, folders, URLs of buckets and datasets of the Hub. They are opened through
`datasets`, which reads Parquet, JSON lines and CSV in pieces. Buckets are reached through obstore,
with the credentials of the environment, as registries in buckets are.

A block interleaves rows of several shards, so that sorted shards are mixed; the order of the shards
is drawn again in each pass. The rows of a block depend only on the seed, the process and the number
of processes. A `Cursor` of a few numbers records the position in the stream: a reader that starts
there yields the same blocks.

Several processes share the rows of a pass: each reads its own shards if there are at least as many
shards as processes; otherwise each reads all shards and keeps every n-th row.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from adapterhub.config.user_folders import is_folder, is_there
from adapterhub.data.options import DataOptions
from adapterhub.data.parquet import columns_in_structs, values_of
from adapterhub.data.table import (
    Table,
    columns_of_objects,
    inner_cell,
    names_of_classes,
    table_of_rows,
)
from adapterhub.errors import DataError

BUCKETS = ("s3", "gs", "az", "abfss")
_READERS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json",
            ".csv": "csv", ".tsv": "csv", ".tab": "csv"}  # fmt: skip
_FORMATS = {"parquet": "parquet", "jsonl": "json", "csv": "csv", "tsv": "csv"}
_PIECE = 1024  # rows decoded at a time
_ENDS = 1 << 16  # bytes of each end of a file that identify it, with its name and size


@dataclass(frozen=True)
class RowSource:
    """Rows in shards; each shard is read from its beginning.

    Attributes:
        location: the location given by the user.
        shards: the names of the shards: file names, or numbers.
        columns: the names of the columns.
        sha256: identifies the shards: by name, size, beginning and end of each file; or by the
            revision of a Hub dataset.
        features: the types of the columns, if `datasets` has them.
        data: the rows, a `datasets.IterableDataset`; for JSON lines, their texts.
        inner: the columns inside the objects of JSON lines, with their paths; None for Arrow.
        size: the bytes of local files; None for remote rows.
    """

    location: str
    shards: tuple[str, ...]
    columns: tuple[str, ...]
    sha256: str
    features: Mapping[str, Any] = field(compare=False)
    data: Any = field(compare=False)
    inner: Mapping[str, tuple[str, ...]] | None = None
    size: int | None = None

    def tables(self, shard: int) -> Iterator[Any]:
        """Yield the rows of a shard, as pyarrow tables of at most 1,024 rows.

        Raises:
            DataError: the shard cannot be read.
        """
        with _read_errors(f"{self.location}, {self.shards[shard]}"):
            only = self.data.shard(num_shards=len(self.shards), index=shard)
            tables = only.with_format("arrow").iter(batch_size=_PIECE)
            yield from tables if self.inner is None else map(_without_blanks, tables)

    def inside(self, table: Any) -> Mapping[str, tuple[str, ...]]:
        """Return the columns in the objects of rows, such as `doc.text`, with their paths."""
        return columns_in_structs(table.schema) if self.inner is None else self.inner

    def values(self, table: Any, column: str) -> list[object]:
        """Return the values of a column, with class names instead of numbers.

        Raises:
            DataError: a line is not JSON.
        """
        if self.inner is None:
            return names_of_classes(self.features.get(column), values_of(table, column))
        path = self.inner.get(column, (column,))
        with _read_errors(self.location):
            return [inner_cell(row, path) for row in _objects(table)]


@contextmanager
def reading_hub(name: str, split: str, how: str) -> Iterator[None]:
    """Read a Hub dataset, with our limits; `how` is the failing action, such as "streamed".

    Raises:
        DataError: the dataset cannot be read.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    from adapterhub.backbones.hub_network import guarded_hub, proxy_advice

    try:
        with guarded_hub():
            yield
    except Exception as error:  # the Hub, its client and the cache have no common base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, HTTPError):  # the message quotes the server, which may repeat a token
            reason = type(error).__name__
        raise DataError(
            f"{name!r} is not a local file and cannot be {how}: {reason}",
            expected=f"a dataset id with the split {split!r}, or a file",
            hint=(not constants.HF_HUB_OFFLINE and proxy_advice(constants.ENDPOINT))
            or "without a network, give a file, or load it once online to fill the cache",
        ) from None


def is_many_files(location: str) -> bool:
    """Return whether a source is a URL, a pattern or a folder, which must be streamed."""
    return "://" in location or is_pattern(location) or is_folder(location)


def open_source(location: str, options: DataOptions, split: str) -> RowSource:
    """Open rows to stream; read only their beginning.

    The location is a file, a pattern such as `part-*.parquet`, a folder, a URL of one of these, or
    a dataset on the Hub; `split` is "train", "eval" or a split of the Hub.

    Raises:
        DataError: the location is empty or cannot be read.
    """
    if not is_many_files(location) and not is_there(location):
        splits = {"train": options.train_split, "eval": options.eval_split}
        return _on_hub(location, options, splits.get(split, split))
    files = list_files(location)
    kind = _reader(location, files, options)
    with _read_errors(location):
        return _open_files(location, files, kind, options)


def is_pattern(location: str) -> bool:
    """Return whether a location is a pattern of file names, such as `part-*.parquet`."""
    return any(character in location for character in "*?[") and not is_there(location)


def list_files(location: str) -> dict[str, str]:
    """Return {URL or path: short name} of the files of a location, sorted.

    Raises:
        DataError: there are no files, or they cannot be listed.
    """
    import fsspec

    reach_bucket(location)
    with _read_errors(location):
        system, path = fsspec.core.url_to_fs(location)
        if is_pattern(location):
            paths = system.glob(path)
        elif system.isdir(path):
            paths = [name for name in system.find(path) if _suffix(name) in _READERS]
        else:
            paths = [path] if system.exists(path) else []
    if not paths:
        raise DataError(
            f"no files at {location}",
            expected=f"files that end in {', '.join(_READERS)}",
            hint="a pattern such as 's3://bucket/folder/*.parquet', in quotes",
        )
    remote = "://" in location
    return {(system.unstrip_protocol(n) if remote else n): n for n in sorted(map(str, paths))}


def reach_bucket(location: str) -> None:
    """Register obstore with fsspec for the bucket of a URL.

    Raises:
        DataError: obstore is not installed.
    """
    scheme = location.partition("://")[0]
    if scheme not in BUCKETS:
        return
    try:
        from obstore.fsspec import register
    except ImportError as error:
        raise DataError(
            f"{location} needs obstore, which is not installed",
            hint='pip install "adapterhub[buckets]"',
        ) from error
    register(scheme)


def _suffix(name: str) -> str:
    return Path(name.lower().removesuffix(".gz")).suffix


def _reader(location: str, files: Mapping[str, str], options: DataOptions) -> str:
    """Return the name of the reader for files, by the option `format` or their suffixes.

    Raises:
        DataError: the files have several formats, or an unsupported one.
    """
    if options.format in _FORMATS:
        return _FORMATS[options.format]
    kinds = {_READERS.get(_suffix(name), "") for name in files.values()}
    if len(kinds) > 1 or "" in kinds or options.format != "auto":
        raise DataError(
            f"{location} cannot be streamed",
            offenders=sorted({_suffix(name) or "no suffix" for name in files.values()}),
            expected=f"files of one format, that end in {', '.join(_READERS)}",
            hint="data.format=parquet, jsonl, csv or tsv; or a pattern that names fewer files",
        )
    return kinds.pop()


def _open_files(
    location: str, files: Mapping[str, str], kind: str, options: DataOptions
) -> RowSource:
    import datasets

    names = list(files)
    more: dict[str, Any] = {}
    if kind == "csv":
        more = _csv_options(location, names[0], options)
    elif kind == "parquet":
        more = {"batch_size": _PIECE}
    elif options.encoding:
        more = {"encoding": options.encoding}
    lines = kind == "json" and _is_lines(names[0], options)
    kind = "text" if lines else kind  # as texts: Arrow would give each object the keys of all
    data = datasets.load_dataset(kind, data_files=names, split="train", streaming=True, **more)
    shards = tuple(Path(name).name for name in files.values())
    if data.n_shards != len(shards):
        shards = _numbered(data.n_shards)
    digest, size = files_digest(files), _local_size(names)
    if lines:
        columns, inner = columns_of_objects(_first_objects(data))
        return RowSource(location, shards, columns, digest, {}, data, inner, size)
    return RowSource(location, shards, *_columns(data), digest, _features(data), data, size=size)


def _local_size(names: Sequence[str]) -> int | None:
    """Return the bytes of files; None if some are remote."""
    if any("://" in name for name in names):
        return None
    return sum(Path(name).stat().st_size for name in names)


def _is_lines(first: str, options: DataOptions) -> bool:
    """Return whether JSON has an object in each line, and is not a list or an object of columns."""
    import fsspec

    encoding = options.encoding or "utf-8-sig"
    with fsspec.open(first, "rt", encoding=encoding, compression="infer") as file:
        line = file.readline()
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return _suffix(first) != ".json"


def _first_objects(data: Any) -> list[dict[str, Any]]:
    first = next(iter(data.with_format("arrow").iter(batch_size=_PIECE)), None)
    return [] if first is None else list(_objects(_without_blanks(first)))


def _without_blanks(lines: Any) -> Any:
    return lines.filter([bool(line.strip()) for line in lines.column(0).to_pylist()])


def _objects(lines: Any) -> Iterator[dict[str, Any]]:
    """Yield the parsed rows of a table of JSON lines.

    Raises:
        ValueError: a line is not JSON, or not an object.
    """
    for line in lines.column(0).to_pylist():
        row = json.loads(line.removeprefix("\ufeff"))
        if not isinstance(row, dict):
            raise ValueError(f"a line is not an object: {line[:40]}")
        yield row


def _on_hub(name: str, options: DataOptions, split: str) -> RowSource:
    import datasets

    with reading_hub(name, split, "streamed from the Hub"):
        builder = datasets.load_dataset_builder(name, options.subset)
        data = builder.as_streaming_dataset(split=split)
        columns = _columns(data)
    record = [name, options.subset, split, builder.hash]
    digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
    return RowSource(name, _numbered(data.n_shards), *columns, digest, _features(data), data)


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"shard {number} of {count}" for number in range(1, count + 1))


def _columns(data: Any) -> tuple[tuple[str, ...]]:
    """Return the names of the columns, from the first rows if necessary."""
    if data.features is not None:
        return (tuple(data.features),)
    first = next(iter(data.with_format("arrow").iter(batch_size=1)), None)
    return (() if first is None else tuple(first.column_names),)


def _features(data: Any) -> Mapping[str, Any]:
    """Return the types of columns; images and audio stay bytes, which tasks decode."""
    return dict(data.features or {})


def _csv_options(location: str, first: str, options: DataOptions) -> dict[str, Any]:
    """Return the options for reading CSV: every cell is text, unchanged.

    Raises:
        DataError: the first line does not name the columns (`header` is false).
    """
    import datasets
    import fsspec

    if options.header is False:
        raise DataError(
            f"{location} has no line that names its columns",
            expected="a first line with the names of the columns, to stream CSV",
            hint="add one, or convert the file to Parquet",
        )
    encoding = options.encoding or "utf-8-sig"
    tabs = options.format == "tsv" or _suffix(first) in (".tsv", ".tab")
    delimiter = options.delimiter or ("\t" if tabs else ",")
    quoted = not tabs if options.quoted is None else options.quoted
    rules: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    with fsspec.open(first, "rt", encoding=encoding, compression="infer", newline="") as file:
        line = io.StringIO(file.readline())
    columns = next(csv.reader(line, delimiter=delimiter, quoting=rules), [])
    features = datasets.Features({name: datasets.Value("string") for name in columns})
    return {"sep": delimiter, "encoding": encoding, "quoting": rules, "features": features,
            "keep_default_na": False, "na_filter": False}  # fmt: skip


def files_digest(files: Mapping[str, str]) -> str:
    """Return a sha256 of the names, sizes, beginnings and ends of files."""
    import fsspec

    digest = hashlib.sha256()
    for url, path in files.items():
        system, _ = fsspec.core.url_to_fs(url)
        size = int(system.info(path)["size"] or 0)
        ends = [system.cat_file(path, start=0, end=min(size, _ENDS))]
        if size > _ENDS:
            ends.append(system.cat_file(path, start=max(size - _ENDS, _ENDS), end=size))
        record = [Path(path).name, size, *(hashlib.sha256(end).hexdigest() for end in ends)]
        digest.update(json.dumps(record).encode())
    return digest.hexdigest()


@contextmanager
def _read_errors(where: str) -> Iterator[None]:
    """Convert the errors of readers and file systems, which share no base class, to `DataError`."""
    try:
        yield
    except (DataError, GeneratorExit, MemoryError):
        raise
    except Exception as error:
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise DataError(
            f"{where} cannot be read: {reason}",
            expected="Parquet, JSON lines or CSV, with the same columns in all files",
            hint="data.format and data.encoding describe the files; for a bucket, its "
            "credentials and endpoint are read from the environment",
        ) from error


TOGETHER = 8  # shards that are interleaved


@dataclass(frozen=True)
class Cursor:
    """A position in a stream.

    Attributes:
        turn: the pass over the rows, counted from 0.
        opened: the number of shards of the pass that were opened.
        reading: the open shards: (position in the order of the pass, rows taken).
    """

    turn: int = 0
    opened: int = 0
    reading: tuple[tuple[int, int], ...] = ()

    def record(self) -> dict[str, Any]:
        """Return plain values that `cursor_of` reads."""
        return asdict(self)


def cursor_of(record: dict[str, Any]) -> Cursor:
    """Return the cursor recorded by `Cursor.record`."""
    reading = tuple((int(position), int(taken)) for position, taken in record["reading"])
    return Cursor(int(record["turn"]), int(record["opened"]), reading)


@dataclass(frozen=True)
class Block:
    """A block of rows: its position in the stream, and its number in the pass."""

    table: Table
    cursor: Cursor


@dataclass(frozen=True)
class BlockReader:
    """The settings that determine the rows of a process, and their order.

    Attributes:
        size: the rows of a block.
        seed: the seed of the order of the shards; None keeps their order.
        rank: the process.
        world: the number of processes.
    """

    size: int
    seed: int | None = None
    rank: int = 0
    world: int = 1

    def shards(self, count: int, turn: int) -> list[int]:
        """Return the shards of `count` that the process reads in a pass, in order."""
        order = list(range(count))
        if self.seed is not None:
            random.Random(f"{self.seed} {turn}").shuffle(order)
        return order[self.rank :: self.world] if self.splits_shards(count) else order

    def splits_shards(self, count: int) -> bool:
        """Return whether processes read separate shards instead of rows of all shards."""
        return count >= self.world


class _OpenShard:
    """An open shard, read from after its first `taken` rows."""

    def __init__(
        self, source: RowSource, shard: int, position: int, taken: int, reader: BlockReader
    ) -> None:
        self.source, self.shard, self.position, self.taken = source, shard, position, 0
        step = 1 if reader.splits_shards(len(source.shards)) else reader.world
        self.step, self.first = step, reader.rank if step > 1 else 0
        self.tables = self._own_tables()
        self.rest: Any = None
        while self.taken < taken and self.take(taken - self.taken):
            pass

    def _own_tables(self) -> Iterator[Any]:
        """Yield the rows of this process."""
        import numpy as np

        start = 0
        for table in self.source.tables(self.shard):
            if self.step > 1:
                skipped = (self.first - start) % self.step
                chosen = np.arange(skipped, table.num_rows, self.step)
                start += table.num_rows
                table = table.take(chosen)
            if table.num_rows:
                yield table

    def take(self, most: int) -> list[tuple[Any, int]]:
        """Return the next rows, in tables with the number of their first row; [] at the end."""
        tables = []
        while most:
            table = self.rest if self.rest is not None else next(self.tables, None)
            self.rest = None
            if table is None:
                break
            if table.num_rows > most:
                table, self.rest = table.slice(0, most), table.slice(most)
            tables.append((table, self.taken))
            most -= table.num_rows
            self.taken += table.num_rows
        return tables

    def name_of(self, row: int) -> str:
        """Return the location of a row, for errors."""
        return f"{self.first + row * self.step + 1} of {self.source.shards[self.shard]}"


def read_blocks(
    source: RowSource, reader: BlockReader, cursor: Cursor | None = None
) -> Iterator[Block]:
    """Yield blocks of rows from a position on, pass after pass, without end.

    Raises:
        DataError: the source cannot be read, or lacks rows for this process.
    """
    state = cursor or Cursor()
    while True:
        some = False
        for block in _one_pass(source, reader, state):
            yield block
            some = True
        if not some and state == Cursor(state.turn):
            raise _no_rows(source, reader)
        state = Cursor(state.turn + 1)


def _no_rows(source: RowSource, reader: BlockReader) -> DataError:
    whose = f" for process {reader.rank + 1} of {reader.world}" if reader.world > 1 else ""
    return DataError(f"{source.location} has no rows{whose}")


def read_pass(source: RowSource, size: int) -> Iterator[Block]:
    """Yield all rows once, in blocks of `size`, in the order of the shards."""
    return _one_pass(source, BlockReader(size), Cursor())


def _one_pass(source: RowSource, reader: BlockReader, cursor: Cursor) -> Iterator[Block]:
    """Yield the blocks of a pass, from a position in it."""
    rows = _Pass(source, reader, cursor)
    while True:
        before, parts = rows.cursor, list[tuple[Any, list[str]]]()
        rows.take(reader.size, parts)
        if not parts:
            return
        yield Block(_table(source, parts), before)


class RowTaker:
    """Takes any number of rows at a time, pass after pass; a small source is read several times.

    Attributes:
        cursor: the position of the next row.
    """

    def __init__(self, source: RowSource, reader: BlockReader, cursor: Cursor) -> None:
        self.source, self.reader = source, reader
        self.rows = _Pass(source, reader, cursor)

    @property
    def cursor(self) -> Cursor:
        """The position of the next row."""
        return self.rows.cursor

    def take(self, count: int) -> Table:
        """Return the next rows.

        Raises:
            DataError: the source cannot be read, or lacks rows for this process.
        """
        parts: list[tuple[Any, list[str]]] = []
        while count:
            begun, taken = self.cursor, self.rows.take(count, parts)
            count -= taken
            if count:
                if not taken and begun == Cursor(begun.turn):
                    raise _no_rows(self.source, self.reader)
                self.rows = _Pass(self.source, self.reader, Cursor(begun.turn + 1))
        return _table(self.source, parts)


class _Pass:
    """A pass over the rows of a source, from a position in it."""

    def __init__(self, source: RowSource, reader: BlockReader, cursor: Cursor) -> None:
        self.source, self.reader, self.turn = source, reader, cursor.turn
        self.order, self.opened = reader.shards(len(source.shards), cursor.turn), cursor.opened
        self.reading = [
            _OpenShard(source, self.order[position], position, taken, reader)
            for position, taken in cursor.reading
        ]

    @property
    def cursor(self) -> Cursor:
        """The position of the next row."""
        places = tuple((shard.position, shard.taken) for shard in self.reading)
        return Cursor(self.turn, self.opened, places)

    def take(self, size: int, parts: list[tuple[Any, list[str]]]) -> int:
        """Add up to `size` rows to `parts`, and return their number; fewer at the end."""
        missing = size
        while missing:
            while len(self.reading) < TOGETHER and self.opened < len(self.order):
                shard = self.order[self.opened]
                self.reading.append(_OpenShard(self.source, shard, self.opened, 0, self.reader))
                self.opened += 1
            if not self.reading:
                break
            missing -= _take_in_turn(self.reading, missing, parts)
        return size - missing


def _take_in_turn(
    reading: list[_OpenShard], missing: int, parts: list[tuple[Any, list[str]]]
) -> int:
    """Take rows of each open shard, in equal parts, and return their number; drop ended shards.

    `parts` receives tables of rows with the location of each row.
    """
    share, before = -(-missing // len(reading)), missing
    for shard in list(reading):
        most = min(share, missing)
        tables = shard.take(most)
        for table, start in tables:
            names = [shard.name_of(start + row) for row in range(table.num_rows)]
            parts.append((table, names))
        count = sum(table.num_rows for table, _ in tables)
        missing -= count
        if count < most:
            reading.remove(shard)
    return before - missing


def _table(source: RowSource, parts: list[tuple[Any, list[str]]]) -> Table:
    def column(name: str) -> list[object]:
        return [value for table, _ in parts for value in source.values(table, name)]

    places = [place for _, names in parts for place in names]
    inner = source.inside(parts[0][0]) if parts else ()
    return table_of_rows(source.location, (*source.columns, *inner), places, column)
