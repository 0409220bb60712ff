"""Cells and their digests."""

from __future__ import annotations

from dataclasses import replace

from adapterhub.bench.cells import Cell, cell_key

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
    assert CELL.group == ("sst2", "lora(rank=4)", 1_000)
