"""Cells and their digests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adapterhub.bench.cells import Cell, Shard, cell_key, parse_shard
from adapterhub.errors import ConfigError

CELL = Cell("sst2", "lora(rank=4)", 1_000, 200, 1e-3, 1, "final")


def test_a_key_depends_on_what_decides_a_result_and_on_nothing_else() -> None:
    key = cell_key(CELL, {"data": 1})
    assert cell_key(replace(CELL, task="other", method="named otherwise"), {"data": 1}) == key
    changed = [
        replace(CELL, rows=2), replace(CELL, steps=2), replace(CELL, rate=2.0),
        replace(CELL, seed=2), replace(CELL, stage="search"),
    ]  # fmt: skip
    keys = {cell_key(cell, {"data": 1}) for cell in changed} | {cell_key(CELL, {"data": 2}), key}
    assert len(keys) == len(changed) + 2


def test_a_cell_is_described_for_progress() -> None:
    assert CELL.describe() == "sst2: lora(rank=4), rate 1.0e-03, seed 1, 1,000 rows, final"


def test_every_cell_is_in_one_shard() -> None:
    keys = [cell_key(replace(CELL, seed=seed), {}) for seed in range(50)]
    shards = [parse_shard(f"{number}/3") for number in (1, 2, 3)]
    assert all(sum(shard.has(key) for shard in shards) == 1 for key in keys)
    assert all(any(shard.has(key) for key in keys) for shard in shards)
    assert all(Shard().has(key) for key in keys)


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/2"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--shard") as error:
        parse_shard(text)
    assert "K/N" in str(error.value)
