"""Which of the waiting requests are computed together: the oldest, and others of about its length.

A pass takes some time however little it computes, and then a time for each position. So more rows
make a batch cheaper, and so does less padding. A batch has the rows with which most tokens are
computed in a unit of time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

PADDING = 0.25  # of the positions that a batch computes
_SECONDS = 1.0  # that a measurement takes, at most
_AGAIN, _LENGTH = 8, 16  # how often a size is measured once more, and the tokens of its rows
_AS_CHEAP = 1.03  # a position that costs no more than the cheapest one times this
_ENOUGH = 10  # positions that are computed at once, for each one of the fixed part
_CHEAPER = 1.05  # larger batches are tried while a position costs less than before times this


class RequestSize(NamedTuple):
    """How large a request is: its rows, the longest of them, and the tokens of all."""

    rows: int
    longest: int
    tokens: int


class BatchLimits(NamedTuple):
    """What is computed at once.

    Attributes:
        tokens: the most positions.
        fixed: how many positions take as long as what each pass takes besides its positions.
    """

    tokens: int
    fixed: float

    @classmethod
    def of_tokens(cls, tokens: int) -> BatchLimits:
        """Return limits that were not measured."""
        return cls(tokens, tokens / 8)


def measure_limits(
    run: Callable[[int, int], object], most: int, clock: Callable[[], float] = time.perf_counter
) -> BatchLimits:
    """Measure how many positions make a pass cheap for each of them.

    These are as many as take ten times as long as what a pass costs besides, or fewer where so many
    are dearer: larger batches gain little, and their answers come later.

    Args:
        run: computes a batch, and returns when it is computed: (rows, tokens of each).
        most: the most positions.
        clock: returns the seconds.
    """

    def timed(positions: int) -> float:
        start = clock()
        run(positions // _LENGTH, _LENGTH)
        return clock() - start

    timed(_LENGTH)  # the first pass is slower
    start, measured = clock(), dict(_growing(timed, most))
    for _ in range(_AGAIN):  # in turns, so that what disturbs one disturbs others too
        for n, known in measured.items():
            if clock() - start + known < _SECONDS:
                measured[n] = min(known, timed(n))
    each = {positions: seconds / positions for positions, seconds in measured.items()}
    cheapest = min(each.values())
    largest = max(n for n, cost in each.items() if cost <= _AS_CHEAP * cheapest)
    if largest == _LENGTH:
        return BatchLimits.of_tokens(largest)
    fixed = _fixed({n: seconds for n, seconds in measured.items() if n <= largest})
    return BatchLimits(max(min(largest, round(_ENOUGH * fixed)), _LENGTH), fixed)


def _growing(timed: Callable[[int], float], most: int) -> Iterator[tuple[int, float]]:
    """Yield numbers of positions and their seconds, until more are no cheaper or take too long."""
    before, positions, left = math.inf, _LENGTH, _SECONDS
    while True:
        seconds = timed(positions)
        yield positions, seconds
        left -= seconds
        cheaper = seconds / positions < _CHEAPER * before
        if not cheaper or 2 * positions > most or left < 2 * seconds:
            return
        before, positions = seconds / positions, 2 * positions


def _fixed(measured: dict[int, float]) -> float:
    """Return the part of the time that does not depend on the positions, in positions.

    It is that of the line a + b n that is nearest to the seconds, each as a share of what was
    measured: otherwise a disturbance of the largest sizes would decide.
    """
    positions, seconds = np.array([*measured.items()], dtype=np.float64).T
    a, b = np.linalg.lstsq(np.stack([1 / seconds, positions / seconds], 1), np.ones(len(seconds)))[
        0
    ]
    return max(float(a / b), 0.0) if b > 0 else float(max(measured))


def choose_batch(
    waiting: Sequence[RequestSize], limits: BatchLimits, padding: float = PADDING
) -> list[int]:
    """Choose what is computed next, of the requests that may share a batch.

    The oldest request is always chosen, so that none waits forever. With it come those that are
    next to it in length, the older ones first, as many as make the batch the fastest one for each
    of its tokens, where

     - the share of padding among the computed positions, rows times the longest row, stays below
       `padding`, and
     - there are at most `limits.tokens` computed positions.

    A request that has more padding by itself, or more positions, is alone in its batch.

    Args:
        waiting: the requests, the oldest one first.
        limits: the most positions that are computed at once, and what a pass costs.
        padding: the share of padding that a batch stays below.

    Returns:
        The numbers of the chosen ones, 0 first.
    """
    length = waiting[0].longest
    # By length, the older ones of one length nearer to the oldest request.
    ordered = sorted(
        range(len(waiting)),
        key=lambda i: (waiting[i].longest, i if waiting[i].longest >= length else -i),
    )
    oldest = ordered.index(0)
    sizes = np.array([waiting[n] for n in ordered], dtype=np.int64)
    # Of the requests before each one: all runs from one at or before the oldest (in a column) to
    # one at or after it (in a row) are differences of these.
    before = np.concatenate([np.zeros((1, 3), np.int64), sizes.cumsum(axis=0)])
    rows, _, tokens = (before[oldest + 1 :, None] - before[None, : oldest + 1]).transpose(2, 0, 1)
    computed = rows * sizes[oldest:, None, 1]
    fits = (computed <= limits.tokens) & (computed - tokens < padding * computed)
    rates = np.where(fits, tokens / (limits.fixed + computed), 0.0)
    if not rates.any():
        return [0]
    more, first = np.unravel_index(rates.argmax(), rates.shape)
    return [0, *sorted(n for n in ordered[first : oldest + int(more) + 1] if n)]
