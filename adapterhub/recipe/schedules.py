"""Learning-rate schedules: pure functions from the step to a multiplier of the peak rate.

Step t counts from 0 to T - 1; from T on, the multiplier keeps its final value. During the W warm-up
steps it rises as (t + 1) / (W + 1), so the first step already trains. (`transformers` starts at 0;
its linear, cosine and constant schedules at step t + 1 of T + 1, with W + 1 warm-up steps, are
these.)
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


def schedule(name: str, total_steps: int, warmup: float | None = None) -> Multiplier:
    """Return the function from step to multiplier, for `torch.optim.lr_scheduler.LambdaLR`.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in SHAPES:
        raise unknown("schedule", name, SHAPES, hint="train.schedule=linear")
    shape, steps = SHAPES[name], warmup_steps(name, total_steps, warmup)
    return lambda step: shape(step, total_steps, steps)


def warmup_steps(name: str, total_steps: int, warmup: float | None) -> int:
    """Return the number of warm-up steps, which are a fraction of all steps if below 1.

    None means 0.06, or 0.1 for "slanted", whose cut is rounded down as in its paper.
    """
    if warmup is None:
        warmup = CUT_FRACTION if name == "slanted" else DEFAULT_WARMUP
    if warmup >= 1:
        return min(int(warmup), total_steps)
    # 100 * 0.07 is 7.000000000000001: the small term keeps a whole product whole.
    exact = total_steps * warmup
    return math.floor(exact + 1e-9) if name == "slanted" else math.ceil(exact - 1e-9)


def _linear(step: int, total: int, warmup: int) -> float:
    """Warm up, then decay linearly to 0: (T - t) / (T - W)."""
    return _rise(step, warmup) if step < warmup else 1.0 - _progress(step, total, warmup)


def _cosine(step: int, total: int, warmup: int) -> float:
    """Warm up, then decay to 0 by half a cosine: (1 + cos(pi (t - W) / (T - W))) / 2."""
    if step < warmup:
        return _rise(step, warmup)
    return 0.5 * (1.0 + math.cos(math.pi * _progress(step, total, warmup)))


def _constant(step: int, total: int, warmup: int) -> float:
    """Warm up, then stay at 1."""
    return _rise(step, warmup) if step < warmup else 1.0


def _slanted(step: int, total: int, cut: int) -> float:
    """Slanted triangular: a short linear rise from 1/ratio to 1, then a long linear decay back.

    Howard & Ruder 2018, section 3.2, equation 3 (https://arxiv.org/abs/1801.06146):

        cut = floor(T cut_frac)
        p   = t / cut                                   t < cut
              1 - (t - cut) / (cut (1 / cut_frac - 1))  otherwise
        eta = eta_max (1 + p (ratio - 1)) / ratio

    Here cut / T replaces cut_frac, so that the decay ends at T. The two are equal where T cut_frac
    is whole; elsewhere the equation as printed falls below zero before T.
    """
    p = step / cut if step < cut else 1.0 - _progress(step, total, cut)
    return (1.0 + p * (RATIO - 1.0)) / RATIO


def _rise(step: int, warmup: int) -> float:
    return (step + 1) / (warmup + 1)


def _progress(step: int, total: int, start: int) -> float:
    """Return the fraction of the steps from `start` to `total` that are done, from 0 to 1."""
    return min(1.0, (step - start) / max(1, total - start))


SHAPES: dict[str, Callable[[int, int, int], float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "slanted": _slanted,
    "constant": _constant,
}
