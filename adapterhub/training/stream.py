"""The rows of a run that are streamed: read in blocks, encoded on the fly, drawn exactly again.

What a run must know of all rows beforehand is little. The columns are chosen in the first rows, and
hold for all. Labels are those of the option `labels`, or else a pass over all rows collects them.
Files on this machine are read through before the first step, and small ones encoded, so that a row
that is invalid does not end the run in the middle.

A block of rows is read as a task reads a table, encoded, and cut into batches as the rows of an
epoch are (`batch_order`), so that packing, grouping by length, windows and random masks are the
same as without a stream. Blocks are encoded in this process, or ahead of it in worker processes.

A place in the stream is where the current block begins, the number of blocks before it and of the
batches taken of it: all of that is in the checkpoint, and nothing else is needed to go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from adapterhub.data.examples import AllEmpty, Streamed
from adapterhub.data.options import DataOptions
from adapterhub.data.row_stream import (
    Block,
    BlockReader,
    Cursor,
    RowSource,
    cursor_of,
    open_source,
    read_blocks,
    read_pass,
)
from adapterhub.data.table import Table
from adapterhub.data.tables import keep_table
from adapterhub.errors import DataError
from adapterhub.recipe.options import RunOptions
from adapterhub.status import doing
from adapterhub.tasks import Encoded, Setting, Task
from adapterhub.tasks.common.encoding import Row

if TYPE_CHECKING:
    from adapterhub.loop.engine import Batch


BUFFER = 10_000  # rows of a block
_HEAD = 256  # rows in which the columns are chosen
_READ_THROUGH, _ENCODED = 256 << 20, 8 << 20  # bytes of files that are checked before step 1


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

    def __getitem__(self, index: int | slice) -> Any:
        return self.head[index]

    def __iter__(self) -> Iterator[Any]:
        for block in read_pass(self.source, BUFFER):
            yield from self.read(block.table)

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
        except AllEmpty:
            return []

    def within(self, most: int) -> bool:
        """Return whether the rows are on this machine, in files of so many bytes at most."""
        return self.source.size is not None and self.source.size <= most

    def read_through(self) -> None:
        """Read all rows once, where that is cheap, to find those that are invalid.

        Raises:
            DataError: rows are invalid.
        """
        if self.within(_READ_THROUGH):
            with doing(f"reading {self.source.location} through"):
                for _ in self:
                    pass

    def labels(self) -> tuple[str, ...]:
        """Read all rows once, and return their labels in the order of the logits."""
        if not self.task.labels(self.head):
            self.read_through()
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
    with contextlib.suppress(DataError):  # which the run itself raises
        task.read(location, choice.options, "train")
        guessed += first.table.unused_note(guessed, "of the first rows")
    shards = f"{len(source.shards):,} shard{'s' * (len(source.shards) > 1)}"
    note = f"{location}: streamed from {shards}; columns: {', '.join(source.columns)}"
    return ExampleStream(source, task, choice.options), (note, *guessed)


EncodedBlock = tuple[list[Row], Sequence[int]]
"""The rows of a block, and the example of each."""


class LazyRows(Sequence[Row]):
    """The rows of streamed examples. Iterating encodes all; an index is of the first ones."""

    def __init__(self, stream: ExampleStream, task: Task, setting: Setting) -> None:
        self.stream, self.task, self.setting = stream, task, setting
        self.head = task.encode(stream.head, setting, labelled=True)
        if stream.within(_ENCODED):  # what a tokenizer or a chat template refuses is found, too
            for _ in self:
                pass

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, index: int | slice) -> Any:
        return self.head.rows[index]

    def __iter__(self) -> Iterator[Row]:
        for block in read_pass(self.stream.source, BUFFER):
            yield from _encoded(self.task, self.stream.read(block.table), self.setting)[0]


@dataclass(frozen=True)
class StreamedRows(Encoded):
    """The training rows of a run whose examples are streamed."""

    @property
    def stream(self) -> ExampleStream:
        """The examples."""
        assert isinstance(self.examples, ExampleStream)
        return self.examples

    @property
    def head(self) -> Encoded:
        """The first rows."""
        assert isinstance(self.rows, LazyRows)
        return self.rows.head

    @property
    def lengths(self) -> list[int]:
        """The lengths of the first rows: the others are not known."""
        return self.head.lengths


def stream_rows(stream: ExampleStream, task: Task, setting: Setting) -> StreamedRows:
    """Return the rows of streamed examples, which are encoded when they are drawn."""
    return StreamedRows(task, setting, stream, LazyRows(stream, task, setting), ())


def _encoded(task: Task, examples: list[Any], setting: Setting) -> EncodedBlock:
    if not examples:
        return [], ()
    encoded = task.encode(examples, setting, labelled=True)
    return list(encoded.rows), encoded.owners


@dataclass(frozen=True)
class _Work:
    """A block to encode: where it begins, and its examples."""

    place: _Place
    examples: list[Any]


class _BlockEncoder:
    """Encodes a block, here or in a worker process: a data set of torch, indexed by the work."""

    def __init__(self, task: Task, setting: Setting) -> None:
        self.task, self.setting = task, setting

    def __getitem__(self, work: _Work) -> tuple[_Work, EncodedBlock]:
        return work, _encoded(self.task, work.examples, self.setting)


@dataclass(frozen=True)
class _Place:
    """Where the next batch is: the block's number and beginning, and the batches taken of it."""

    number: int
    cursor: Cursor
    batch: int = 0


class StreamBatches:
    """A `BatchList` without an end of its own: it is as long as the run, and read in order."""

    def __init__(
        self,
        rows: StreamedRows,
        options: RunOptions,
        *,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
        buffer: int = BUFFER,
    ) -> None:
        # Whole batches: only the last block of a pass has a smaller one.
        size = -(-buffer // options.batch_size) * options.batch_size
        self.reader = BlockReader(size, rows.setting.seed, rank, world)
        self.rows, self.options, self.workers = rows, options, workers
        assert options.max_steps is not None
        self.total = options.max_steps * options.gradient_accumulation * world
        self.place = _Place(0, Cursor())
        self.batches: Iterator[Batch] | None = None

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int, /) -> Batch:
        """Return the next batch of this process, whatever the index is."""
        if self.batches is None:
            self.batches = self._read(self.place)
        return next(self.batches)

    def state(self) -> dict[str, Any]:
        """Return the place of the next batch, in plain values."""
        place = self.place
        return {"block": place.number, "batch": place.batch, "cursor": place.cursor.record()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a place that `state` returned."""
        self.place = _Place(state["block"], cursor_of(state["cursor"]), state["batch"])
        self.batches = None

    def close(self) -> None:
        """Stop the workers."""
        self.batches = None

    def _read(self, start: _Place) -> Iterator[Batch]:
        """Yield batches from a place on; `self.place` is then the place behind it."""
        import torch
        from torch.utils.data import DataLoader

        from adapterhub.loop.engine import batch_order

        rows, passed, options = self.rows, start.batch, self.options
        blocks = rows.stream.blocks(self.reader, start.cursor)
        loader: Any = DataLoader(
            _BlockEncoder(rows.task, rows.setting),  # type: ignore[arg-type]
            sampler=(
                _Work(_Place(number, cursor), examples)
                for number, (cursor, examples) in enumerate(blocks, start.number)
            ),
            batch_size=None,
            num_workers=self.workers,
            collate_fn=_unchanged,
            # The run's own generator is not read: a resumed run would differ.
            generator=torch.Generator(),
            multiprocessing_context="spawn" if self.workers else None,
        )
        for work, (found, owners) in loader:
            encoded = Encoded(rows.task, rows.setting, work.examples, found, owners)
            epoch = work.place.number * self.reader.world + self.reader.rank
            order = batch_order(
                encoded.lengths,
                options.batch_size,
                epoch,
                rows.setting.seed,
                options.length_grouped,
            )
            for index in range(passed, len(order)):
                self.place = replace(work.place, batch=index + 1)
                yield encoded.batch(order[index], epoch)
            passed = 0


def _unchanged(block: Any) -> Any:
    return block
