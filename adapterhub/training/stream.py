"""Rows of a streamed run: read in blocks, encoded on the fly, and reproduced exactly on resume.

Little must be known about all rows in advance. The columns are chosen from the first rows, and
apply to all. Labels come from the option `labels`, or from a pass over all rows. Local files are
read through before the first step, and small ones are encoded, so that an invalid row does not end
the run halfway.

A block of rows is read as a task reads a table, encoded, and cut into batches like the rows of an
epoch (`batch_order`). Packing, grouping by length, windows and random masks are therefore the same
as without a stream. Blocks are encoded in this process, or ahead of time in worker processes.

A place in the stream consists of the start of the current block, the number of blocks before it,
and the number of batches taken from it. All of them are in the checkpoint, and nothing else is
needed to continue.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
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
    RowTaker,
    cursor_of,
    open_source,
    read_blocks,
    read_pass,
)
from adapterhub.data.table import Table
from adapterhub.data.tables import keep_table
from adapterhub.errors import DataError
from adapterhub.recipe.recipe import RunOptions
from adapterhub.status import doing
from adapterhub.tasks import Encoded, Setting, Task
from adapterhub.tasks.common.batches import Row
from adapterhub.training.sources import apportioned

if TYPE_CHECKING:
    from adapterhub.loop.engine import Batch


BUFFER = 10_000  # rows per block
_HEAD = 256  # rows used to choose the columns
_READ_THROUGH, _ENCODED = 256 << 20, 8 << 20  # bytes of files that are checked before step 1

Cursors = Cursor | tuple[Cursor, ...]
"""The position in a stream, or in each of several."""


@dataclass(frozen=True)
class ExampleStream(Sequence[Any], Streamed):
    """The examples of a source. An epoch is the number of examples drawn, over one or more passes.

    Iterating reads all of them once; an index or slice refers to the first ones.

    Attributes:
        source: the rows.
        task: the task that reads them.
        options: the format and the columns.
        epoch: the number of examples that the run draws.
    """

    source: RowSource
    task: Task
    options: DataOptions
    epoch: int = 0

    @property
    def sha256(self) -> str:
        """The sha256 that identifies the source."""
        return self.source.sha256

    @property
    def location(self) -> str:
        """The location given by the user."""
        return self.source.location

    @property
    def parts(self) -> tuple[ExampleStream, ...]:
        """The streams that are interleaved: by default only this one."""
        return (self,)

    @property
    def start(self) -> Cursors:
        """The position of the first row."""
        return Cursor()

    @cached_property
    def head(self) -> list[Any]:
        """The first examples."""
        blocks = read_pass(self.source, _HEAD)
        return next((examples for block in blocks if (examples := self.read(block.table))), [])

    def __len__(self) -> int:
        return self.epoch

    def __getitem__(self, index: int | slice) -> Any:
        return self.head[index]

    def __iter__(self) -> Iterator[Any]:
        for examples in self.one_pass():
            yield from examples

    def one_pass(self) -> Iterator[list[Any]]:
        """Yield all examples once, block by block."""
        for block in read_pass(self.source, BUFFER):
            yield self.read(block.table)

    def blocks(
        self, reader: BlockReader, cursor: Cursors, number: int = 0
    ) -> Iterator[tuple[Cursors, list[Any]]]:
        """Yield the examples of each block, and its start, without end.

        `number` is the number of blocks before the position.
        """
        assert isinstance(cursor, Cursor)
        for block in read_blocks(self.source, reader, cursor):
            yield block.cursor, self.read(block.table)

    def read(self, table: Table) -> list[Any]:
        """Read the rows of a block; with `skip_empty`, the result may be empty.

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
        """Return whether the rows are local, in files up to this size in bytes."""
        return self.source.size is not None and self.source.size <= most

    def read_through(self) -> None:
        """Read all rows once, if that is cheap, to find invalid ones.

        Raises:
            DataError: rows are invalid.
        """
        if self.within(_READ_THROUGH):
            with doing(f"reading {self.location} through"):
                for _ in self:
                    pass

    def labels(self) -> tuple[str, ...]:
        """Read all rows once, and return their labels in the order of the logits."""
        if not self.task.labels(self.head):
            self.read_through()
            return ()
        known: set[str] = set()
        shown: list[Any] = []  # an example of each label
        with doing(f"collecting the labels of {self.location}"):
            for examples in self.one_pass():
                if set(self.task.labels(examples)) <= known:
                    continue
                for example in examples:
                    if new := set(self.task.labels([example])) - known:
                        known |= new
                        shown.append(example)
        return self.task.labels(shown)


@dataclass(frozen=True)
class MixedStream(ExampleStream):
    """Several streams, interleaved: each block has rows of all, in their shares.

    The sources without enough rows for a block are read again from their beginning.

    Attributes:
        streams: the streams; the mixture has source, task and options of the first.
        shares: their shares of the rows, which add up to 1.
    """

    streams: tuple[ExampleStream, ...] = ()
    shares: tuple[float, ...] = ()

    @property
    def sha256(self) -> str:
        """The sha256 of all sources."""
        return hashlib.sha256("".join(each.sha256 for each in self.streams).encode()).hexdigest()

    @property
    def location(self) -> str:
        """The locations given by the user."""
        return ", ".join(each.location for each in self.streams)

    @property
    def parts(self) -> tuple[ExampleStream, ...]:
        """The streams that are interleaved."""
        return self.streams

    @property
    def start(self) -> Cursors:
        """The position of the first row of each stream."""
        return tuple(Cursor() for _ in self.streams)

    @cached_property
    def head(self) -> list[Any]:
        """The first examples of each stream."""
        return [example for each in self.streams for example in each.head]

    def one_pass(self) -> Iterator[list[Any]]:
        """Yield all examples once, stream by stream."""
        for each in self.streams:
            yield from each.one_pass()

    def blocks(
        self, reader: BlockReader, cursor: Cursors, number: int = 0
    ) -> Iterator[tuple[Cursors, list[Any]]]:
        """Yield the examples of each block, and the position of each stream at its start."""
        assert isinstance(cursor, tuple)
        takers = [
            RowTaker(each.source, reader, own)
            for each, own in zip(self.streams, cursor, strict=True)
        ]
        apportionments = apportioned(self.shares, reader.size)
        for _, counts in itertools.islice(apportionments, number, None):
            before = tuple(taker.cursor for taker in takers)
            examples: list[Any] = []
            for each, taker, count in zip(self.streams, takers, counts, strict=True):
                examples += each.read(taker.take(count)) if count else []
            yield before, examples

    def within(self, most: int) -> bool:
        """Return whether all rows are local, in files up to this size in bytes in all."""
        sizes = [each.source.size for each in self.streams]
        return None not in sizes and sum(size or 0 for size in sizes) <= most


def mix_streams(streams: Sequence[ExampleStream], weights: Sequence[float]) -> MixedStream:
    """Return several streams as one; the shares of their rows are proportional to `weights`."""
    first, shares = streams[0], tuple(weight / sum(weights) for weight in weights)
    return MixedStream(
        first.source, first.task, first.options, streams=tuple(streams), shares=shares
    )


def open_examples(
    location: str, options: DataOptions, task: Task, split: str = "train"
) -> tuple[ExampleStream, tuple[str, ...]]:
    """Open examples to stream, and choose their columns; return them with notes for the user.

    Raises:
        DataError: there are no rows, they cannot be read, or the columns are ambiguous.
    """
    source = open_source(location, options, split)
    first: Block | None = next(read_pass(source, _HEAD), None)
    if first is None:
        raise DataError(f"{location} has no rows")
    keep_table(first.table, location, options, "train")
    task, choice = task.fitted(location, options, "train")
    guessed = choice.notes[1:]  # the first one counts the rows, here only the first rows
    with contextlib.suppress(DataError):  # raised by the run itself
        task.read(location, choice.options, "train")
        guessed += first.table.unused_note(guessed, "of the first rows")
    shards = f"{len(source.shards):,} shard{'s' * (len(source.shards) > 1)}"
    note = f"{location}: streamed from {shards}; columns: {', '.join(source.columns)}"
    return ExampleStream(source, task, choice.options), (note, *guessed)


EncodedBlock = tuple[list[Row], Sequence[int]]
"""The rows of a block, and the example of each row."""


class LazyRows(Sequence[Row]):
    """The rows of streamed examples. Iterating encodes all; an index refers to the first ones."""

    def __init__(self, stream: ExampleStream, task: Task, setting: Setting) -> None:
        self.stream, self.task, self.setting = stream, task, setting
        self.head = task.encode(stream.head, setting, labelled=True)
        if stream.within(_ENCODED):  # also finds rows refused by a tokenizer or a chat template
            for _ in self:
                pass

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, index: int | slice) -> Any:
        return self.head.rows[index]

    def __iter__(self) -> Iterator[Row]:
        for examples in self.stream.one_pass():
            yield from _encoded(self.task, examples, self.setting)[0]


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
        """The lengths of the first rows; the others are unknown."""
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
    """A block to encode: its start, and its examples."""

    place: _Place
    examples: list[Any]


class _BlockEncoder:
    """Encodes a block, here or in a worker process: a torch dataset, indexed by the work."""

    def __init__(self, task: Task, setting: Setting) -> None:
        self.task, self.setting = task, setting

    def __getitem__(self, work: _Work) -> tuple[_Work, EncodedBlock]:
        return work, _encoded(self.task, work.examples, self.setting)


@dataclass(frozen=True)
class _Place:
    """The place of the next batch: the block's number and start, and the batches taken from it."""

    number: int
    cursor: Cursors
    batch: int = 0


class StreamBatches:
    """A `BatchList` without an end: it is as long as the run, and read in order."""

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
        self.place = _Place(0, rows.stream.start)
        self.batches: Iterator[Batch] | None = None

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int, /) -> Batch:
        """Return the next batch of this process, regardless of the index."""
        if self.batches is None:
            self.batches = self._read(self.place)
        return next(self.batches)

    def state(self) -> dict[str, Any]:
        """Return the place of the next batch, in plain values."""
        number, cursor = self.place.number, self.place.cursor
        several = None if isinstance(cursor, Cursor) else [each.record() for each in cursor]
        one = cursor.record() if isinstance(cursor, Cursor) else None
        return {"block": number, "batch": self.place.batch, "cursor": several or one}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a place that `state` returned."""
        saved = state["cursor"]
        several = isinstance(saved, list)
        cursor = tuple(map(cursor_of, saved)) if several else cursor_of(saved)
        self.place = _Place(state["block"], cursor, state["batch"])
        self.batches = None

    def close(self) -> None:
        """Stop the workers."""
        self.batches = None

    def _read(self, start: _Place) -> Iterator[Batch]:
        """Yield batches from a place on; `self.place` is then the place after the batch."""
        import torch
        from torch.utils.data import DataLoader

        from adapterhub.loop.engine import batch_order

        rows, passed, options = self.rows, start.batch, self.options
        blocks = rows.stream.blocks(self.reader, start.cursor, start.number)
        loader: Any = DataLoader(
            _BlockEncoder(rows.task, rows.setting),  # type: ignore[arg-type]
            sampler=(
                _Work(_Place(number, cursor), examples)
                for number, (cursor, examples) in enumerate(blocks, start.number)
            ),
            batch_size=None,
            num_workers=self.workers,
            collate_fn=_unchanged,
            # The run's generator is not used: a resumed run would differ.
            generator=torch.Generator(),
            multiprocessing_context="spawn" if self.workers else None,
        )
        for work, (encoded_rows, owners) in loader:
            encoded = Encoded(rows.task, rows.setting, work.examples, encoded_rows, owners)
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
