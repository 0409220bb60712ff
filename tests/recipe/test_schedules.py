"""Learning-rate schedules: values, warm-up, and agreement with transformers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from adapterhub.errors import ConfigError
from adapterhub.recipe.recipe import SHAPES, schedule, warmup_steps

NAMES = sorted(SHAPES)


@pytest.mark.parametrize(
    ("name", "step", "value"),
    [
        ("linear", 12, 0.5),
        ("cosine", 8, (1 + math.sqrt(0.5)) / 2),
        ("constant", 0, 1 / 5),
        ("slanted", 0, 1 / 32),
        ("slanted", 2, 33 / 64),
        ("slanted", 4, 1.0),
        ("slanted", 12, 33 / 64),
        ("slanted", 20, 1 / 32),
    ],
)
def test_value_at_a_point_worked_out_by_hand(name, step, value):
    assert schedule(name, 20, 4)(step) == pytest.approx(value, abs=1e-12)


@given(cut=st.integers(1, 50), inverse=st.integers(2, 20), data=st.data())
def test_slanted_is_equation_3_where_the_cut_is_whole(cut, inverse, data):
    total, fraction = cut * inverse, 1 / inverse
    t = data.draw(st.integers(0, total))
    p = t / cut if t < cut else 1 - (t - cut) / (cut * (1 / fraction - 1))
    assert schedule("slanted", total, cut)(t) == pytest.approx((1 + p * 31) / 32, abs=1e-9)


@given(name=st.sampled_from(NAMES), total=st.integers(2, 400), warmup=st.floats(0, 0.9))
def test_rises_to_1_at_the_end_of_warmup_and_never_rises_after(name, total, warmup):
    multiplier, peak = schedule(name, total, warmup), warmup_steps(name, total, warmup)
    values = [multiplier(step) for step in range(total + 3)]
    assert values[peak] == 1 or peak == total
    assert values[:peak] == sorted(values[:peak])
    assert values[peak:] == sorted(values[peak:], reverse=True)
    assert values[0] > 0
    assert min(values) >= 0


@pytest.mark.parametrize(
    ("name", "total", "warmup", "steps"),
    [
        ("linear", 100, 0.07, 7),
        ("linear", 101, 0.06, 7),
        ("linear", 100, 25, 25),
        ("linear", 100, 500, 100),
        ("linear", 100, 0, 0),
        ("linear", 100, None, 6),
        ("slanted", 100, None, 10),
        ("slanted", 109, None, 10),
        ("slanted", 100, 0.29, 29),
    ],
)
def test_warmup_is_a_fraction_below_1_and_steps_above(name, total, warmup, steps):
    assert warmup_steps(name, total, warmup) == steps


def transformers_multiplier(name: str, total: int, warmup: int) -> Callable[[int], float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    theirs = {"constant": "constant_with_warmup"}.get(name, name)
    scheduler = get_scheduler(theirs, optimizer, warmup, total)
    multiplier: Callable[[int], float] = scheduler.lr_lambdas[0]
    return multiplier


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("total", [1, 2, 3, 17, 100])
def test_every_step_is_transformers_schedule_one_step_ahead(name, total):
    for warmup in range(total + 1):
        ours = schedule(name, total, warmup if warmup else 0.0)
        # A warmup of 1 step or more is a number of steps, below 1 a fraction.
        theirs = transformers_multiplier(name, total + 1, warmup + 1)
        for step in range(total):
            assert ours(step) == pytest.approx(theirs(step + 1), abs=2e-16), (warmup, step)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        schedule("cosin", 10)
