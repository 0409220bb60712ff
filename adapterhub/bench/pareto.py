"""Which methods are dominated: another one scores no lower and costs no more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ParetoPoint:
    """A method's score, and one cost: trained parameters, seconds or bytes."""

    method: str
    score: float
    cost: float


def dominators(
    points: Iterable[ParetoPoint], *, lower_is_better: bool = False
) -> dict[str, str | None]:
    """Map each method to one that dominates it, or to None if it is on the Pareto front.

    Method a dominates b if its score is at least as good and its cost at most as high, and one of
    the two differs. Of several, the one with the best score is named, then the cheapest, then the
    first by name. Equal methods do not dominate each other.
    """
    sign = -1 if lower_is_better else 1
    ranked = sorted(points, key=lambda p: (-sign * p.score, p.cost, p.method))

    def dominates(one: ParetoPoint, other: ParetoPoint) -> bool:
        gains = sign * (one.score - other.score), other.cost - one.cost
        return min(gains) >= 0 and max(gains) > 0

    return {
        point.method: next((other.method for other in ranked if dominates(other, point)), None)
        for point in ranked
    }


def pareto_front(
    points: Sequence[ParetoPoint], *, lower_is_better: bool = False
) -> list[ParetoPoint]:
    """Return the points that none dominates, from the cheapest to the best."""
    found = dominators(points, lower_is_better=lower_is_better)
    front = [point for point in points if found[point.method] is None]
    return sorted(front, key=lambda p: (p.cost, p.method))
