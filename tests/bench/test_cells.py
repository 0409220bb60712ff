"""Cells, their digests, and the search for learning rates: a pure function of what is done."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.bench import cells as searching
from adapterhub.bench.cells import Cell, Group, cell_key
from adapterhub.errors import ConfigError

CELL = Cell("sst2", "lora(rank=4)", 1_000, 200, 1e-3, 1, "final")


def test_a_key_depends_on_what_decides_a_result_and_on_nothing_else():
    key = cell_key(CELL, {"data": 1})
    assert cell_key(replace(CELL, task="other", method="named otherwise"), {"data": 1}) == key
    changed = [
        replace(CELL, rows=2), replace(CELL, steps=2), replace(CELL, rate=2.0),
        replace(CELL, seed=2), replace(CELL, stage="search"),
    ]  # fmt: skip
    keys = {cell_key(cell, {"data": 1}) for cell in changed} | {cell_key(CELL, {"data": 2}), key}
    assert len(keys) == len(changed) + 2


def test_every_cell_is_in_one_shard():
    keys = [cell_key(replace(CELL, seed=seed), {}) for seed in range(50)]
    shards = [searching.parse_shard(f"{number}/3") for number in (1, 2, 3)]
    assert all(sum(shard.has(key) for shard in shards) == 1 for key in keys)
    assert all(any(shard.has(key) for key in keys) for shard in shards)
    assert all(searching.Shard().has(key) for key in keys)
    for text in ("0/3", "4/3", "1", "a/b", "1/0", "-1/2"):
        with pytest.raises(ConfigError, match="--shard") as error:
            searching.parse_shard(text)
        assert "K/N" in str(error.value)


GROUP = Group("data", "lora", 1_000, 200, 1e-3)
Landscape = Callable[[Cell], float]


def conduct(
    groups: list[Group],
    landscape: Landscape,
    rates: int = 5,
    seeds: int = 3,
    batch: int = 1000,
    tuning_seeds: int = 1,
) -> tuple[dict[Group, searching.RateChoice], list[Cell]]:
    """Run a whole search; `batch` cells at a time, as a study that is killed and continued."""
    done: dict[Cell, float] = {}
    order: list[Cell] = []
    for _ in range(10_000):
        cells, choices = searching.next_cells(groups, rates, seeds, done.get, tuning_seeds)
        if not cells:
            return choices, order
        assert not set(cells) & done.keys(), "a cell is run twice"
        assert len(set(cells)) == len(cells)
        for cell in cells[:batch]:
            done[cell] = landscape(cell)
            order.append(cell)
    raise AssertionError("the search does not end")


def peak_at(rate: float) -> Landscape:
    return lambda cell: -abs(math.log10(cell.rate / rate)) + cell.steps / 1e6


@given(st.floats(-4, 4), st.integers(3, 7))
def test_the_best_rate_of_the_grid_is_found(decades, rates):
    best = GROUP.rate * 10**decades
    choices, cells = conduct([GROUP], peak_at(best), rates)
    chosen = choices[GROUP].rate
    assert chosen is not None
    tried = {cell.rate for cell in cells if cell.stage == "search"}
    assert abs(math.log10(chosen / best)) == pytest.approx(
        min(abs(math.log10(rate / best)) for rate in tried), abs=0.01
    )
    below, above = (
        searching.rate_grid(GROUP.rate, rates)[0],
        searching.rate_grid(GROUP.rate, rates)[-1],
    )
    reach = searching.STEP**searching.MOST_EXTENSIONS
    outside = not below / reach / 1.2 < best < above * reach * 1.2
    assert chosen in (min(tried), max(tried)) or not outside, "the best rate is beyond all grids"


def test_a_best_rate_inside_the_grid_costs_the_planned_trials():
    choices, cells = conduct([GROUP], peak_at(1e-3))
    steps = [cell.steps for cell in cells]
    assert steps == [GROUP.steps // searching.SHARE] * 5 + [GROUP.steps] * (searching.KEPT + 3)
    assert choices[GROUP].trials == tuple(cells[:7])
    assert [cell.seed for cell in cells] == [0] * 7 + [1, 2, 3]
    assert {cell.rate for cell in cells[7:]} == {1e-3}


def lucky_at(rate: float, seed: int = 0) -> Landscape:
    """Return scores where a rate is by far the best with one seed, and diverges with others."""

    def score(cell: Cell) -> float:
        if cell.rate != rate:
            return 0.5 - abs(math.log10(cell.rate / 1e-3)) / 10
        return 0.9 if cell.seed == seed else 0.0

    return score


@pytest.mark.parametrize(("tuning", "chosen"), [(1, 3.16e-3), (2, 1e-3), (3, 1e-3)])
def test_a_rate_that_one_seed_is_lucky_with_is_not_chosen_by_several(tuning, chosen):
    choices, cells = conduct([GROUP], lucky_at(3.16e-3), tuning_seeds=tuning)
    assert choices[GROUP].rate == chosen
    seeds = {cell.seed for cell in cells if cell.stage == "search"}
    finals = {cell.seed for cell in cells if cell.stage == "final"}
    assert len(seeds) == tuning
    assert finals == {1, 2, 3}
    assert not seeds & finals, "what is tested has chosen nothing"


scores = st.one_of(st.floats(-1, 1), st.just(-math.inf), st.just(math.nan))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_a_study_that_is_continued_ends_as_one_that_was_not(data, rates, seeds, batch, tuning):
    groups = [Group("t", m, 100, steps, 1e-3) for m, steps in (("a", 8), ("b", 400))]
    table: dict[Cell, float] = {}

    def landscape(cell: Cell) -> float:
        return table.setdefault(cell, data.draw(scores))

    whole = conduct(groups, landscape, rates, seeds, tuning_seeds=tuning)
    parts = conduct(groups, landscape, rates, seeds, batch, tuning)
    assert whole[0] == parts[0]
    assert set(whole[1]) == set(parts[1])


def test_rates_that_diverge_are_never_chosen_and_all_of_them_mean_none():
    """With any of their seeds; equal scores choose the default."""
    assert conduct([GROUP], lambda cell: 0.5)[0][GROUP].rate == GROUP.rate
    high = conduct([GROUP], lambda cell: -math.inf if cell.rate > 5e-4 else 0.5)[0][GROUP]
    assert high.rate == 3.16e-4
    choices, cells = conduct([GROUP], lambda cell: -math.inf)
    assert choices[GROUP].rate is None
    assert {cell.stage for cell in cells} == {"search"}
    assert len(cells) == 5

    def once(cell: Cell) -> float:
        return -math.inf if (cell.rate, cell.seed) == (1e-3, 1000) else peak_at(1e-3)(cell)

    assert conduct([GROUP], once, tuning_seeds=2)[0][GROUP].rate in (3.16e-4, 3.16e-3)
