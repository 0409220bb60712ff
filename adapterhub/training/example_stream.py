"""The examples of a run that are streamed: read in blocks, as a task reads a table.

What a run must know of all rows beforehand is little. The columns are chosen in the first rows, and
hold for all. Labels are those of the option `labels`, or else a pass over all rows collects them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, overload

from adapterhub.data.examples import Streamed
from adapterhub.data.options import DataOptions
from adapterhub.data.row_source import RowSource, open_source
from adapterhub.data.row_stream import Block, BlockReader, Cursor, read_blocks, read_pass
from adapterhub.data.table import Table
from adapterhub.data.tables import keep_table
from adapterhub.errors import DataError
from adapterhub.status import doing
from adapterhub.tasks import Task

BUFFER = 10_000  # rows of a block
_HEAD = 256  # rows in which the columns are chosen


@dataclass(frozen=True)
class ExampleStream(Sequence[Any], Streamed):
    """The examples of a source. An epoch is what a run draws of them, over one or more passes.

    Iterating reads all of them once; an index or slice is of the first ones.

    Attributes:
        source: the rows.
        task: the task that reads them.
        options: the format and the columns.
        epoch: how many examples the run draws.
    """

    source: RowSource
    task: Task
    options: DataOptions
    epoch: int = 0

    @property
    def sha256(self) -> str:
        """The sha256 that identifies the source."""
        return self.source.sha256

    @cached_property
    def head(self) -> list[Any]:
        """The first examples."""
        blocks = read_pass(self.source, _HEAD)
        return next((found for block in blocks if (found := self.read(block.table))), [])

    def __len__(self) -> int:
        return self.epoch

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.head[index]

    def __iter__(self) -> Iterator[Any]:
        for block in read_pass(self.source, BUFFER):
            yield from self.read(block.table)

    def drawn(self, count: int, seed: int) -> list[Any]:
        """Return a random choice of `count` examples (reservoir sampling: Vitter 1985, R)."""
        chance, chosen = random.Random(seed), []
        for number, example in enumerate(self):
            place = number if number < count else chance.randrange(number + 1)
            if number < count:
                chosen.append(example)
            elif place < count:
                chosen[place] = example
        return chosen

    def blocks(self, reader: BlockReader, cursor: Cursor) -> Iterator[tuple[Cursor, list[Any]]]:
        """Yield the examples of each block, and where it begins, without end."""
        for block in read_blocks(self.source, reader, cursor):
            yield block.cursor, self.read(block.table)

    def read(self, table: Table) -> list[Any]:
        """Read the rows of a block; with `skip_empty`, there may be none.

        Raises:
            DataError: rows are invalid.
        """
        location = self.source.location
        keep_table(table, location, self.options, "train")
        try:
            return self.task.read(location, self.options, "train")
        except DataError:
            if self.options.skip_empty and _has_empty_rows_only(table, self.options):
                return []
            raise

    def labels(self) -> tuple[str, ...]:
        """Read all rows once, and return their labels in the order of the logits."""
        if not self.task.labels(self.head):
            return ()
        known: set[str] = set()
        shown: list[Any] = []  # an example of each label
        with doing(f"collecting the labels of {self.source.location}"):
            for block in read_pass(self.source, BUFFER):
                examples = self.read(block.table)
                if set(self.task.labels(examples)) <= known:
                    continue
                for example in examples:
                    if new := set(self.task.labels([example])) - known:
                        known |= new
                        shown.append(example)
        return self.task.labels(shown)


def open_examples(
    location: str, options: DataOptions, task: Task, split: str = "train"
) -> tuple[ExampleStream, tuple[str, ...]]:
    """Open examples to stream, and choose their columns; return them with notes for the user.

    Raises:
        DataError: there are no rows, they cannot be read, or the columns are in doubt.
    """
    source = open_source(location, options, split)
    first: Block | None = next(read_pass(source, _HEAD), None)
    if first is None:
        raise DataError(f"{location} has no rows")
    keep_table(first.table, location, options, "train")
    task, choice = task.fitted(location, options, "train")
    guessed = choice.notes[1:]  # the first one counts the rows, which are only the first ones here
    shards = f"{len(source.shards):,} shard{'s' * (len(source.shards) > 1)}"
    note = f"{location}: streamed from {shards}; columns: {', '.join(source.columns)}"
    return ExampleStream(source, task, choice.options), (note, *guessed)


def read_some(location: str, options: DataOptions, task: Task, most: int | None) -> list[Any]:
    """Read the first examples of a source that only a stream reads, to evaluate on."""
    stream, _ = open_examples(location, options, task, "eval")
    return list(islice(replace(stream, task=task), most))


def _has_empty_rows_only(table: Table, options: DataOptions) -> bool:
    """Return whether rows with an empty cell, which are skipped, are all that a block has."""
    used = [name for name in (options.text, options.pair, options.label) if name]
    columns = [list(column) for column in table.take([n for n in used if n in table.columns])]
    return bool(columns) and all(
        any(cell is None or not str(cell).strip() for cell in row)
        for row in zip(*columns, strict=True)
    )
