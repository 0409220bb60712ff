"""What a method costs, in words, and which of several costs least."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adapterhub.bench.statistics import RepeatedRuns
from adapterhub.bench.wording import time_words

_NEAR = 1.25  # times the least time or memory


@dataclass(frozen=True)
class MethodCost:
    """What a method costs; None where it was not measured.

    Attributes:
        trained: the number of trained parameters; 0 for a method that is not trained.
        seconds: the time of one training.
        memory: the peak of a training, in bytes.
    """

    trained: int | None = None
    seconds: float | None = None
    memory: int | None = None


def cost_texts(cost: MethodCost) -> list[str]:
    """Write the known costs: trained parameters, time and memory."""
    texts = []
    if cost.trained is not None:
        texts.append(f"{cost.trained:,} trained parameters" if cost.trained else "not trained")
    if cost.seconds is not None:
        texts.append(f"{time_words(cost.seconds)} of training")
    if cost.memory is not None:
        texts.append(f"{cost.memory / 1e9:.2g} GB of memory")
    return texts


def cheapest(able: Sequence[RepeatedRuns], costs: Mapping[str, MethodCost]) -> str:
    """Return the method with the fewest parameters, then the shortest time, then least memory.

    Sizes that look equal are equal, and times and memory within a quarter, as another machine may
    turn them around. Of methods that cost the same, it is the one with the best mean.
    """
    left = list(able)
    for kind, near in (("trained", 1.0), ("seconds", _NEAR), ("memory", _NEAR)):
        found = {runs.method: _cost(costs.get(runs.method), kind) for runs in left}
        least = min(found.values())
        left = [runs for runs in left if found[runs.method] <= near * least]
    sign = -1 if left[0].score.lower_is_better else 1
    return max(left, key=lambda runs: sign * float(runs.scores.mean())).method


def _cost(cost: MethodCost | None, kind: str) -> float:
    """Return a cost, infinite if it is not known; a size has two digits."""
    value = None if cost is None else getattr(cost, kind)
    if value is None:
        return math.inf
    return float(f"{value:.1e}") if kind == "trained" else float(value)
