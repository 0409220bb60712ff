"""What trains when: the one place where the stages of methods become `requires_grad`.

A stage follows from the epoch and the evaluations so far alone, so a resumed run is in the stage
that it was stopped in. A tensor whose stage has not begun has no gradient: the optimizer, weight
decay included, leaves it as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from adapterhub.adapters.adapter import Adapter
from adapterhub.methods._base import StageSchedule


def enter(adapter: Adapter, epoch: int, improved: Sequence[bool]) -> bool:
    """Lets those parameters require a gradient whose stage has begun; returns whether that is a
    change."""
    change = False
    for changed in adapter.changed:
        pace = changed.method.stage_schedule() if changed.method else None
        trains = changed.stage <= stage(pace, epoch, improved)
        change |= changed.own.requires_grad != trains
        changed.own.requires_grad_(trains)
    return change


def unreached(adapter: Adapter, epochs: int) -> Iterator[str]:
    """A sentence for each method of which a run of so many epochs cannot begin all stages."""
    for method in {id(c.method): c.method for c in adapter.changed if c.method}.values():
        number = max(c.stage for c in adapter.changed if c.method is method)
        pace = method.stage_schedule()
        needed = number * (pace.epochs or 0) + 1 if pace else 1
        if needed > epochs:
            yield (
                f"{method.name} has {number + 1} stages, and the last begins after epoch "
                f"{needed - 1} of {epochs}: what trains from there on stays frozen"
            )


def unfreeze_all(adapter: Adapter) -> None:
    """Lets all of an adapter's parameters require a gradient again, as after `attach`."""
    for changed in adapter.changed:
        changed.own.requires_grad_(True)


def stage(pace: StageSchedule | None, epoch: int, improved: Sequence[bool]) -> int:
    """The stage in `epoch`, after evaluations of which `improved` says whether they were the best
    until then. Stages count from 0."""
    if pace is None:
        return 0
    return plateaus(improved, pace.patience) if pace.epochs is None else epoch // pace.epochs


def plateaus(improved: Sequence[bool], patience: int) -> int:
    """How often `patience` evaluations in a row were not the best; each counts for one plateau."""
    found = stale = 0
    for better in improved:
        stale = 0 if better else stale + 1
        if stale == patience:
            found, stale = found + 1, 0
    return found


def improvements(values: Sequence[float], lower: bool) -> list[bool]:
    """Of each value, whether it is the best until then; one that is not finite never is."""
    best, improved = math.inf, []
    for value in values:
        signed = value if lower else -value
        improved.append(math.isfinite(signed) and signed < best)
        best = signed if improved[-1] else best
    return improved
