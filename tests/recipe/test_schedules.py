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
        ("linear", 0, 1 / 5),
        ("linear", 3, 4 / 5),
        ("linear", 4, 1.0),
        ("linear", 12, 0.5),
        ("linear", 20, 0.0),
        ("cosine", 3, 4 / 5),
        ("cosine", 4, 1.0),
        ("cosine", 8, (1 + math.sqrt(0.5)) / 2),
        ("cosine", 12, 0.5),
        ("cosine", 20, 0.0),
        ("constant", 0, 1 / 5),
        ("constant", 4, 1.0),
        ("constant", 19, 1.0),
        ("slanted", 0, 1 / 32),
        ("slanted", 2, 33 / 64),
        ("slanted", 4, 1.0),
        ("slanted", 12, 33 / 64),
        ("slanted", 20, 1 / 32),
    ],
)
def test_value_at_a_point_worked_out_by_hand(name, step, value):
    assert schedule(name, 20, 4)(step) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "value"), [(0, 1 / 32), (50, 16.5 / 32), (100, 1.0), (550, 16.5 / 32)]
)
def test_slanted_defaults_are_those_of_the_paper(step, value):
    assert schedule("slanted", 1000)(step) == pytest.approx(value, abs=1e-12)


@given(cut=st.integers(1, 50), inverse=st.integers(2, 20), data=st.data())
def test_slanted_is_equation_3_where_the_cut_is_whole(cut, inverse, data):
    total, fraction = cut * inverse, 1 / inverse
    t = data.draw(st.integers(0, total))
    p = t / cut if t < cut else 1 - (t - cut) / (cut * (1 / fraction - 1))
    assert schedule("slanted", total, cut)(t) == pytest.approx((1 + p * 31) / 32, abs=1e-9)


@given(
    name=st.sampled_from(NAMES),
    total=st.integers(1, 400),
    warmup=st.none() | st.floats(0, 0.999) | st.integers(1, 500),
    step=st.integers(0, 1000),
)
def test_multiplier_is_between_0_and_1(name, total, warmup, step):
    assert 0 <= schedule(name, total, warmup)(step) <= 1


@given(name=st.sampled_from(NAMES), total=st.integers(2, 400), warmup=st.floats(0, 0.9))
def test_rises_to_1_at_the_end_of_warmup_and_never_rises_after(name, total, warmup):
    multiplier, peak = schedule(name, total, warmup), warmup_steps(name, total, warmup)
    values = [multiplier(step) for step in range(total + 3)]
    assert values[peak] == 1 or peak == total
    assert values[:peak] == sorted(values[:peak])
    assert values[peak:] == sorted(values[peak:], reverse=True)
    assert values[0] > 0


@given(name=st.sampled_from(NAMES), total=st.integers(20, 400), warmup=st.floats(0.05, 0.5))
def test_is_continuous_at_the_peak(name, total, warmup):
    multiplier, peak = schedule(name, total, warmup), warmup_steps(name, total, warmup)
    before, after = multiplier(peak - 1), multiplier(peak + 1)
    assert 1 - before <= 1 / max(1, peak) + 1e-9
    assert 1 - after <= math.pi / (2 * (total - peak)) + 1e-9


@given(total=st.integers(2, 400), warmup=st.floats(0, 0.9))
def test_ends_where_it_should(total, warmup):
    ends = {name: schedule(name, total, warmup)(total) for name in NAMES}
    expected = {"linear": 0, "cosine": 0, "constant": 1, "slanted": 1 / 32}
    if warmup_steps("linear", total, warmup) < total:
        assert ends == pytest.approx(expected, abs=1e-9)


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


def test_the_first_step_trains_unlike_that_of_transformers():
    assert transformers_multiplier("linear", 100, 6)(0) == 0
    assert schedule("linear", 100)(0) == pytest.approx(1 / 7)


def test_a_resumed_scheduler_continues_with_the_same_rates():
    def scheduler() -> torch.optim.lr_scheduler.LambdaLR:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, schedule("cosine", 10))

    def rates(running: torch.optim.lr_scheduler.LambdaLR, steps: int) -> list[float]:
        values = []
        for _ in range(steps):
            values.append(running.get_last_lr()[0])
            running.optimizer.step()
            running.step()
        return values

    whole, first, second = scheduler(), scheduler(), scheduler()
    expected = rates(whole, 10)
    start = rates(first, 4)
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert start + rates(second, 6) == expected


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        schedule("cosin", 10)
