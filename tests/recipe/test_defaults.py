"""Training options: their ranges, defaults that follow from the data, and schedules of rates."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from adapterhub.config.options import options_of
from adapterhub.errors import ConfigError
from adapterhub.loop.engine import batch_order
from adapterhub.methods.common.base import parse_methods
from adapterhub.recipe.recipe import (
    SHAPES,
    TABLE,
    RunOptions,
    TrainOptions,
    run_options,
    schedule,
    steps_per_epoch,
    warmup_steps,
)

LORA = parse_methods("lora")


def steps(options: RunOptions, rows: int) -> int:
    """Return the number of steps of a run."""
    per_epoch = steps_per_epoch(rows, options.batch_size, options.gradient_accumulation)
    return options.max_steps or options.epochs * per_epoch


@given(st.integers(1, 2_000_000))
def test_any_number_of_rows_gives_a_run_that_trains(rows):
    options = run_options(TrainOptions(), LORA, rows)
    (default, *_) = (entry for entry in TABLE if rows <= entry.rows)
    assert steps(options, rows) >= default.steps
    assert options.epochs >= default.epochs
    assert options.batch_size == default.batch_size


@given(st.integers(2, 2_000_000))
def test_more_rows_never_train_much_less(rows):
    fewer, more = (run_options(TrainOptions(), LORA, n) for n in (rows - 1, rows))
    seen = [
        options.batch_size * steps(options, n) for options, n in ((fewer, rows - 1), (more, rows))
    ]
    assert seen[1] >= seen[0] * 0.45


@given(st.integers(1, 500_000), st.integers(1, 64), st.integers(1, 8))
def test_an_epoch_has_the_steps_that_are_counted(rows, batch, accumulation):
    batches = -(-rows // batch)
    assert steps_per_epoch(rows, batch, accumulation) == -(-batches // accumulation)
    if rows < 200:
        assert len(batch_order([1] * rows, batch, 0, 0, False)) == batches


@given(st.integers(1, 500_000), st.integers(1, 60), st.integers(1, 64))
def test_a_run_is_evaluated_a_few_times_and_not_often(rows, epochs, batch):
    options = run_options(TrainOptions(epochs=epochs, batch_size=batch), LORA, rows)
    per_epoch = steps_per_epoch(rows, batch, 1)
    total = epochs * per_epoch
    every = per_epoch if options.eval_every == "epoch" else options.eval_every
    count = -(-total // every)
    assert 1 <= count <= 10
    assert count >= min(epochs, 5)
    assert total <= 1_000 or count >= 5


@pytest.mark.parametrize(
    "chosen",
    [
        {"epochs": 7},
        {"batch_size": 3},
        {"eval_every": 11},
        {"eval_every": "epoch"},
        {"max_steps": 5},
        {"schedule": "cosine"},
        {"learning_rate": 0.5, "warmup": 0.2, "weight_decay": 0.0},
    ],
)
def test_what_the_user_sets_stays(chosen):
    options = run_options(TrainOptions(**chosen), LORA, 4_000)
    assert {name: getattr(options, name) for name in chosen} == chosen
    assert run_options(options, LORA, 4_000) == options


def test_stages_of_a_method_are_reached():
    assert run_options(TrainOptions(), LORA, 50_000, least_epochs=9).epochs == 9
    assert run_options(TrainOptions(epochs=2), LORA, 50_000, least_epochs=9).epochs == 2


@pytest.mark.parametrize(("method", "schedule"), [("lora", "linear"), ("unfreeze", "slanted")])
def test_the_schedule_is_the_methods(method, schedule):
    assert run_options(TrainOptions(), parse_methods(method), 9).schedule == schedule


def test_options_out_of_range_are_listed_together():
    with pytest.raises(ConfigError) as error:
        TrainOptions(epochs=0, learning_rate=-1.0, beta2=1.0, eval_every=0, patience=0)
    names = [line.split(":")[0] for line in error.value.offenders]
    assert names == ["epochs", "patience", "learning_rate", "beta2", "eval_every"]
    for name in ("beta1", "beta2"):
        TrainOptions(**{name: 0.0})
        with pytest.raises(ConfigError, match=rf"{name}: 1.0 \(at least 0, below 1\)"):
            TrainOptions(**{name: 1.0})
    assert all(option.help for option in options_of(TrainOptions))


# Schedules

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
