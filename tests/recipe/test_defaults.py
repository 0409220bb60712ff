"""Training options: their ranges, and the defaults that follow from the data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.config.options import options_of
from adapterhub.errors import ConfigError
from adapterhub.loop.engine import batch_order
from adapterhub.methods.common.base import parse_methods
from adapterhub.recipe.recipe import TABLE, RunOptions, TrainOptions, run_options, steps_per_epoch

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
