"""Which cells are next: learning rates by successive halving, then seeds with the chosen rate.

A pure function of what is done: a study that was killed, or whose cells ran on other machines,
goes on with the same cells. Every method has the same trials.

1. `rates` learning rates, half a decade apart around the method's default, for a quarter of the
   steps, with the first seed.
2. If the best of them is at the edge of the grid, a further one beyond it; `MOST_EXTENSIONS` times,
   at most.
3. The best `KEPT` of them for all steps, with each of `tuning_seeds` seeds.
4. The best of those, by the mean of these seeds, with `seeds` further ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from adapterhub.bench.cells import Cell, Group

STEP = math.sqrt(10)  # between the rates of a grid: half a decade
SHARE = 4  # rates are first tried for one part in so many of the steps
LEAST_STEPS = 20  # of a first trial; shorter runs are tried as a whole
KEPT = 2
MOST_EXTENSIONS = 2
TUNING_SEED = 0
_NEXT_TUNING_SEED = 1000  # further ones; final runs have 1, 2, ...

ScoreOf = Callable[[Cell], float | None]
"""Returns the score of a cell that is done, larger is better; -inf if it diverged or failed.

None if it is not done.
"""


@dataclass(frozen=True)
class RateChoice:
    """The learning rate that was chosen for a group.

    Attributes:
        rate: the rate; None if no trial succeeded.
        trials: the cells that it was chosen by.
        at_edge: whether it is the smallest or largest rate that was tried.
    """

    rate: float | None
    trials: tuple[Cell, ...]
    at_edge: bool


def rate_grid(default: float, count: int) -> list[float]:
    """Return `count` rates around a default, half a decade apart; more below than above."""
    below = count // 2
    return [_rate(default, n - below) for n in range(count)]


def _rate(default: float, steps: int) -> float:
    """Return the rate so many steps above the default: equal however the grid came to it."""
    return rounded(default * STEP**steps)


def rounded(rate: float) -> float:
    """Round to three digits."""
    return float(f"{rate:.3g}")


def next_cells(
    groups: Iterable[Group], rates: int, seeds: int, score: ScoreOf, tuning_seeds: int = 1
) -> tuple[list[Cell], dict[Group, RateChoice]]:
    """Return the cells that can run now, and the choices that are made.

    Of each group, `rates` rates are tried, and `tuning_seeds` seeds choose between the best ones;
    `seeds` runs have the chosen one.

    Returns:
        The cells, none if the study is complete, and by group the rate that was chosen.
    """
    searches: list[Cell] = []
    choices: dict[Group, RateChoice] = {}
    for group in groups:
        missing, _, choice = _search(group, rates, score, tuning_seeds)
        searches += missing
        if choice is not None:
            choices[group] = choice
    finals = [
        cell
        for seed in range(1, seeds + 1)  # one seed of all groups after the other
        for group, choice in choices.items()
        if choice.rate is not None
        for cell in [final_cell(group, choice.rate, seed)]
        if score(cell) is None
    ]
    return searches or finals, choices


def expected_runs(group: Group, rates: int, seeds: int, tuning_seeds: int = 1) -> list[int]:
    """Return the steps of each run of a group; a rate beyond the edge of the grid adds one."""
    finals = [group.steps] * seeds
    if rates == 1:
        return finals
    return (
        [first_steps(group)] * rates + [group.steps] * _whole(group, rates, tuning_seeds) + finals
    )


def runs_left(
    groups: Iterable[Group], rates: int, seeds: int, score: ScoreOf, tuning_seeds: int = 1
) -> int:
    """Return how many runs are left, with those that follow from others, as far as is known."""
    left = 0
    for group in groups:
        missing, later, choice = _search(group, rates, score, tuning_seeds)
        left += len(missing) + later
        if choice is None:
            left += seeds
        elif choice.rate is not None:
            finals = [final_cell(group, choice.rate, seed) for seed in range(1, seeds + 1)]
            left += sum(score(cell) is None for cell in finals)
    return left


def _whole(group: Group, rates: int, tuning_seeds: int) -> int:
    """Return how many runs of all steps choose between the best rates, beside the first trials."""
    return min(KEPT, rates) * (tuning_seeds - (first_steps(group) == group.steps))


def final_cell(group: Group, rate: float, seed: int) -> Cell:
    """Return a run with the chosen rate."""
    return Cell(group.task, group.method, group.rows, group.steps, rate, seed, "final")


def trial(group: Group, rate: float, steps: int, seed: int = TUNING_SEED) -> Cell:
    """Return a run that serves to choose the rate."""
    return Cell(group.task, group.method, group.rows, steps, rate, seed, "search")


def seeds_that_tune(count: int) -> list[int]:
    """Return the seeds that choose between the best rates; final runs have none of them."""
    return [TUNING_SEED, *range(_NEXT_TUNING_SEED, _NEXT_TUNING_SEED + count - 1)]


def first_steps(group: Group) -> int:
    """Return the steps of the first trials."""
    short = -(-group.steps // SHARE)
    return short if short >= LEAST_STEPS else group.steps


def _search(
    group: Group, rates: int, score: ScoreOf, tuning_seeds: int
) -> tuple[list[Cell], int, RateChoice | None]:
    """Return the trials that are missing and the number of those that follow, or the choice."""
    if rates == 1:
        return [], 0, RateChoice(rounded(group.rate), (), at_edge=False)
    steps = first_steps(group)
    grid = rate_grid(group.rate, rates)
    for extensions in range(MOST_EXTENSIONS + 1):
        cells = [trial(group, rate, steps) for rate in grid]
        if missing := [cell for cell in cells if score(cell) is None]:
            return missing, _whole(group, rates, tuning_seeds), None
        best = _best(cells, score, group.rate)
        beyond = _beyond(grid, best, group.rate)
        if best is None or beyond is None or extensions == MOST_EXTENSIONS:
            break
        grid = sorted([*grid, beyond])
    if best is None:
        return [], 0, RateChoice(None, tuple(cells), at_edge=False)
    ranked = sorted(cells, key=lambda cell: _order(cell, score, group.rate))
    kept = [cell.rate for cell in ranked[:KEPT] if _value(cell, score) > -math.inf]
    seeds = seeds_that_tune(tuning_seeds)
    whole = [trial(group, rate, group.steps, seed) for seed in seeds for rate in kept]
    if missing := [cell for cell in whole if score(cell) is None]:
        return missing, 0, None
    rate = _best_on_average(whole, score, group.rate)
    trials = tuple(dict.fromkeys([*cells, *whole]))
    return [], 0, RateChoice(rate, trials, at_edge=rate in (min(grid), max(grid)))


def _best_on_average(cells: Sequence[Cell], score: ScoreOf, default: float) -> float | None:
    """Return the rate with the best mean over its seeds; None if all have runs that failed."""
    values: dict[float, list[float]] = {}
    for cell in cells:
        values.setdefault(cell.rate, []).append(_value(cell, score))
    means = {rate: sum(each) / len(each) for rate, each in values.items()}
    best = min(means, key=lambda rate: (-means[rate], abs(math.log(rate / default))))
    return best if means[best] > -math.inf else None


def _beyond(grid: Sequence[float], best: Cell | None, default: float) -> float | None:
    """Return the next rate beyond the edge of a grid at which the best one is."""
    if best is None or best.rate not in (min(grid), max(grid)):
        return None
    steps = round(math.log(best.rate / default, STEP))
    return _rate(default, steps + (1 if best.rate == max(grid) else -1))


def _best(cells: Sequence[Cell], score: ScoreOf, default: float) -> Cell | None:
    best = min(cells, key=lambda cell: _order(cell, score, default))
    return best if _value(best, score) > -math.inf else None


def _order(cell: Cell, score: ScoreOf, default: float) -> tuple[float, float]:
    """Order cells by score, and equal ones by their distance from the default rate."""
    return -_value(cell, score), abs(math.log(cell.rate / default))


def _value(cell: Cell, score: ScoreOf) -> float:
    value = score(cell)
    return -math.inf if value is None or math.isnan(value) else value
