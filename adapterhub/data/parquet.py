"""Columns of a Parquet file, which are not read if they would take far more memory than the file.

A dictionary's values are stored once and repeated by number: a file of 100 kB can expand to
gigabytes. So the sizes that the file states are added up first. Then a column is read in batches,
in which dictionaries stay dictionaries while their expanded size is summed, and only then values
become Python objects. A file that states wrong sizes is refused after the batch that passes the
limit.

A table of Arrow gives each object all keys that any object of its column has: those of others are
null in it. `plain_values` leaves them out, at every depth. A key that was null in the row itself
cannot be told from them, and is left out too, unless the table keeps its objects as JSON.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from adapterhub.data.table import inner_cell, inner_columns, names_of_classes
from adapterhub.errors import DataError

_LEAST_LIMIT = 64 << 20  # bytes: a small file may expand to this, as a gzip file may
_MOST_EXPANSION = 100  # times the file's size; text expands 3 to 20 times
_BYTES_A_VALUE = 64  # of a Python object and its place in a list, besides its characters
_MOST_CHUNKS = 100_000  # columns times row groups
_MOST_ROWS = 1024  # of a batch


class ExpansionError(ValueError):
    """The values of a file would take more memory than its size explains."""


@dataclass(frozen=True)
class ParquetColumns:
    """The columns of a Parquet file in memory, read one at a time."""

    data: bytes
    metadata: Any
    names: tuple[str, ...]
    classes: Mapping[str, Any] = field(default_factory=dict)
    inner: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return int(self.metadata.num_rows)

    @property
    def limit(self) -> int:
        """Return the most bytes that the values of a column may take."""
        return max(_MOST_EXPANSION * len(self.data), _LEAST_LIMIT)

    def values(self, name: str) -> list[object]:
        """Read the values of a column or of a field in it, `doc.text`: of classes, their names.

        Raises:
            ExpansionError: they would take more memory than the file's size explains.
            ValueError: the column is damaged; pyarrow raises its own errors too.
        """
        groups = [self.metadata.row_group(i) for i in range(self.metadata.num_row_groups)]
        stated = sum(group.total_byte_size for group in groups)
        self._check(stated + self.rows * _BYTES_A_VALUE)
        leaves = map(self.metadata.schema.column, range(self.metadata.num_columns))
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        try:
            values = self._read(name, texts, _MOST_ROWS)
        except OSError:  # not dictionaries, but differences, each of which may be long
            values = self._read(name, [], min(_MOST_ROWS, self.limit // max(stated, 1)))
        if name in self.inner:
            return [inner_cell(value, self.inner[name]) for value in values]
        return names_of_classes(self.classes.get(name), values)

    def _read(self, name: str, dictionaries: list[str], batch: int) -> list[object]:
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(
            io.BytesIO(self.data), read_dictionary=dictionaries, metadata=self.metadata
        )
        values: list[object] = []
        size = 0
        for group in range(self.metadata.num_row_groups):  # pyarrow joins no nested dictionaries
            for rows in file.iter_batches(batch, [group], [name], use_threads=False):
                if rows.num_columns != 1:
                    raise ValueError(f"the column {name!r} is damaged")
                size += _expanded(rows.column(0))
                self._check(size)
                values += plain_values(rows.column(0))
        return values

    def _check(self, size: int) -> None:
        if size > self.limit:
            raise ExpansionError(f"{len(self.data)} bytes expand to more than {self.limit}")


def open_parquet(data: bytes) -> ParquetColumns:
    """Open a Parquet file and read its summary.

    Raises:
        ExpansionError: it has more columns and row groups than a file of examples.
    """
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(io.BytesIO(data))
    metadata = file.metadata
    if metadata.num_columns * metadata.num_row_groups > _MOST_CHUNKS:
        raise ExpansionError(f"{metadata.num_columns} columns in {metadata.num_row_groups} groups")
    names = tuple(file.schema_arrow.names)
    inner = {name: path[1:] for name, path in columns_in_structs(file.schema_arrow).items()}
    classes = _classes(file.schema_arrow.metadata or {})
    return ParquetColumns(data, metadata, (*names, *inner), classes, inner)


def columns_in_structs(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return the columns in the structs of a schema, `doc.text`, and where each is."""
    inner: dict[str, tuple[str, ...]] = {}
    for each in schema:
        found = inner_columns(each.name, _empty_struct(each.type))
        inner |= {name: (each.name, *path) for name, path in found.items()}
    return {name: path for name, path in inner.items() if name not in schema.names}


def values_of(rows: Any, name: str) -> list[object]:
    """Return the values of a column of an Arrow table, or of one in its structs."""
    column, *path = columns_in_structs(rows.schema).get(name, (name,))
    return [inner_cell(value, path) for value in plain_values(rows.column(column))]


def plain_values(array: Any) -> list[object]:
    """Return the values of an Arrow array as JSON lines have them: objects with their own keys."""
    change = _plain_form(array.type)
    values: list[object] = array.to_pylist()
    return values if change is None else [*map(change, values)]


def _plain_form(kind: Any) -> Callable[[Any], Any] | None:
    """Return what makes the plain form of a value of an Arrow type; None: it has it already."""
    import pyarrow.types as types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: None if value is None else json.loads(value)
    if types.is_map(kind):
        inner = _plain_form(kind.item_type) or _same
        return lambda value: value if value is None else {k: inner(v) for k, v in value}
    if types.is_struct(kind):
        names = {kind.field(i).name for i in range(kind.num_fields)}
        if names == {"bytes", "path"}:  # a picture or sound, one of which is null
            return None
        forms = {name: _plain_form(kind.field(name).type) or _same for name in names}
        return lambda value: value if value is None else _own_keys(value, forms)
    if types.is_nested(kind) and hasattr(kind, "value_type"):
        item = _plain_form(kind.value_type)
        if item is not None:
            return lambda value: value if value is None else [*map(item, value)]
    return None


def _own_keys(value: Mapping[str, Any], forms: Mapping[str, Callable[[Any], Any]]) -> Any:
    return {key: forms[key](each) for key, each in value.items() if each is not None}


def _same(value: Any) -> Any:
    return value


def _empty_struct(kind: Any) -> Any:
    """Return the fields of a struct, and of structs in it, as an object without values."""
    import pyarrow

    if not pyarrow.types.is_struct(kind):
        return None
    return {each.name: _empty_struct(each.type) for each in kind}


class _Classes(NamedTuple):
    """The classes of a column: its `names`, or those of the items of its lists, its `feature`."""

    names: Sequence[str] = ()
    feature: _Classes | None = None


def _classes(metadata: Mapping[bytes, bytes]) -> dict[str, _Classes]:
    """Return the names of classes that the library datasets wrote into a file, by column."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {name: _Classes(*_class_names(feature)) for name, feature in features.items()}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _class_names(feature: Mapping[str, Any]) -> tuple[Sequence[str], _Classes | None]:
    names = feature.get("names") or ()
    if not all(isinstance(name, str) for name in names):
        raise ValueError("a class has no name")
    inner = feature.get("feature")
    return names, _Classes(*_class_names(inner)) if isinstance(inner, Mapping) else None


@contextmanager
def opened_parquet(location: str, expected: str = "a complete Parquet file") -> Iterator[Any]:
    """Yield a file to read in batches, a `pyarrow.parquet.ParquetFile`.

    Raises:
        DataError: it is no Parquet file, or what is read inside is damaged.
    """
    import fsspec
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with fsspec.open(location, "rb") as handle:
            yield ParquetFile(handle)
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{location} is not a Parquet file: {str(error).splitlines()[0]}",
            expected=expected,
        ) from error


def _expanded(array: Any) -> int:
    """Return the bytes of an array's values as objects, a dictionary's at each place."""
    import pyarrow
    import pyarrow.compute as compute

    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        lengths = compute.binary_length(array.dictionary)
        texts = compute.sum(lengths.take(array.indices)).as_py() or 0
        return int(texts) + _BYTES_A_VALUE * len(array)
    if pyarrow.types.is_struct(kind):
        return sum(_expanded(array.field(i)) for i in range(kind.num_fields))
    if pyarrow.types.is_map(kind):
        return _expanded(array.keys) + _expanded(array.items)
    if pyarrow.types.is_nested(kind) and hasattr(array, "values"):
        return _expanded(array.values)
    return int(array.nbytes) + _BYTES_A_VALUE * len(array)
