"""Defaults that follow from the data: batch size, epochs and evaluations, by the number of rows.

Few rows need many passes, or the adapter is still near its start; many rows need few. What was
measured, and on what, is in docs/guides/defaults.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from adapterhub.methods._base import Method
from adapterhub.recipe.options import RunOptions, TrainOptions
from adapterhub.recipe.schedules import DEFAULT

_MOST_EVALUATIONS = 10
_EVALUATIONS_OF_LONG_RUNS = 5
_LONG = 1_000  # steps: of a longer run, one evaluation per epoch may be too few


@dataclass(frozen=True)
class RowsDefault:
    """What suits data with up to `rows` rows: at least as many steps, and epochs."""

    rows: float
    batch_size: int
    steps: int
    epochs: int


TABLE = (
    RowsDefault(rows=100, batch_size=16, steps=150, epochs=3),
    RowsDefault(rows=1_000, batch_size=16, steps=250, epochs=3),
    RowsDefault(rows=20_000, batch_size=32, steps=250, epochs=3),
    RowsDefault(rows=100_000, batch_size=32, steps=250, epochs=2),
    RowsDefault(rows=math.inf, batch_size=32, steps=250, epochs=1),
)


def run_options(
    options: TrainOptions, methods: Sequence[Method], rows: int, least_epochs: int = 1
) -> RunOptions:
    """Choose what the user left open, for so many rows an epoch.

    The schedule is that of the methods; their stages need `least_epochs`.
    """
    default = next(entry for entry in TABLE if rows <= entry.rows)
    batch_size = options.batch_size or default.batch_size
    steps = steps_per_epoch(rows, batch_size, options.gradient_accumulation)
    epochs = options.epochs or max(default.epochs, -(-default.steps // steps), least_epochs)
    total = options.max_steps or epochs * steps
    schedule = next((method.schedule for method in methods if method.schedule), DEFAULT)
    chosen = {
        "batch_size": batch_size,
        "epochs": epochs,
        "eval_every": options.eval_every or _eval_every(total, steps),
        "schedule": options.schedule or schedule,
    }
    return RunOptions(**{**vars(options), **chosen})


def steps_per_epoch(rows: int, batch_size: int, gradient_accumulation: int) -> int:
    """Return the number of optimizer steps of one epoch."""
    return -(-rows // (batch_size * gradient_accumulation))


def usual_steps(options: TrainOptions, methods: Sequence[Method], rows: int) -> int:
    """Return the optimizer steps that a run takes, unless the number of steps is given."""
    chosen = run_options(options, methods, rows)
    per_epoch = steps_per_epoch(rows, chosen.batch_size, chosen.gradient_accumulation)
    return chosen.epochs * per_epoch


def _eval_every(total: int, steps: int) -> Literal["epoch"] | int:
    """Return how often to evaluate: each epoch, unless that is too often or too rarely."""
    epochs = -(-total // steps)
    if epochs > _MOST_EVALUATIONS:
        return steps * -(-epochs // _MOST_EVALUATIONS)
    if epochs >= _EVALUATIONS_OF_LONG_RUNS or total <= _LONG:
        return "epoch"
    return -(-total // _EVALUATIONS_OF_LONG_RUNS)
