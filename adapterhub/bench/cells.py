"""Cells: the training runs of a study, each identified by a digest of its result's inputs.

The next cells are a pure function of the finished ones. A study that was killed, or whose cells ran
on other machines, continues with the same cells. Every method has the same trials.

1. `rates` learning rates, half a decade apart around the method's default, for a quarter of the
   steps, with the first seed.
2. If the best of them is at the edge of the grid, one more beyond it, at most `MOST_EXTENSIONS`
   times.
3. The best `KEPT` of them for all steps, with each of `tuning_seeds` seeds.
4. The best of those, by the mean over these seeds, with `seeds` new seeds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from adapterhub.errors import ConfigError

FORMAT = 1
STEP = math.sqrt(10)  # ratio between the rates of a grid: half a decade
SHARE = 4  # rates are first tried for this fraction of the steps
LEAST_STEPS = 20  # steps of a first trial; shorter runs are tried as a whole
KEPT = 2
MOST_EXTENSIONS = 2
TUNING_SEED = 0
_NEXT_TUNING_SEED = 1000  # new seeds; final runs have 1, 2, ...

Stage = Literal["search", "final"]


@dataclass(frozen=True, order=True)
class Group:
    """The unit of tuning: one method on one task, with some number of training rows.

    `steps` is the number of optimizer steps of a whole run. `rate` is the method's default learning
    rate, around which others are tried.
    """

    task: str
    method: str
    rows: int
    steps: int
    rate: float

    @property
    def first_steps(self) -> int:
        """The steps of the first trials."""
        short = -(-self.steps // SHARE)
        return short if short >= LEAST_STEPS else self.steps

    def trial(self, rate: float, steps: int, seed: int = TUNING_SEED) -> Cell:
        """Return a run for choosing the rate."""
        return Cell(self.task, self.method, self.rows, steps, rate, seed, "search")

    def finals(self, rate: float, seeds: int) -> list[Cell]:
        """Return the runs with the chosen rate, one for each new seed."""
        own = self.task, self.method, self.rows, self.steps, rate
        return [Cell(*own, seed, "final") for seed in range(1, seeds + 1)]


@dataclass(frozen=True)
class Cell:
    """One training run, either for choosing the (peak) learning rate or with the chosen one.

    The seed determines initialization, sampling and batch order.
    """

    task: str
    method: str
    rows: int
    steps: int
    rate: float
    seed: int
    stage: Stage

    def describe(self) -> str:
        """Describe the cell in a few words, for progress."""
        rows = f"{self.rows:,} rows" if self.stage == "search" else f"{self.rows:,} rows, final"
        return f"{self.task}: {self.method}, rate {self.rate:.1e}, seed {self.seed}, {rows}"


@dataclass(frozen=True)
class Shard:
    """Part `number` of `count` of a study's cells, from 1."""

    number: int = 1
    count: int = 1

    def has(self, key: str) -> bool:
        """Return whether this part includes the cell with a key."""
        return int(key, 16) % self.count == self.number - 1


def parse_shard(text: str) -> Shard:
    """Read a shard such as 2/4.

    Raises:
        ConfigError: the text is not a shard.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"--shard {text!r}", expected="K/N, with K from 1 to N: 2/4")
    return Shard(int(match[1]), int(match[2]))


def cell_key(cell: Cell, context: Any) -> str:
    """Return the digest of a cell; cells with equal digests have equal results."""
    facts = {k: v for k, v in asdict(cell).items() if k not in ("task", "method", "stage")}
    # A search cell differs from the final one, which is also tested.
    content = json.dumps([FORMAT, cell.stage, facts, context], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


ScoreOf = Callable[[Cell], float | None]
"""Return the score of a finished cell, larger is better; -inf if it diverged or failed.

Return None if the cell is not finished.
"""


@dataclass(frozen=True)
class RateChoice:
    """The learning rate chosen for a group, None if no trial succeeded, and its trials."""

    rate: float | None
    trials: tuple[Cell, ...]


def next_cells(
    groups: Iterable[Group], rates: int, seeds: int, score: ScoreOf, tuning_seeds: int = 1
) -> tuple[list[Cell], dict[Group, RateChoice]]:
    """Return the cells that can run now, none if the study is complete, and the chosen rates.

    In each group, `rates` rates are tried, `tuning_seeds` seeds choose between the best ones, and
    `seeds` runs use the chosen one.
    """
    searches: list[Cell] = []
    choices: dict[Group, RateChoice] = {}
    for group in groups:
        missing, _, choice = _search(group, rates, score, tuning_seeds)
        searches += missing
        if choice is not None:
            choices[group] = choice
    chosen = [(group, each.rate) for group, each in choices.items() if each.rate is not None]
    by_group = [group.finals(rate, seeds) for group, rate in chosen]
    # One seed of all groups after the other.
    finals = [cell for cells in zip(*by_group, strict=True) for cell in cells]
    return searches or [cell for cell in finals if score(cell) is None], choices


def expected_runs(group: Group, rates: int, seeds: int, tuning_seeds: int = 1) -> list[int]:
    """Return the steps of each run of a group; a rate beyond the edge of the grid adds one run."""
    first = [group.first_steps] * rates + [group.steps] * _whole(group, rates, tuning_seeds)
    return (first if rates > 1 else []) + [group.steps] * seeds


def runs_left(
    groups: Iterable[Group], rates: int, seeds: int, score: ScoreOf, tuning_seeds: int = 1
) -> int:
    """Return the number of remaining runs, as far as it is known."""
    left = 0
    for group in groups:
        missing, later, choice = _search(group, rates, score, tuning_seeds)
        left += len(missing) + later
        if choice is None:
            left += seeds
        elif choice.rate is not None:
            left += sum(score(cell) is None for cell in group.finals(choice.rate, seeds))
    return left


def _whole(group: Group, rates: int, tuning_seeds: int) -> int:
    """Return the number of full-length runs that choose a rate, after the first trials."""
    return min(KEPT, rates) * (tuning_seeds - (group.first_steps == group.steps))


def rate_grid(default: float, count: int) -> list[float]:
    """Return `count` rates around a default, half a decade apart; more below than above."""
    below = count // 2
    return [_rate(default, n - below) for n in range(count)]


def _rate(default: float, steps: int) -> float:
    """Return the rate this many steps above the default, regardless of the path to it."""
    return float(f"{default * STEP**steps:.3g}")


def _search(
    group: Group, rates: int, score: ScoreOf, tuning_seeds: int
) -> tuple[list[Cell], int, RateChoice | None]:
    """Return the missing trials and the number of later ones, or the choice."""
    if rates == 1:
        return [], 0, RateChoice(_rate(group.rate, 0), ())
    grid = rate_grid(group.rate, rates)
    for extensions in range(MOST_EXTENSIONS + 1):
        cells = [group.trial(rate, group.first_steps) for rate in grid]
        if missing := [cell for cell in cells if score(cell) is None]:
            return missing, _whole(group, rates, tuning_seeds), None
        ranked = _ranked(cells, score, group.rate)
        if not ranked or ranked[0] not in (min(grid), max(grid)) or extensions == MOST_EXTENSIONS:
            break
        steps = round(math.log(ranked[0] / group.rate, STEP))
        grid = sorted([*grid, _rate(group.rate, steps + (1 if ranked[0] == max(grid) else -1))])
    seeds = [TUNING_SEED, *range(_NEXT_TUNING_SEED, _NEXT_TUNING_SEED + tuning_seeds - 1)]
    whole = [group.trial(rate, group.steps, n) for n in seeds for rate in ranked[:KEPT]]
    if missing := [cell for cell in whole if score(cell) is None]:
        return missing, 0, None
    best = next(iter(_ranked(whole, score, group.rate)), None)
    return [], 0, RateChoice(best, tuple(dict.fromkeys([*cells, *whole])))


def _ranked(cells: Sequence[Cell], score: ScoreOf, default: float) -> list[float]:
    """Return the rates by the mean score of their cells, the best first; skip rates with failures.

    Ties go to the rate nearest to the default.
    """
    values: dict[float, list[float]] = {}
    for cell in cells:
        value = score(cell)
        if value is None or math.isnan(value):
            value = -math.inf
        values.setdefault(cell.rate, []).append(value)
    means = {rate: sum(each) / len(each) for rate, each in values.items()}
    order = sorted(means, key=lambda rate: (-means[rate], abs(math.log(rate / default))))
    return [rate for rate in order if means[rate] > -math.inf]
