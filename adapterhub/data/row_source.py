"""Where streamed rows come from: files, folders, URLs of buckets, and data sets of the Hub.

They are opened through `datasets`, which reads Parquet, JSON lines and CSV in pieces. Buckets are
reached through obstore, with the credentials of the environment, as registries in buckets are.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError

BUCKETS = ("s3", "gs", "az", "abfss")
_READERS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json",
            ".csv": "csv", ".tsv": "csv", ".tab": "csv"}  # fmt: skip
_FORMATS = {"parquet": "parquet", "jsonl": "json", "csv": "csv", "tsv": "csv"}
_PIECE = 1024  # rows that are decoded at a time
_ENDS = 1 << 16  # bytes of each end of a file that identify it, besides its name and size


@dataclass(frozen=True)
class RowSource:
    """Rows in shards, each of which is read from its beginning.

    Attributes:
        location: what the user gave.
        shards: the names of the shards: those of files, or numbers.
        columns: the names of the columns.
        sha256: identifies the shards: by name, size, beginning and end of each file; or by the
            revision of a data set of the Hub.
        features: the types of the columns that `datasets` knows.
        data: the rows, a `datasets.IterableDataset`.
    """

    location: str
    shards: tuple[str, ...]
    columns: tuple[str, ...]
    sha256: str
    features: Mapping[str, Any] = field(compare=False)
    data: Any = field(compare=False)

    def tables(self, shard: int) -> Iterator[Any]:
        """Yield the rows of a shard, as pyarrow tables of at most 1,024 rows.

        Raises:
            DataError: the shard cannot be read.
        """
        with _read_errors(f"{self.location}, {self.shards[shard]}"):
            only = self.data.shard(num_shards=len(self.shards), index=shard)
            yield from only.with_format("arrow").iter(batch_size=_PIECE)

    def values(self, table: Any, column: str) -> list[object]:
        """Return the values of a column: names in place of the numbers of classes."""
        return names_of_classes(self.features.get(column), table.column(column).to_pylist())


def names_of_classes(feature: Any, values: list[Any]) -> list[object]:
    """Return the values of a column of `datasets`: names in place of the numbers of classes.

    The number -1 marks a hidden label.
    """
    if names := getattr(feature, "names", None):
        return [_name(names, value) for value in values]
    if names := getattr(getattr(feature, "feature", None), "names", None):
        return [[_name(names, each) for each in value or ()] for value in values]
    return values


def _name(names: Sequence[str], number: Any) -> str | None:
    return None if number is None or number < 0 else names[number]


@contextmanager
def reading_hub(name: str, split: str, how: str) -> Iterator[None]:
    """Read a data set of the Hub, with our limits; `how` is what fails, such as "streamed".

    Raises:
        DataError: it cannot be read.
    """
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    from adapterhub.backbones.hub_guard import guarded_hub

    try:
        with guarded_hub():
            yield
    except Exception as error:  # the Hub, its client and the cache have no common base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, HTTPError):  # it quotes the server, which may repeat a token
            reason = type(error).__name__
        raise DataError(
            f"{name!r} is not a local file and cannot be {how}: {reason}",
            expected=f"a dataset id with the split {split!r}, or a file",
            hint="without a network, give a file, or load it once online to fill the cache",
        ) from None


def is_many_files(location: str) -> bool:
    """Return whether a source is a URL, a pattern or a folder, which only a stream reads."""
    return "://" in location or _is_pattern(location) or Path(location).is_dir()


def open_source(location: str, options: DataOptions, split: str) -> RowSource:
    """Open rows to stream; read only their beginning.

    The location is a file, a pattern such as `part-*.parquet`, a folder, a URL of one of these, or
    a data set on the Hub; `split` is "train", "eval" or a split of the Hub.

    Raises:
        DataError: nothing is there, or it cannot be read.
    """
    if not is_many_files(location) and not Path(location).exists():
        splits = {"train": options.train_split, "eval": options.eval_split}
        return _on_hub(location, options, splits.get(split, split))
    with _read_errors(location):
        files = list_files(location)
    kind = _reader(location, files, options)
    with _read_errors(location):
        return _open_files(location, files, kind, options)


def _is_pattern(location: str) -> bool:
    return any(character in location for character in "*?[") and not Path(location).exists()


def list_files(location: str) -> dict[str, str]:
    """Return {URL or path: short name} of the files of a location, sorted.

    Raises:
        DataError: there are none.
    """
    import fsspec

    reach_bucket(location)
    system, path = fsspec.core.url_to_fs(location)
    if _is_pattern(location):
        found = system.glob(path)
    elif system.isdir(path):
        found = [name for name in system.find(path) if _suffix(name) in _READERS]
    else:
        found = [path] if system.exists(path) else []
    if not found:
        raise DataError(
            f"no files at {location}",
            expected=f"files that end in {', '.join(_READERS)}",
            hint="a pattern such as 's3://bucket/folder/*.parquet', in quotes",
        )
    remote = "://" in location
    return {(system.unstrip_protocol(n) if remote else n): n for n in sorted(map(str, found))}


def reach_bucket(location: str) -> None:
    """Let fsspec reach the bucket of a URL through obstore.

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
    """Return the name of the reader of some files, by the option `format` or their suffixes.

    Raises:
        DataError: they have several formats, or another one.
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
    data = datasets.load_dataset(kind, data_files=names, split="train", streaming=True, **more)
    shards = tuple(Path(name).name for name in files.values())
    if data.n_shards != len(shards):
        shards = _numbered(data.n_shards)
    return RowSource(location, shards, *_columns(data), files_digest(files), _features(data), data)


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
    """Return the names of the columns, from the first rows where nothing else tells."""
    if data.features is not None:
        return (tuple(data.features),)
    first = next(iter(data.with_format("arrow").iter(batch_size=1)), None)
    return (() if first is None else tuple(first.column_names),)


def _features(data: Any) -> Mapping[str, Any]:
    """Return the types of columns; pictures and sound stay bytes, which tasks decode."""
    return dict(data.features or {})


def _csv_options(location: str, first: str, options: DataOptions) -> dict[str, Any]:
    """Return how CSV is read: every cell is text, as it is written.

    Raises:
        DataError: the first line shall not name the columns.
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
    """Turn the errors of readers and file systems, which have no common base class, into ours."""
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
            hint="data.format and data.encoding say what the files are; for a bucket, its "
            "credentials and endpoint are read from the environment",
        ) from error
