"""The batches of streamed examples: encoded on the fly, and drawn again exactly after a kill.

A block of rows is encoded and cut into batches as the rows of an epoch are (`batch_order`), so that
packing, grouping by length, windows and random masks are the same as without a stream. Blocks are
encoded in this process, or ahead of it in worker processes.

A place in the stream is where the current block begins, the number of blocks before it and of the
batches taken of it: all of that is in the checkpoint, and nothing else is needed to go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from adapterhub.data.row_stream import BlockReader, Cursor, cursor_of, read_pass
from adapterhub.loop.batching import Batch, batch_order
from adapterhub.recipe.options import RunOptions
from adapterhub.tasks import Encoded, Setting, Task
from adapterhub.tasks._rows import Row
from adapterhub.training.example_stream import BUFFER, ExampleStream

Work = tuple[int, list[Any]]
"""A block to encode: its number, and its examples."""
EncodedBlock = tuple[list[Row], Sequence[int]]
"""The rows of a block, and the example of each."""


class LazyRows(Sequence[Row]):
    """The rows of streamed examples. Iterating encodes all; an index is of the first ones."""

    def __init__(self, stream: ExampleStream, task: Task, setting: Setting) -> None:
        self.stream, self.task, self.setting = stream, task, setting
        self.head = task.encode(stream.head, setting, labelled=True)

    def __len__(self) -> int:
        return len(self.stream)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self.head.rows[index]  # type: ignore[return-value]

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


class _BlockEncoder(Dataset[Any]):
    """Encodes a block, here or in a worker process."""

    def __init__(self, task: Task, setting: Setting) -> None:
        self.task, self.setting = task, setting

    def __getitem__(self, work: Work) -> tuple[int, list[Any], EncodedBlock]:
        number, examples = work
        return number, examples, _encoded(self.task, examples, self.setting)


@dataclass
class _Place:
    """Where the next batch is: the block's number and beginning, and the batches taken of it."""

    number: int
    cursor: Cursor
    batch: int = 0


class _Blocks(Sampler[Work]):
    """Reads blocks in this process, and remembers where each begins until it comes back."""

    def __init__(self, rows: StreamedRows, reader: BlockReader, start: _Place) -> None:
        self.rows, self.reader, self.start = rows, reader, start
        self.places: deque[_Place] = deque()

    def __iter__(self) -> Iterator[Work]:
        blocks = self.rows.stream.blocks(self.reader, self.start.cursor)
        for number, (cursor, examples) in enumerate(blocks, start=self.start.number):
            self.places.append(_Place(number, cursor))
            yield number, examples


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
            self.batches = self._read(replace(self.place))
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
        rows, passed = self.rows, start.batch
        blocks = _Blocks(rows, self.reader, start)
        loader = DataLoader(
            _BlockEncoder(rows.task, rows.setting),
            sampler=blocks,
            batch_size=None,
            num_workers=self.workers,
            collate_fn=_unchanged,
            # The run's own generator is not read: a resumed run would differ.
            generator=torch.Generator(),
            multiprocessing_context="spawn" if self.workers else None,
        )
        for number, examples, (found, owners) in loader:
            place = blocks.places.popleft()
            encoded = Encoded(rows.task, rows.setting, examples, found, owners)
            epoch = number * self.reader.world + self.reader.rank
            order = self._order(encoded, epoch)
            for index in range(passed, len(order)):
                self.place = replace(place, batch=index + 1)
                yield encoded.batch(order[index], epoch)
            passed = 0

    def _order(self, encoded: Encoded, epoch: int) -> list[list[int]]:
        options, seed = self.options, self.rows.setting.seed
        size, grouped = options.batch_size, options.length_grouped
        return batch_order(encoded.lengths, size, epoch, seed, grouped)


def _unchanged(block: Any) -> Any:
    return block
