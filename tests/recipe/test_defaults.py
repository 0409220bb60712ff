"""Training options: their ranges, defaults that follow from the data, and schedules of rates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from adapterhub.config.options import options_of
from adapterhub.errors import ConfigError
from adapterhub.methods.common.base import parse_methods
from adapterhub.recipe import recipe


@given(st.integers(1, 2_000_000))
def test_any_number_of_rows_gives_a_run_that_trains_and_more_rows_never_much_less(rows):
    seen = []
    for count in (rows, rows + 1):
        options = recipe.run_options(recipe.TrainOptions(), (), count)
        default = next(entry for entry in recipe.TABLE if count <= entry.rows)
        per_epoch = recipe.steps_per_epoch(count, options.batch_size, options.gradient_accumulation)
        steps = options.max_steps or options.epochs * per_epoch
        assert steps >= default.steps
        assert options.epochs >= default.epochs
        assert options.batch_size == default.batch_size
        seen.append(options.batch_size * steps)
    assert seen[1] >= seen[0] * 0.45


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 7),
        ("batch_size", 3),
        ("eval_every", 11),
        ("eval_every", "epoch"),
        ("max_steps", 5),
        ("schedule", "cosine"),
    ],
)
def test_what_the_user_sets_stays(name, value):
    options = recipe.run_options(recipe.TrainOptions(**{name: value}), (), 4_000)
    assert getattr(options, name) == value
    assert recipe.run_options(options, (), 4_000) == options


def test_a_method_has_its_stages_and_its_schedule():
    default = recipe.TrainOptions()
    assert recipe.run_options(default, (), 50_000, least_epochs=9).epochs == 9
    two = recipe.TrainOptions(epochs=2)
    assert recipe.run_options(two, (), 50_000, least_epochs=9).epochs == 2
    for method, schedule in ("lora", "linear"), ("unfreeze", "slanted"):
        assert recipe.run_options(default, parse_methods(method), 9).schedule == schedule


def test_options_out_of_range_are_listed_together():
    with pytest.raises(ConfigError) as error:
        recipe.TrainOptions(epochs=0, learning_rate=-1.0, beta2=1.0, eval_every=0, patience=0)
    names = [line.split(":")[0] for line in error.value.offenders]
    assert names == ["epochs", "patience", "learning_rate", "beta2", "eval_every"]
    for name in ("beta1", "beta2"):
        recipe.TrainOptions(**{name: 0.0})
        with pytest.raises(ConfigError, match=rf"{name}: 1.0 \(at least 0, below 1\)"):
            recipe.TrainOptions(**{name: 1.0})
    assert all(option.help for option in options_of(recipe.TrainOptions))


# Schedules


@given(cut=st.integers(1, 50), inverse=st.integers(2, 20), data=st.data())
def test_slanted_is_equation_3_where_the_cut_is_whole(cut, inverse, data):
    total, fraction = cut * inverse, 1 / inverse
    t = data.draw(st.integers(0, total))
    p = t / cut if t < cut else 1 - (t - cut) / (cut * (1 / fraction - 1))
    assert recipe.schedule("slanted", total, cut)(t) == pytest.approx((1 + p * 31) / 32, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "total", "warmup", "steps"),
    [
        ("linear", 100, 0.07, 7),
        ("linear", 101, 0.06, 7),
        ("linear", 100, 500, 100),
        ("linear", 100, None, 6),
        ("slanted", 109, None, 10),
        ("slanted", 100, 0.29, 29),
    ],
)
def test_warmup_is_a_fraction_below_1_and_steps_above(name, total, warmup, steps):
    assert recipe.warmup_steps(name, total, warmup) == steps


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("total", [1, 2, 3, 17, 100])
def test_every_step_is_transformers_schedule_one_step_ahead(name, total):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    of_theirs = {"constant": "constant_with_warmup"}.get(name, name)
    for warmup in range(total + 1):
        ours = recipe.schedule(name, total, warmup)
        (theirs,) = get_scheduler(of_theirs, optimizer, warmup + 1, total + 1).lr_lambdas
        for step in range(total):
            assert ours(step) == pytest.approx(theirs(step + 1), abs=2e-16), (warmup, step)
