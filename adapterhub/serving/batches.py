"""Which of the waiting requests are computed together: the oldest, and those of its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PADDING = 0.25  # of the positions that a batch computes


class RequestSize(NamedTuple):
    """How large a request is: its rows, the longest of them, and the tokens of all."""

    rows: int
    longest: int
    tokens: int


def choose_batch(
    waiting: Sequence[RequestSize], tokens: int, padding: float = PADDING
) -> list[int]:
    """Choose what is computed next, of the requests that may share a batch.

    The oldest request is always chosen, so that none waits forever. Then those that are nearest to
    it in length, the older one first, unless with one of them

     - the share of padding among the computed positions, rows times the longest row, reached
       `padding`, or
     - there were more than `tokens` computed positions.

    A request that has more padding by itself, or more positions, is alone in its batch.

    Args:
        waiting: the requests, the oldest one first.
        tokens: the most positions that are computed at once.
        padding: the share of padding that a batch stays below.

    Returns:
        The numbers of the chosen ones, 0 first.
    """
    oldest = waiting[0]
    chosen, (rows, longest, real) = [0], oldest
    nearest = sorted(
        range(1, len(waiting)), key=lambda i: (abs(waiting[i].longest - oldest.longest), i)
    )
    for number in nearest:
        if (rows + 1) * longest > tokens:
            break  # nothing fits any more, however short
        more = waiting[number]
        computed = (rows + more.rows) * max(longest, more.longest)
        if computed <= tokens and computed - real - more.tokens < padding * computed:
            chosen.append(number)
            rows, longest, real = rows + more.rows, max(longest, more.longest), real + more.tokens
    return chosen
