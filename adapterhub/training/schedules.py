"""Learning-rate schedules: pure functions from the step to a multiplier of the peak rate.

Step t counts from 0 to T - 1; a value at T or later is the value at the end. W is the number of
warm-up steps, in which the multiplier rises as (t + 1) / (W + 1): the first step already trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from adapterhub.errors import unknown

Multiplier = Callable[[int], float]

DEFAULT = "linear"
DEFAULT_WARMUP = 0.06
CUT_FRACTION = 0.1
RATIO = 32.0


def linear_schedule(step: int, total: int, warmup: int) -> float:
    """Warm-up, then a straight line to 0: (T - t) / (T - W)."""
    return _rise(step, warmup) if step < warmup else 1.0 - _progress(step, total, warmup)


def cosine(step: int, total: int, warmup: int) -> float:
    """Warm-up, then half a cosine to 0: (1 + cos(pi (t - W) / (T - W))) / 2."""
    if step < warmup:
        return _rise(step, warmup)
    return 0.5 * (1.0 + math.cos(math.pi * _progress(step, total, warmup)))


def constant(step: int, total: int, warmup: int) -> float:
    """Warm-up, then 1."""
    return _rise(step, warmup) if step < warmup else 1.0


def slanted(step: int, total: int, cut: int, ratio: float = RATIO) -> float:
    """Slanted triangle: a short straight rise from 1/ratio to 1, a long straight fall back to it.

    Howard & Ruder 2018, section 3.2, equation 3 (https://arxiv.org/abs/1801.06146):

        cut = floor(T cut_frac)
        p   = t / cut                                   t < cut
              1 - (t - cut) / (cut (1 / cut_frac - 1))  otherwise
        eta = eta_max (1 + p (ratio - 1)) / ratio

    cut / T stands for cut_frac, so that the fall ends at T. The two are the same number where
    T cut_frac is whole; elsewhere the equation as printed falls below zero before T.
    """
    p = step / cut if step < cut else 1.0 - _progress(step, total, cut)
    return (1.0 + p * (ratio - 1.0)) / ratio


SHAPES: dict[str, Callable[[int, int, int], float]] = {
    "linear": linear_schedule,
    "cosine": cosine,
    "slanted": slanted,
    "constant": constant,
}


def warmup_steps(name: str, total_steps: int, warmup: float | None) -> int:
    """Steps of warm-up: `warmup` is a fraction of all steps if below 1, else a number of steps.

    None means 0.06, and 0.1 for "slanted", whose cut is rounded down as in its paper.
    """
    if warmup is None:
        warmup = CUT_FRACTION if name == "slanted" else DEFAULT_WARMUP
    if warmup >= 1:
        return min(int(warmup), total_steps)
    # 100 * 0.07 is 7.000000000000001: the small term keeps a whole product whole.
    exact = total_steps * warmup
    return math.floor(exact + 1e-9) if name == "slanted" else math.ceil(exact - 1e-9)


def schedule(name: str, total_steps: int, warmup: float | None = None) -> Multiplier:
    """The function from step to multiplier, for `torch.optim.lr_scheduler.LambdaLR`.

    Raises `ConfigError` for an unknown name.
    """
    if name not in SHAPES:
        raise unknown("schedule", name, SHAPES, hint="train.schedule=linear")
    shape, steps = SHAPES[name], warmup_steps(name, total_steps, warmup)
    return lambda step: shape(step, total_steps, steps)


def _rise(step: int, warmup: int) -> float:
    return (step + 1) / (warmup + 1)


def _progress(step: int, total: int, start: int) -> float:
    """How much of the way from `start` to `total` is done, from 0 to 1."""
    return min(1.0, (step - start) / max(1, total - start))
