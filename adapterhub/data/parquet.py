"""Columns of a Parquet file, whose size is checked before anything is decompressed.

A page states its size when decompressed, and a dictionary's values are stored once and repeated by
number: a file of 100 kB can expand to gigabytes, and the file's own summary need not tell. So the
headers of all pages of a column are read first, dictionaries stay dictionaries while their
expanded size is summed, and only then values become Python objects.

Format: https://parquet.apache.org/docs/file-format/, page headers in Thrift's compact protocol,
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_LEAST_LIMIT = 64 << 20  # bytes: a small file may expand to this, as a gzip file may
_MOST_EXPANSION = 100  # times the file's size; text expands 3 to 20 times
_BYTES_A_VALUE = 64  # of a Python object and its place in a list, besides its characters
_MOST_CHUNKS = 100_000  # columns times row groups, each of which has a header of its own
# Lengths as differences, and values that repeat the beginning of the one before: a value may be as
# long as its page, and pyarrow does not read them as dictionaries.
_DELTAS = (6, 7)
_MOST_BATCH = 65_536  # rows
_UNCOMPRESSED, _COMPRESSED = 2, 3  # fields of a page header
_ROW_GROUPS, _COLUMNS, _META_DATA = 4, 1, 3  # fields of a footer, a row group, a column
_CHUNK_SIZE, _DATA_PAGE, _DICTIONARY_PAGE = 7, 9, 11  # fields of the description of a column
_MOST_DEPTH = 8  # of structs and lists; a footer has six
_PAGE_KINDS = (5, 7, 8)  # of a data page, a dictionary, a data page of version 2
_VALUES, _ENCODING_FIELDS = 1, {5: 2, 7: 2, 8: 4}  # fields of these


class ExpansionError(ValueError):
    """The values of a file would take more memory than its size explains."""


@dataclass(frozen=True)
class ParquetColumns:
    """The columns of a Parquet file in memory, read one at a time."""

    data: bytes
    metadata: Any
    names: tuple[str, ...]
    chunks: list[list[_Chunk]]  # by row group and column

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return int(self.metadata.num_rows)

    def values(self, name: str) -> list[object]:
        """Read the values of a column.

        Raises:
            ExpansionError: they would take more memory than the file's size explains.
            ValueError: the column is damaged; pyarrow raises its own errors too.
        """
        import pyarrow.parquet

        limit = max(_MOST_EXPANSION * len(self.data), _LEAST_LIMIT)
        dictionaries, batch = check_pages(self, name, limit)
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
                if size > limit:
                    raise _too_large(self, limit)
                values += rows.column(0).to_pylist()
        return values


def open_parquet(data: bytes) -> ParquetColumns:
    """Open a Parquet file and read its summary.

    Raises:
        ExpansionError: it has more columns and row groups than a file of examples.
        ValueError: a column has no description; pyarrow would end the process.
    """
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(io.BytesIO(data))
    metadata = file.metadata
    if metadata.num_columns * metadata.num_row_groups > _MOST_CHUNKS:
        raise ExpansionError(f"{metadata.num_columns} columns in {metadata.num_row_groups} groups")
    chunks = _chunks(data)
    if [len(group) for group in chunks] != [metadata.num_columns] * metadata.num_row_groups:
        raise ValueError("a row group without all columns")
    return ParquetColumns(data, metadata, tuple(file.schema_arrow.names), chunks)


def check_pages(columns: ParquetColumns, name: str, limit: int) -> tuple[list[str], int]:
    """Add up what the page headers of a column state.

    Args:
        columns: the file.
        name: the column.
        limit: the most bytes that its values may take.

    Returns:
        The paths of its parts to read as dictionaries, since their pages do not tell how long the
        values are that they repeat; and how many rows to read at a time, so that these take no more
        than `limit` even if each value is as long as a page.

    Raises:
        ExpansionError: it is more than `limit`.
        ValueError: a page header is damaged.
    """
    metadata, size, dictionaries, batch = columns.metadata, 0, [], _MOST_BATCH
    for index in range(metadata.num_columns):
        leaf = metadata.schema.column(index)
        if leaf.path != name and not leaf.path.startswith(f"{name}."):
            continue
        groups = range(metadata.num_row_groups)
        pages = [
            page for group in groups for page in _pages(columns.data, columns.chunks[group][index])
        ]
        if leaf.physical_type == "BYTE_ARRAY":
            if not any(page.encoding in _DELTAS for page in pages):
                dictionaries.append(leaf.path)
            else:
                largest = max(1, *(page.size for page in pages))
                batch = min(batch, limit // largest)
                if leaf.max_repetition_level:  # a row may have any number of values
                    size += largest * sum(page.values for page in pages)
        size += sum(p.size + p.values * (_BYTES_A_VALUE + max(leaf.length, 0)) for p in pages)
        if size > limit:
            raise _too_large(columns, limit)
    return dictionaries, max(batch, 1)


def _too_large(columns: ParquetColumns, limit: int) -> ExpansionError:
    return ExpansionError(f"{len(columns.data)} bytes expand to more than {limit}")


def _expanded(array: Any) -> int:
    """Return the bytes of an array's values, with those of a dictionary at each place."""
    import pyarrow
    import pyarrow.compute as compute

    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        lengths = compute.binary_length(array.dictionary)
        return int(compute.sum(lengths.take(array.indices)).as_py() or 0)
    if pyarrow.types.is_struct(kind):
        return sum(_expanded(array.field(i)) for i in range(kind.num_fields))
    if pyarrow.types.is_map(kind):
        return _expanded(array.keys) + _expanded(array.items)
    if pyarrow.types.is_nested(kind) and hasattr(array, "values"):
        return _expanded(array.values)
    return int(array.nbytes)


@dataclass(frozen=True)
class _Page:
    """What a page header states: bytes when decompressed, values, and their encoding."""

    size: int
    values: int
    encoding: int


@dataclass(frozen=True)
class _Chunk:
    """Where the pages of a column in a row group are."""

    start: int
    size: int


def _chunks(data: bytes) -> list[list[_Chunk]]:
    """Read from the footer where the columns of each row group are.

    pyarrow ends the process if the description of a column is missing.
    """
    length = int.from_bytes(data[-8:-4], "little")
    footer, _ = _read_struct(data, len(data) - 8 - length)
    groups = footer.get(_ROW_GROUPS)
    return [[_chunk(c) for c in _list(group.get(_COLUMNS))] for group in _list(groups)]


def _list(value: Any) -> list[dict[int, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("a footer without row groups and columns")
    return value


def _chunk(column: dict[int, Any]) -> _Chunk:
    meta = column.get(_META_DATA)
    fields = meta if isinstance(meta, dict) else {}
    start, size = fields.get(_DATA_PAGE), fields.get(_CHUNK_SIZE)
    dictionary = fields.get(_DICTIONARY_PAGE, 0)
    if not (isinstance(start, int) and isinstance(size, int) and isinstance(dictionary, int)):
        raise ValueError("a column without a description")
    return _Chunk(min(start, dictionary) if dictionary > 0 else start, size)


def _pages(data: bytes, chunk: _Chunk) -> Iterator[_Page]:
    """Yield the pages of a column chunk."""
    position, end = chunk.start, chunk.start + chunk.size
    if not 0 <= position <= end <= len(data):
        raise ValueError("a column chunk is outside of the file")
    while position < end:
        header, position = _read_struct(data, position)
        size, compressed = (header.get(field) for field in (_UNCOMPRESSED, _COMPRESSED))
        if not (isinstance(size, int) and isinstance(compressed, int) and size >= 0 <= compressed):
            raise ValueError("a page header without sizes")
        position += compressed
        kinds = [(kind, header[kind]) for kind in _PAGE_KINDS if isinstance(header.get(kind), dict)]
        for kind, fields in kinds:
            count, encoding = fields.get(_VALUES), fields.get(_ENCODING_FIELDS[kind])
            if not isinstance(count, int) or not isinstance(encoding, int):
                raise ValueError("a page header without a number of values")
            yield _Page(size, max(count, 0), encoding)


def _read_struct(data: bytes, position: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Read a struct in Thrift's compact protocol: its fields by number, and where it ends."""
    fields: dict[int, Any] = {}
    number = 0
    while (byte := _byte(data, position)) != 0:
        position += 1
        if byte >> 4:
            number += byte >> 4
        else:
            number, position = _zigzag(data, position)
        fields[number], position = _read_value(data, position, byte & 15, depth)
    return fields, position + 1


def _read_value(data: bytes, position: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true and false, in the field's header
        return kind == 1, position
    if kind in (3, 4, 5, 6):
        return (_byte(data, position), position + 1) if kind == 3 else _zigzag(data, position)
    if kind == 7:
        return None, position + 8
    if kind == 8:
        length, position = _varint(data, position)
        return None, position + length
    if kind in (9, 10) and depth < _MOST_DEPTH:
        return _read_list(data, position, depth + 1)
    if kind == 12 and depth < _MOST_DEPTH:
        return _read_struct(data, position, depth + 1)
    raise ValueError(f"a page header with a field of type {kind}")


def _read_list(data: bytes, position: int, depth: int) -> tuple[list[Any], int]:
    header = _byte(data, position)
    count, position = header >> 4, position + 1
    if count == 15:
        count, position = _varint(data, position)
    if count > len(data) - position:  # each takes a byte at least
        raise ValueError("a list is longer than the file")
    items = []
    for _ in range(count):
        item, position = _read_value(data, position, 3 if header & 15 < 3 else header & 15, depth)
        items.append(item)
    return items, position


def _byte(data: bytes, position: int) -> int:
    if not 0 <= position < len(data):
        raise ValueError("a page header is outside of the file")
    return data[position]


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = _byte(data, position)
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
    raise ValueError("a page header with an endless number")


def _zigzag(data: bytes, position: int) -> tuple[int, int]:
    value, position = _varint(data, position)
    return (value >> 1) ^ -(value & 1), position
