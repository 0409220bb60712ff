"""The training loop: best tensors, exact resume after a kill, longer runs, and its clock."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from adapterhub.errors import ConfigError, OutputError
from adapterhub.loop import checkpoint, loop
from adapterhub.loop.loop import RunClock, RunProgress, check_length
from adapterhub.recipe.recipe import RunOptions, TrainOptions
from tests.kit import runs
from tests.kit.runs import BATCH, OPTIONS, Data, Learner, bits, final_bytes, fit, lines, scores
from tests.kit.selection import cases_of

NONE = math.nan  # an evaluation without a loss is as one whose loss is not finite


EPOCHS = RunOptions(epochs=3, batch_size=BATCH, tensorboard=False)


def test_learns_and_reports(tmp_path):
    result = fit(tmp_path, RunOptions(epochs=30, batch_size=BATCH, tensorboard=False))
    assert result.best["accuracy"] >= 0.9
    assert result.steps == 30 * 8
    assert result.history[0]["loss"] > 2 * result.best["loss"]
    few = fit(tmp_path / "few", replace(EPOCHS, max_steps=11, eval_every=4, save_every=3))
    assert [(r["step"], r["epoch"]) for r in few.history] == [(4, 0.5), (8, 1.0), (11, 1.375)]
    assert result.best["loss"] == min(record["loss"] for record in result.history)
    assert result.seconds > 0
    assert result.examples_per_second > 0
    assert result.peak_memory > 1_000_000
    events = lines(tmp_path / "metrics.jsonl")
    assert [e["step"] for e in events if e["event"] == "train"] == list(range(10, 241, 10))
    assert [e["step"] for e in events if e["event"] == "eval"] == list(range(8, 241, 8))
    timings = lines(tmp_path / "timings.jsonl")
    assert [t["step"] for t in timings] == [e["step"] for e in events]
    assert not any("seconds" in e for e in events)


def test_same_seed_same_bytes(tmp_path, monkeypatch):
    """Also where losses are read late, and after a run that left no checkpoint."""
    fit(tmp_path / "a")
    torch.rand(5)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step": 2}\n{"ste')
    fit(tmp_path / "b", resume=True)
    assert final_bytes(tmp_path / "a") == final_bytes(tmp_path / "b")
    monkeypatch.setattr(loop, "_is_free_to_read", lambda device: False)
    fit(tmp_path / "c")
    assert final_bytes(tmp_path / "a") == final_bytes(tmp_path / "c")


def reference(options: RunOptions, data: Data) -> tuple[dict[str, bytes], list[float]]:
    """The same training as one plain fp32 loop."""
    learner = Learner()
    model, lr = learner.model, learner.lr
    torch.manual_seed(3)
    named = list(model.parameters())
    wide, flat = [p for p in named if p.ndim > 1], [p for p in named if p.ndim == 1]
    params = wide + flat
    groups = [
        {"params": wide, "weight_decay": options.weight_decay},
        {"params": flat, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
    total, step, losses = options.epochs * 3, 0, []
    model.train()
    for epoch in range(options.epochs):
        batches = data(epoch)
        for window in (range(0, 3), range(3, 6), range(6, 8)):
            rows = [len(batches[i]["labels"]) for i in window]
            shares = [n / sum(rows) for n in rows]
            parts = [model(**batches[i]).loss * n for i, n in zip(window, shares, strict=True)]
            for part in parts:
                part.backward()
            losses.append(sum(part.item() for part in parts))
            nn.utils.clip_grad_norm_(params, options.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = lr * (0.5 if step == 0 else (total - step) / (total - 1))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return bits(dict(model.named_parameters())), losses


def test_equals_a_plain_loop_to_the_bit_with_a_last_partial_window(tmp_path):
    trainee = Learner()
    fit(tmp_path, trainee=trainee)
    saved = checkpoint.load_checkpoint(tmp_path / "checkpoints" / "last").tensors
    tensors, losses = reference(OPTIONS, Data())
    assert bits(saved) == tensors
    logged = [e["loss"] for e in lines(tmp_path / "metrics.jsonl") if e["event"] == "train"]
    pairs = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    assert logged == pytest.approx(pairs, rel=1e-6)
    rates = [e["learning_rate"] for e in lines(tmp_path / "metrics.jsonl") if e["event"] == "train"]
    assert [r["all"] for r in rates] == pytest.approx([trainee.lr * u for u in (1, 3 / 5, 1 / 5)])


def test_best_tensors_are_live_at_the_end(tmp_path):
    trainee, seen = Learner(), []
    values = scores()

    def evaluate() -> Mapping[str, float]:
        seen.append(bits(trainee.tensors()))
        return values()

    live = {name: t.data_ptr() for name, t in trainee.tensors().items()}
    result = fit(tmp_path, EPOCHS, trainee=trainee, evaluate=evaluate, metric="accuracy")
    assert (result.best, result.best_step) == ({"accuracy": 0.9}, 16)
    assert result.last == {"accuracy": 0.7}
    assert bits(trainee.tensors()) == seen[1] != seen[-1]
    assert {name: t.data_ptr() for name, t in trainee.tensors().items()} == live
    assert not trainee.model.training


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [("mse", (0.5, 0.9, 0.2), 24), ("f1", (0.5, 0.9, 0.2), 16), ("acc", (NONE, 0.3, NONE), 16)],
)
def test_errors_are_better_low_and_scores_high(tmp_path, name, values, best):
    """And what is not a number is never best, and written as null."""
    left = iter(values)
    result = fit(tmp_path, EPOCHS, evaluate=lambda: {name: next(left)}, metric=name)
    assert (result.best_step, result.best) == (best, {name: values[best // 8 - 1]})
    written = [e["metrics"] for e in lines(tmp_path / "metrics.jsonl") if e["event"] == "eval"]
    assert written == [{name: None if value is NONE else value} for value in values]


def test_without_evaluation_the_last_tensors_are_the_result(tmp_path):
    trainee = Learner()
    result = fit(tmp_path, trainee=trainee, evaluation=False)
    assert (result.best, result.best_step, result.last, result.history) == ({}, None, {}, [])
    assert result.steps == 6
    last = checkpoint.load_checkpoint(tmp_path / "checkpoints" / "last")
    assert bits(last.tensors) == bits(trainee.tensors())
    assert not (tmp_path / "checkpoints" / "best").exists()
    assert not trainee.model.training
    again = fit(tmp_path, trainee=Learner(), evaluation=False, resume=True)
    assert (again.steps, again.last) == (6, {})


SATURATED = (1.0,) * 6
FALLING = (0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@pytest.mark.parametrize("metric", ["accuracy", *cases_of(["a/accuracy", "mean", "perplexity"])])
@pytest.mark.parametrize(
    ("values", "losses", "best", "patience", "steps"),
    [
        (SATURATED, FALLING, 6, None, 6),
        (SATURATED, FALLING, 6, 1, 6),  # the loss falls: no reason to stop
        (SATURATED, FALLING[::-1], 1, None, 6),
        (SATURATED, FALLING[::-1], 1, 2, 3),
        (SATURATED, (0.5, 0.2, 0.2, 0.3, 0.2, 0.9), 5, None, 6),
        (SATURATED, (NONE,) * 6, 6, None, 6),
        (SATURATED, (NONE,) * 6, 3, 2, 3),  # what stays equal is no improvement
        (SATURATED, (NONE, 0.2, NONE, 0.3, NONE, 0.2), 6, None, 6),
        ((0.0,) * 6, FALLING, 6, 1, 6),  # a metric that is at its minimum
        ((0.5, 0.9, 0.9, 0.9, 0.9, 0.9), (0.1, 0.9, 0.8, 0.9, 0.8, 0.7), 6, 3, 6),
        ((0.5, 0.9, 0.9, 0.9, 0.9, 0.9), (0.1, 0.9, 0.8, 0.9, 0.8, 0.7), 3, 1, 4),
    ],
)
def test_equal_metrics_go_to_the_lower_loss_then_to_the_later_step(
    tmp_path, metric, values, losses, best, patience, steps
):
    """The loss is that of the rows of the metric; of several tasks, each has its own."""
    if metric == "perplexity":  # lower is better
        values = tuple(1 - value for value in values)
    options = RunOptions(
        max_steps=6, batch_size=BATCH, eval_every=1, patience=patience, tensorboard=False
    )
    of_tasks = {"a/accuracy": ("a/loss",), "mean": ("a/loss", "b/loss")}
    pairs = zip(values, losses, strict=True)
    evaluations = (
        {metric: value} | dict.fromkeys(of_tasks.get(metric, ("loss",)), loss)
        for value, loss in pairs
    )
    result = fit(tmp_path, options, evaluate=lambda: next(evaluations), metric=metric)
    assert (result.best_step, result.steps) == (best, steps)
    assert result.stopped_early == (steps < 6)
    again = fit(tmp_path, options, metric=metric, resume=True)
    assert (again.best_step, again.steps) == (best, steps)


KILLED = RunOptions(
    epochs=2, batch_size=BATCH, gradient_accumulation=3, log_every=2, eval_every=2, save_every=1,
    tensorboard=False,
)  # fmt: skip


def ticking_fit(output: Path, at: int, resume: bool = False) -> int:
    """Run once, killed at tick `at`; return the number of ticks if it was not killed."""
    ticks = runs.Ticks(at)
    with pytest.MonkeyPatch.context() as patch:
        ticks.watch_files(patch)
        fit(output, KILLED, data=Data(ticks), resume=resume)
    return ticks.count


@runs.forks
def test_killed_at_any_moment_and_resumed_gives_the_same_bytes(tmp_path):
    """Also when it is killed again and again."""
    total = ticking_fit(tmp_path / "whole", at=-1)
    assert total > 60
    expected = final_bytes(tmp_path / "whole")
    moments = {f"at{at}": (at,) for at in range(0, total, 7)}
    for name, ticks in (moments | {"often": (3, 20, 25, 16, 15, 14)}).items():
        for number, at in enumerate(ticks):
            output, resume = tmp_path / name, number > 0
            runs.killed(partial(ticking_fit, output, at, resume))
        ticking_fit(tmp_path / name, at=-1, resume=True)
        assert final_bytes(tmp_path / name) == expected, f"killed at {ticks} of {total}"


def test_resume_of_another_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        fit(tmp_path / "metric", evaluate=lambda: {"accuracy": 1.0}, metric="acuracy")
    fit(tmp_path)
    with pytest.raises(ConfigError) as error:
        fit(tmp_path, replace(OPTIONS, optimizer="adamw-8bit"), resume=True)
    assert error.value.offenders == (
        'train.optimizer: "adamw" in the checkpoint, "adamw-8bit" now',
    )
    with pytest.raises(ConfigError, match="would have no effect") as error:
        fit(tmp_path, replace(OPTIONS, beta1=0.8), resume=True)
    assert error.value.offenders == ("train.beta1",)


def test_a_finished_run_is_not_overwritten_and_resumes_to_its_result(tmp_path):
    result = fit(tmp_path)
    before = final_bytes(tmp_path)
    with pytest.raises(OutputError, match="already contains"):
        fit(tmp_path)
    trainee, data = Learner(), Data()
    again = fit(tmp_path, trainee=trainee, data=data, resume=True)
    assert final_bytes(tmp_path) == before
    assert (again.history, again.best) == (result.history, result.best)
    assert data.collated == 0
    best = checkpoint.load_checkpoint(tmp_path / "checkpoints" / "best").tensors
    assert bits(trainee.tensors()) == bits(best)


CONSTANT = replace(OPTIONS, schedule="constant", warmup=2)


def saved_bytes(output: Path) -> dict[str, bytes]:
    return {
        name: (output / "checkpoints" / name / "tensors.safetensors").read_bytes()
        for name in ("last", "best")
    }


@pytest.mark.parametrize("changes", [{}, {"max_steps": 13}, {"patience": 3}, {"eval_every": 2}])
def test_a_longer_run_equals_one_that_was_long_from_the_start(tmp_path, changes):
    """Also one that is lengthened twice, and resumed in between; none is shortened."""
    long = replace(CONSTANT, **{"epochs": 6} | changes)
    whole, lengths = fit(tmp_path / "whole", long), (2, 4, 4)
    assert whole.steps > 6
    for number, epochs in enumerate(lengths):
        fit(tmp_path / "parts", replace(long, epochs=epochs, max_steps=None), resume=number > 0)
    parts = fit(tmp_path / "parts", long, resume=True)
    assert (parts.steps, parts.history) == (whole.steps, whole.history)
    assert parts.best_step == whole.best_step
    assert saved_bytes(tmp_path / "parts") == saved_bytes(tmp_path / "whole")
    name = "metrics.jsonl"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(ConfigError, match=f"has {whole.steps} steps already|stopped early"):
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
    saved = asdict(TrainOptions(epochs=100, warmup=50))
    check_length(saved, TrainOptions(epochs=200, warmup=50), 10, 40)  # it is not over
    with pytest.raises(ConfigError):
        check_length(saved, TrainOptions(epochs=200, warmup=50), 10, 51)


def test_a_run_that_patience_stopped_is_not_lengthened(tmp_path):
    options = replace(CONSTANT, epochs=4, patience=2)
    evaluate = scores((0.9, 0.5, 0.5, 0.5))
    assert fit(tmp_path, options, evaluate=evaluate, metric="accuracy").stopped_early
    with pytest.raises(ConfigError, match="stopped early after step 9"):
        fit(tmp_path, replace(options, epochs=9), resume=True, metric="accuracy")


def test_training_and_other_work_are_timed_apart(monkeypatch):
    readings = itertools.count()  # one second passes between two of them
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(readings)))
    progress = RunProgress(examples=100, train_seconds=50.0)
    run_clock = RunClock(progress, torch.device("cpu"))
    run_clock.add_training()
    run_clock.add_other()
    run_clock.add_other()
    assert (progress.train_seconds, progress.other_seconds) == (51.0, 2.0)
    progress.examples += 8
    assert run_clock.timing().examples_per_second == 4.0  # in two seconds of training


def test_the_best_of_the_short_run_stays_the_best(tmp_path):
    fit(tmp_path, CONSTANT, evaluate=scores((0.9, 0.5)), metric="accuracy")
    long = replace(CONSTANT, epochs=4)
    result = fit(tmp_path, long, evaluate=scores((0.5, 0.5)), metric="accuracy", resume=True)
    assert (result.best_step, result.best) == (3, {"accuracy": 0.9})
    assert checkpoint.load_checkpoint(tmp_path / "checkpoints" / "best").progress["step"] == 3
