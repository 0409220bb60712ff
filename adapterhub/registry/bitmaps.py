"""Sets of small whole numbers in a table of SQLite, each by its kind and word.

A set is bits in chunks of 2,048, and chunks without a member are not there: sets that hold almost
everything and sets of one member are both small, and their intersection is one `&` of Python's
integers.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping

SCHEMA = """
    CREATE TABLE IF NOT EXISTS sets (
        kind TEXT, word TEXT, chunk INTEGER, bits BLOB, PRIMARY KEY (kind, word, chunk)
    ) WITHOUT ROWID;
"""
_BYTES = 256
_LAST = "\U0010ffff"

Key = tuple[str, str]


class Bitmaps:
    """The sets in one database. A set is given as one integer: bit i stands for the number i."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def of(self, kind: str, word: str) -> int:
        """Return one set; empty if it does not exist."""
        sql = "SELECT chunk, bits FROM sets WHERE (kind, word) = (?, ?)"
        return _union(self.db.execute(sql, (kind, word)))

    def starting(self, kind: str, start: str) -> int:
        """Return the union of the sets of all words with this prefix."""
        sql = "SELECT chunk, bits FROM sets WHERE kind = ? AND word >= ? AND word < ?"
        return _union(self.db.execute(sql, (kind, start, start + _LAST)))

    def add(self, members: Mapping[Key, Iterable[int]]) -> None:
        """Add members to sets."""
        for key, numbers in members.items():
            for chunk, bits in _chunks(numbers).items():
                self._put(key, chunk, self._chunk(key, chunk) | bits)

    def remove(self, key: Key, numbers: Iterable[int]) -> None:
        """Take members out of a set."""
        for chunk, bits in _chunks(numbers).items():
            self._put(key, chunk, self._chunk(key, chunk) & ~bits)

    def _chunk(self, key: Key, chunk: int) -> int:
        sql = "SELECT bits FROM sets WHERE (kind, word, chunk) = (?, ?, ?)"
        row = self.db.execute(sql, (*key, chunk)).fetchone()
        return int.from_bytes(row[0], "little") if row else 0

    def _put(self, key: Key, chunk: int, bits: int) -> None:
        data = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
        self.db.execute("INSERT OR REPLACE INTO sets VALUES (?, ?, ?, ?)", (*key, chunk, data))


def members(bits: int) -> Iterator[int]:
    """Yield the numbers in a set, ascending."""
    data = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
    for place, byte in enumerate(data):
        if byte:
            yield from (8 * place + bit for bit in range(8) if byte >> bit & 1)


def _chunks(numbers: Iterable[int]) -> dict[int, int]:
    chunks: dict[int, int] = {}
    for number in numbers:
        chunk, bit = divmod(number, 8 * _BYTES)
        chunks[chunk] = chunks.get(chunk, 0) | 1 << bit
    return chunks


def _union(rows: Iterable[tuple[int, bytes]]) -> int:
    chunks: dict[int, int] = {}
    for chunk, data in rows:
        chunks[chunk] = chunks.get(chunk, 0) | int.from_bytes(data, "little")
    whole = bytearray(_BYTES * (max(chunks, default=-1) + 1))
    for chunk, bits in chunks.items():
        whole[chunk * _BYTES : (chunk + 1) * _BYTES] = bits.to_bytes(_BYTES, "little")
    return int.from_bytes(whole, "little")
