"""A score with its error: the rows that it is of, and its 95 % interval, as recorded and written.

accuracy     0.7333 (0.61-0.83, n = 60)     with an en dash, where it can be printed
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapterhub.errors import counted

EN_DASH = "\N{EN DASH}"
ERRORS = "errors"  # in the training record of a manifest: {metric: {n, low, high}}
TEST = "test/"  # before the names of metrics of rows that chose nothing
_FEWEST_DIGITS, _MOST_DIGITS = 2, 4  # decimals of an interval


@dataclass(frozen=True)
class ScoreError:
    """How sure a score is.

    Attributes:
        rows: the number of rows that it was computed from.
        groups: the number of groups, such as queries, that they are of; None: each is its own.
        low: the lower end of its 95 % interval; None if it has none.
        high: the upper end.
    """

    rows: int
    low: float | None = None
    high: float | None = None
    groups: int | None = None

    @property
    def interval(self) -> str:
        """The interval in as many digits as it deserves; "" without one."""
        if self.low is None or self.high is None:
            return ""
        width = self.high - self.low
        wanted = 1 + math.floor(-math.log10(width)) if width > 0 else _MOST_DIGITS
        digits = min(max(wanted, _FEWEST_DIGITS), _MOST_DIGITS)
        to = " to " if self.low < 0 else EN_DASH
        return f"{self.low:.{digits}f}{to}{self.high:.{digits}f}"

    def __str__(self) -> str:
        number = f"n = {self.rows:,}"
        if self.groups is not None:
            number += f" in {counted(self.groups, 'group')}"
        return ", ".join(filter(None, (self.interval, number)))

    def record(self) -> dict[str, float]:
        """Return what is recorded: {n, groups, low, high}, in six digits, where it is known."""
        counts = {"n": self.rows}
        counts |= {} if self.groups is None else {"groups": self.groups}
        if self.low is None or self.high is None:
            return {**counts}
        low, high = (float(f"{end:.6g}") for end in (self.low, self.high))
        return {**counts, "low": low, "high": high}


def score_text(value: str, error: ScoreError | None) -> str:
    """Write a score with its error: "0.7333 (0.61-0.83, n = 60)"; alone if that is unknown."""
    return f"{value} ({error})" if error else value


def recorded_errors(records: object) -> dict[str, ScoreError]:
    """Read the errors of scores, by metric; records of another form, by strangers, are left out."""
    found = {}
    for name, record in records.items() if isinstance(records, Mapping) else ():
        rows, *ends = (_number(record, key) for key in ("n", "low", "high"))
        if rows is not None and rows >= 0:
            low, high = ends if None not in ends else (None, None)
            groups = _number(record, "groups")
            found[str(name)] = ScoreError(
                int(rows), low, high, None if groups is None or groups < 0 else int(groups)
            )
    return found


def _number(record: Any, name: str) -> float | None:
    value = record.get(name) if isinstance(record, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None
