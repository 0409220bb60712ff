"""Rows of any number, read in blocks: never more than one block is in memory.

A block has rows of several shards, taken in turn, so that shards that were sorted are mixed; the
order of the shards is drawn anew in each pass. Which rows are in a block depends on the seed, the
process and the number of processes alone, and a `Cursor` of a few numbers is the place in the
stream: a reader that starts there yields the same blocks.

Several processes share the rows of a pass: each reads shards of its own if there are as many shards
as processes, else each reads all of them and keeps every n-th row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from adapterhub.data.row_source import RowSource
from adapterhub.data.table import Table, table_of_rows
from adapterhub.errors import DataError

TOGETHER = 8  # shards that are read in turn


@dataclass(frozen=True)
class Cursor:
    """A place in a stream.

    Attributes:
        turn: the pass over the rows, counted from 0.
        opened: how many shards of the pass were opened.
        reading: the open shards: (position in the order of the pass, rows taken).
    """

    turn: int = 0
    opened: int = 0
    reading: tuple[tuple[int, int], ...] = ()

    def record(self) -> dict[str, Any]:
        """Return plain values, for `cursor_of`."""
        return asdict(self)


def cursor_of(record: dict[str, Any]) -> Cursor:
    """Return the cursor that `Cursor.record` described."""
    reading = tuple((int(position), int(taken)) for position, taken in record["reading"])
    return Cursor(int(record["turn"]), int(record["opened"]), reading)


@dataclass(frozen=True)
class Block:
    """Some rows: the place in the stream where they begin, and their number in the pass."""

    table: Table
    cursor: Cursor


@dataclass(frozen=True)
class BlockReader:
    """What decides which rows a process reads, and in which order.

    Attributes:
        size: the rows of a block.
        seed: the seed of the order of the shards; None: in their order.
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
        """Return whether processes read shards of their own; else rows of all shards."""
        return count >= self.world


class _OpenShard:
    """A shard that is being read, from behind its first `taken` rows on."""

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
        found = []
        while most:
            table = self.rest if self.rest is not None else next(self.tables, None)
            self.rest = None
            if table is None:
                break
            if table.num_rows > most:
                table, self.rest = table.slice(0, most), table.slice(most)
            found.append((table, self.taken))
            most -= table.num_rows
            self.taken += table.num_rows
        return found

    def name_of(self, row: int) -> str:
        """Return where a row is, for errors."""
        return f"{self.first + row * self.step + 1} of {self.source.shards[self.shard]}"


def read_blocks(
    source: RowSource, reader: BlockReader, cursor: Cursor | None = None
) -> Iterator[Block]:
    """Yield blocks of rows from a place on, pass after pass, without end.

    Raises:
        DataError: the source cannot be read, or has no rows for this process.
    """
    state = cursor or Cursor()
    while True:
        some = False
        for block in _one_pass(source, reader, state):
            yield block
            some = True
        if not some and state == Cursor(state.turn):
            whose = f" for process {reader.rank + 1} of {reader.world}" if reader.world > 1 else ""
            raise DataError(f"{source.location} has no rows{whose}")
        state = Cursor(state.turn + 1)


def read_pass(source: RowSource, size: int) -> Iterator[Block]:
    """Yield all rows once, in blocks of `size`, in the order of the shards."""
    return _one_pass(source, BlockReader(size), Cursor())


def _one_pass(source: RowSource, reader: BlockReader, cursor: Cursor) -> Iterator[Block]:
    """Yield the blocks of a pass, from a place in it."""
    order, opened = reader.shards(len(source.shards), cursor.turn), cursor.opened
    reading = [
        _OpenShard(source, order[position], position, taken, reader)
        for position, taken in cursor.reading
    ]
    while True:
        places = tuple((shard.position, shard.taken) for shard in reading)
        before = Cursor(cursor.turn, opened, places)
        parts: list[tuple[Any, list[str]]] = []
        missing = reader.size
        while missing:
            while len(reading) < TOGETHER and opened < len(order):
                reading.append(_OpenShard(source, order[opened], opened, 0, reader))
                opened += 1
            if not reading:
                break
            missing -= _take_in_turn(reading, missing, parts)
        if not parts:
            return
        yield Block(_table(source, parts), before)


def _take_in_turn(
    reading: list[_OpenShard], missing: int, parts: list[tuple[Any, list[str]]]
) -> int:
    """Take rows of each open shard, in equal parts, and return how many; forget ended shards.

    `parts` gets tables of rows, and where each row is.
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
    return table_of_rows(source.location, source.columns, places, column)
