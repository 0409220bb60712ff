"""A run can be resumed with more steps where its schedule allows it; else the error says why."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from adapterhub.errors import ConfigError
from adapterhub.loop import checkpoint
from adapterhub.loop.loop import check_length
from adapterhub.recipe.recipe import TrainOptions
from tests.kit.runs import OPTIONS, Data, Learner, bits, fit, scores

CONSTANT = replace(OPTIONS, schedule="constant", warmup=2)
PER_EPOCH = 3  # optimizer steps of the tiny run
LONG = (
    {"epochs": 5},
    {"max_steps": 13},
    {"epochs": 5, "patience": 3},
    {"epochs": 5, "eval_every": 2},
    {"epochs": 5, "length_grouped": False},
)


def saved_bytes(output: Path) -> dict[str, bytes]:
    return {
        name: (output / "checkpoints" / name / "tensors.safetensors").read_bytes()
        for name in ("last", "best")
    }


@pytest.mark.parametrize("changes", LONG, ids=str)
def test_a_longer_run_equals_one_that_was_long_from_the_start(tmp_path, changes):
    long = replace(CONSTANT, **changes)
    short = replace(long, epochs=2, max_steps=None)
    whole = fit(tmp_path / "whole", long)
    fit(tmp_path / "parts", short)
    parts = fit(tmp_path / "parts", long, resume=True)
    assert whole.steps > 2 * PER_EPOCH
    assert (parts.steps, parts.history) == (whole.steps, whole.history)
    assert parts.best_step == whole.best_step
    assert saved_bytes(tmp_path / "parts") == saved_bytes(tmp_path / "whole")
    name = "metrics.jsonl"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_it_can_be_lengthened_again_and_resumed_in_between(tmp_path):
    whole, parts = Learner(), Learner()
    fit(tmp_path / "whole", replace(CONSTANT, epochs=6), trainee=whole)
    fit(tmp_path / "parts", replace(CONSTANT, epochs=1), trainee=parts)
    for epochs in (2, 2, 4, 6):
        parts = Learner()
        fit(tmp_path / "parts", replace(CONSTANT, epochs=epochs), trainee=parts, resume=True)
    assert bits(parts.tensors()) == bits(whole.tensors())
    with pytest.raises(ConfigError, match="has 18 steps already"):  # it is not shortened
        fit(tmp_path / "parts", replace(CONSTANT, epochs=1), resume=True)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "slanted", None])
def test_a_schedule_that_depends_on_the_length_is_refused(tmp_path, schedule):
    options = replace(OPTIONS, schedule=schedule)
    fit(tmp_path, options)
    before = saved_bytes(tmp_path)
    trainee, data = Learner(), Data()
    expected = r"from 6 to 12 steps.*lowered the learning rate"
    with pytest.raises(ConfigError, match=expected) as error:
        fit(tmp_path, replace(options, epochs=4), trainee=trainee, data=data, resume=True)
    assert "adapterhub merge" in str(error.value)
    assert data.collated == 0
    assert saved_bytes(tmp_path) == before
    assert fit(tmp_path, options, resume=True).steps == 6


def test_a_warmup_that_is_a_fraction_of_the_length_can_be_kept(tmp_path):
    options = replace(OPTIONS, schedule="constant", warmup=0.5)
    fit(tmp_path, options)
    with pytest.raises(ConfigError, match=r"--resume train.warmup=3"):
        fit(tmp_path, replace(options, epochs=4), resume=True)
    result = fit(tmp_path, replace(options, epochs=4, warmup=3), resume=True)
    assert result.steps == 12


def test_a_run_that_patience_stopped_is_not_lengthened(tmp_path):
    options = replace(CONSTANT, epochs=4, patience=2)
    evaluate = scores((0.9, 0.5, 0.5, 0.5))
    assert fit(tmp_path, options, evaluate=evaluate, metric="accuracy").stopped_early
    with pytest.raises(ConfigError, match="stopped early after step 9"):
        fit(tmp_path, replace(options, epochs=9), resume=True, metric="accuracy")


def test_a_warmup_that_is_not_over_allows_any_length():
    saved = asdict(TrainOptions(epochs=100, warmup=50))
    check_length(saved, TrainOptions(epochs=200, warmup=50), 10, 40)
    with pytest.raises(ConfigError):
        check_length(saved, TrainOptions(epochs=200, warmup=50), 10, 51)


def test_the_best_of_the_short_run_stays_the_best(tmp_path):
    fit(tmp_path, CONSTANT, evaluate=scores((0.9, 0.5)), metric="accuracy")
    long = replace(CONSTANT, epochs=4)
    result = fit(tmp_path, long, evaluate=scores((0.5, 0.5)), metric="accuracy", resume=True)
    assert (result.best_step, result.best) == (3, {"accuracy": 0.9})
    assert checkpoint.load_checkpoint(tmp_path / "checkpoints" / "best").progress["step"] == 3
