"""Read columns of Parquet files.

A file stores equal values once: 100 kB can expand to gigabytes. A column is therefore read in
batches, and rows with equal texts share one Python object. The sizes stated in the file must fit
into the free memory.

An Arrow table gives each object all keys of its column's objects: missing keys are null.
`plain_values` drops them at every depth. A key that was null in the row itself cannot be
distinguished, and is dropped too, unless the table keeps its objects as JSON.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from adapterhub.data.table import inner_cell, inner_columns, names_of_classes
from adapterhub.errors import DataError

_BYTES_A_VALUE = 64  # of a Python object and its list slot, without its characters
_MOST_ROWS = 256  # of a batch


class ExpansionError(ValueError):
    """The values of a file take more memory than is free."""


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

    def values(self, name: str) -> list[object]:
        """Read the values of a column or of a field in it, such as `doc.text`; classes as names.

        Raises:
            ExpansionError: the values take more memory than is free.
            ValueError: the column is damaged; pyarrow also raises its own errors.
        """
        import pyarrow.parquet

        # The sizes of single columns are not read: pyarrow ends the process where they are damaged.
        groups = map(self.metadata.row_group, range(self.metadata.num_row_groups))
        size = self.rows * _BYTES_A_VALUE + sum(group.total_byte_size for group in groups)
        if size > (free := free_memory()):
            raise ExpansionError(f"its values take {size:,} bytes, and {int(free):,} are free")
        file = pyarrow.parquet.ParquetFile(io.BytesIO(self.data), metadata=self.metadata)
        values: list[object] = []
        known: dict[str, str] = {}
        for rows in file.iter_batches(_MOST_ROWS, columns=[name], use_threads=False):
            rows.validate(full=True)  # damaged offsets end the process where they are read
            if rows.num_columns != 1:
                raise ValueError(f"the column {name!r} is damaged")
            batch = plain_values(rows.column(0))
            values += (known.setdefault(v, v) if type(v) is str else v for v in batch)
        if name in self.inner:
            return [inner_cell(value, self.inner[name]) for value in values]
        return names_of_classes(self.classes.get(name), values)


def free_memory() -> float:
    """Return the bytes that this process may use; infinity if the system does not report them."""
    try:
        import resource

        lines = Path("/proc/meminfo").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("MemAvailable:"))
        free = int(line.split()[1]) * 1024.0
        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        return free if most == resource.RLIM_INFINITY else min(free, most - used)
    except (ImportError, OSError, ValueError):
        return math.inf


def open_parquet(data: bytes) -> ParquetColumns:
    """Open a Parquet file and read its summary."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(io.BytesIO(data))
    names = tuple(file.schema_arrow.names)
    inner = {name: path[1:] for name, path in columns_in_structs(file.schema_arrow).items()}
    classes = _classes(file.schema_arrow.metadata or {})
    return ParquetColumns(data, file.metadata, (*names, *inner), classes, inner)


def columns_in_structs(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return the columns in the structs of a schema, such as `doc.text`, with their paths."""
    inner: dict[str, tuple[str, ...]] = {}
    for each in schema:
        inside = inner_columns(each.name, _empty_struct(each.type))
        inner |= {name: (each.name, *path) for name, path in inside.items()}
    return {name: path for name, path in inner.items() if name not in schema.names}


def values_of(rows: Any, name: str) -> list[object]:
    """Return the values of a column of an Arrow table, or of a field in its structs."""
    column, *path = columns_in_structs(rows.schema).get(name, (name,))
    return [inner_cell(value, path) for value in plain_values(rows.column(column))]


def plain_values(array: Any) -> list[object]:
    """Return the values of an Arrow array as in JSON lines: objects with their own keys."""
    change = _plain_form(array.type)
    values: list[object] = array.to_pylist()
    return values if change is None else [*map(change, values)]


def _plain_form(kind: Any) -> Callable[[Any], Any] | None:
    """Return the converter to plain values for an Arrow type; None if none is needed."""
    import pyarrow.types as types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: None if value is None else json.loads(value)
    if types.is_map(kind):
        inner = _plain_form(kind.item_type) or _same
        return lambda value: value if value is None else {k: inner(v) for k, v in value}
    if types.is_struct(kind):
        names = {kind.field(i).name for i in range(kind.num_fields)}
        if names == {"bytes", "path"}:  # an image or audio, with one null field
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
    """Return the fields of a struct and of nested structs, as an object without values."""
    import pyarrow

    if not pyarrow.types.is_struct(kind):
        return None
    return {each.name: _empty_struct(each.type) for each in kind}


class _Classes(NamedTuple):
    """The classes of a column: `names`, or `feature` for the items of its lists."""

    names: Sequence[str] = ()
    feature: _Classes | None = None


def _classes(metadata: Mapping[bytes, bytes]) -> dict[str, _Classes]:
    """Return the class names that the library datasets stored in a file, by column."""
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
        DataError: the file is not a Parquet file, or is damaged in parts read inside.
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
