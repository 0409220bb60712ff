"""Blocks of streamed rows: each row once in a pass, shared by processes, drawn again exactly."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.data.options import DataOptions
from adapterhub.data.row_stream import (
    BlockReader,
    Cursor,
    RowSource,
    cursor_of,
    open_source,
    read_blocks,
    read_pass,
)
from adapterhub.errors import DataError
from tests.kit.data import write_shards
from tests.kit.selection import ALL

SIZES = (20, 13, 31)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RowSource:
    pattern = write_shards(tmp_path_factory.mktemp("shards"), SIZES)
    return open_source(pattern, DataOptions(), "train")


def texts(source: RowSource, reader: BlockReader, turn: int) -> list[str]:
    """Return the texts of one pass."""
    found: list[str] = []
    for block in read_blocks(source, reader, Cursor(turn)):
        if block.cursor.turn != turn:
            return found
        found += map(str, block.table.column("text"))
    raise AssertionError


def test_a_pass_has_every_row_once(source: RowSource) -> None:
    blocks = list(read_pass(source, 10))
    assert [len(block.table.lines) for block in blocks] == [10] * 6 + [4]
    found = [text for block in blocks for text in block.table.column("text")]
    assert len({*found}) == len(found) == sum(SIZES)


def test_each_block_has_rows_of_several_shards_and_says_where_they_are(source: RowSource) -> None:
    block = next(read_blocks(source, BlockReader(9, seed=1)))
    shards = Counter(str(place).split(" of ")[1] for place in block.table.lines)
    assert shards == {f"part-{n}.parquet": 3 for n in range(3)}
    assert list(block.table.lines)[:3] == [f"{n} of {next(iter(shards))}" for n in (1, 2, 3)]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_processes_have_different_rows_that_together_are_all(source: RowSource, world: int) -> None:
    for turn in range(3):
        own = [texts(source, BlockReader(8, 3, rank, world), turn) for rank in range(world)]
        assert all(own)
        together = [text for each in own for text in each]
        assert len({*together}) == len(together) == sum(SIZES)


def test_passes_and_seeds_have_orders_of_their_own(source: RowSource) -> None:
    one = [texts(source, BlockReader(64, seed), turn) for seed in (0, 1) for turn in range(4)]
    assert len({tuple(each) for each in one}) > 2
    assert len({frozenset(each) for each in one}) == 1


@settings(max_examples=100 if ALL else 20)
@given(
    size=st.integers(1, 70),
    seed=st.integers(0, 9),
    world=st.integers(1, 4),
    start=st.integers(0, 12),
)
def test_a_reader_that_starts_at_a_cursor_yields_the_same_blocks(
    source: RowSource, size: int, seed: int, world: int, start: int
) -> None:
    reader = BlockReader(size, seed, world - 1, world)
    whole = list(islice(read_blocks(source, reader), start + 4))
    cursor = cursor_of(json.loads(json.dumps(whole[start].cursor.record())))
    again = list(islice(read_blocks(source, reader, cursor), 4))
    assert [b.cursor for b in again] == [b.cursor for b in whole[start:]]
    assert [list(b.table.lines) for b in again] == [list(b.table.lines) for b in whole[start:]]


def test_no_rows_are_an_error_not_an_endless_loop(tmp_path: Path) -> None:
    empty = open_source(write_shards(tmp_path, (0, 0)), DataOptions(), "train")
    with pytest.raises(DataError, match="has no rows"):
        next(read_blocks(empty, BlockReader(4)))
    one = open_source(write_shards(tmp_path / "one", (1,)), DataOptions(), "train")
    with pytest.raises(DataError, match="no rows for process 2 of 2"):
        next(read_blocks(one, BlockReader(4, 0, 1, 2)))
