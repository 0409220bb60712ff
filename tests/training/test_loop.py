from __future__ import annotations

import io
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from adapterhub.errors import ConfigError, OutputError, TrainingError
from adapterhub.training import checkpoint, engine, loop
from adapterhub.training.batching import LazyBatches, batch_order
from adapterhub.training.loop import TrainingResult, train
from adapterhub.training.options import TrainOptions
from adapterhub.training.report import Bar, PlainLines, Reporter, Silent, reporter_for

torch.set_num_threads(1)

EXAMPLES, BATCH = 30, 4
OPTIONS = TrainOptions(
    epochs=2, batch_size=BATCH, gradient_accumulation=3, log_every=2, tensorboard=False
)
ACCURACIES = (0.5, 0.9, 0.7, 0.6, 0.8, 0.4)


class Net(nn.Module):
    """Two layers and dropout, so that the random state matters."""

    body: nn.Sequential

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        logits = self.body(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


class Learner:
    """A trainee of which everything trains."""

    def __init__(self, model: nn.Module | None = None, lr: float = 0.01) -> None:
        self.model = Net() if model is None else model
        self.lr = lr

    def param_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
        params = [p for p in self.model.parameters() if p.requires_grad]
        return [{"name": "all", "lr": options.learning_rate or self.lr, "params": params}]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    staged = False

    def enter(self, epoch: int, improved: Sequence[bool]) -> bool:
        return False

    def train_mode(self, dropout: bool) -> None:
        self.model.train()


class Data:
    """A separable task; counts what it collates, and calls `event` for each batch."""

    def __init__(self, event: Callable[[], None] = lambda: None) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(EXAMPLES, 6, generator=generator)
        self.labels = (self.x[:, 0] + self.x[:, 1] > 0).long()
        self.event = event
        self.collated = 0
        self.epochs: list[int] = []

    def __call__(self, epoch: int) -> LazyBatches:
        self.epochs.append(epoch)
        return LazyBatches(batch_order([1] * EXAMPLES, BATCH, epoch, 5, True), self.collate)

    def collate(self, indices: list[int]) -> dict[str, torch.Tensor]:
        self.event()
        self.collated += 1
        return {"x": self.x[indices], "labels": self.labels[indices]}

    def score(self, model: nn.Module) -> dict[str, float]:
        self.event()
        assert not model.training
        assert not torch.is_grad_enabled()
        out = model(x=self.x, labels=self.labels)
        right = (out.logits.argmax(-1) == self.labels).float().mean()
        return {"accuracy": float(right), "loss": float(out.loss)}


def fit(
    output: Path,
    options: TrainOptions = OPTIONS,
    *,
    trainee: Learner | None = None,
    data: Data | None = None,
    evaluate: Callable[[], Mapping[str, float]] | None = None,
    resume: bool = False,
    metric: str = "loss",
    reporter: Reporter | None = None,
) -> TrainingResult:
    trainee, data = trainee or Learner(), data or Data()
    return train(
        trainee,
        data,
        evaluate or (lambda: data.score(trainee.model)),
        options,
        output=output,
        seed=3,
        main_metric=metric,
        resume=resume,
        run={"recipe": {"rank": 8}, "data": "abc"},
        reporter=reporter or reporter_for(output, options, quiet=True),
    )


def scores(values: tuple[float, ...] = ACCURACIES) -> Callable[[], Mapping[str, float]]:
    left = iter(values)
    return lambda: {"accuracy": next(left)}


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: t.detach().numpy().tobytes() for name, t in tensors.items()}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def final_bytes(output: Path) -> tuple[bytes, ...]:
    """What two equal runs must share: tensors, and metrics without wall times."""
    last, best = (output / "checkpoints" / name for name in ("last", "best"))
    return (
        (last / "tensors.safetensors").read_bytes(),
        (best / "tensors.safetensors").read_bytes(),
        (best / "progress.json").read_bytes(),
        (output / "metrics.jsonl").read_bytes(),
    )


def test_learns_and_reports(tmp_path: Path) -> None:
    result = fit(tmp_path, TrainOptions(epochs=30, batch_size=BATCH, tensorboard=False))
    assert result.best["accuracy"] >= 0.9
    assert result.steps == 30 * 8
    assert result.history[0]["loss"] > 2 * result.best["loss"]
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


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    fit(tmp_path / "a")
    torch.rand(5)
    fit(tmp_path / "b")
    assert final_bytes(tmp_path / "a") == final_bytes(tmp_path / "b")


def reference(options: TrainOptions, data: Data) -> tuple[dict[str, bytes], list[float]]:
    """The same training written out plainly, in float32 and one loop."""
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
            parts = [model(**batches[i]).loss / len(window) for i in window]
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


def test_equals_a_plain_loop_to_the_bit_with_a_last_partial_window(tmp_path: Path) -> None:
    trainee = Learner()
    fit(tmp_path, trainee=trainee)
    saved = checkpoint.load_checkpoint(tmp_path / "checkpoints" / "last").tensors
    tensors, losses = reference(OPTIONS, Data())
    assert bits(saved) == tensors
    logged = [e["loss"] for e in lines(tmp_path / "metrics.jsonl") if e["event"] == "train"]
    pairs = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    assert logged == pytest.approx(pairs, rel=1e-6)


def test_best_tensors_are_live_at_the_end(tmp_path: Path) -> None:
    trainee, seen = Learner(), []
    values = scores()

    def evaluate() -> Mapping[str, float]:
        seen.append(bits(trainee.tensors()))
        return values()

    options = TrainOptions(epochs=5, batch_size=BATCH, tensorboard=False)
    live = {name: t.data_ptr() for name, t in trainee.tensors().items()}
    result = fit(tmp_path, options, trainee=trainee, evaluate=evaluate, metric="accuracy")
    assert (result.best, result.best_step) == ({"accuracy": 0.9}, 16)
    assert result.last == {"accuracy": 0.8}
    assert bits(trainee.tensors()) == seen[1] != seen[-1]
    assert {name: t.data_ptr() for name, t in trainee.tensors().items()} == live
    assert not trainee.model.training


@pytest.mark.parametrize(("metric", "best_step"), [("mse", 24), ("loss", 24), ("f1", 16)])
def test_errors_are_better_low_and_scores_high(tmp_path: Path, metric: str, best_step: int) -> None:
    values = iter((0.5, 0.9, 0.2))
    options = TrainOptions(epochs=3, batch_size=BATCH, tensorboard=False)
    result = fit(tmp_path, options, evaluate=lambda: {metric: next(values)}, metric=metric)
    assert result.best_step == best_step


def test_best_metric_option_wins_over_the_main_metric(tmp_path: Path) -> None:
    values = iter(((0.5, 0.1), (0.4, 0.2)))
    options = TrainOptions(epochs=2, best_metric="f1", tensorboard=False)
    result = fit(
        tmp_path, options, evaluate=lambda: dict(zip(("acc", "f1"), next(values), strict=True)),
        metric="acc",
    )  # fmt: skip
    assert result.best == {"acc": 0.4, "f1": 0.2}


def test_unknown_metric_suggests_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        fit(tmp_path, evaluate=lambda: {"accuracy": 1.0}, metric="acuracy")


def test_patience_stops_early(tmp_path: Path) -> None:
    options = TrainOptions(epochs=6, batch_size=BATCH, patience=2, tensorboard=False)
    result = fit(tmp_path, options, evaluate=scores(), metric="accuracy")
    assert result.stopped_early
    assert [record["accuracy"] for record in result.history] == [0.5, 0.9, 0.7, 0.6]
    again = fit(tmp_path, options, evaluate=scores(()), metric="accuracy", resume=True)
    assert (again.best, again.steps) == (result.best, result.steps)


def test_a_metric_that_is_not_a_number_is_never_best(tmp_path: Path) -> None:
    values = scores((math.nan, 0.3, math.nan))
    options = TrainOptions(epochs=3, batch_size=BATCH, tensorboard=False)
    result = fit(tmp_path, options, evaluate=values, metric="accuracy")
    assert result.best == {"accuracy": 0.3}
    nulls = [e["metrics"] for e in lines(tmp_path / "metrics.jsonl") if e["event"] == "eval"]
    assert nulls[0] == {"accuracy": None}


def test_evaluation_and_saves_each_n_steps_and_max_steps(tmp_path: Path) -> None:
    options = TrainOptions(
        max_steps=11, batch_size=BATCH, eval_every=4, save_every=3, tensorboard=False
    )
    result = fit(tmp_path, options)
    assert [record["step"] for record in result.history] == [4, 8, 11]
    assert [record["epoch"] for record in result.history] == [0.5, 1.0, 1.375]
    assert result.steps == 11


class Ticks:
    """Sends the process a signal at the n-th event: a batch, an evaluation, a file operation."""

    def __init__(self, at: int, number: int = signal.SIGKILL) -> None:
        self.at, self.number, self.count = at, number, 0

    def __call__(self) -> None:
        if self.count == self.at:
            os.kill(os.getpid(), self.number)
        self.count += 1

    def watch_files(self, patch: pytest.MonkeyPatch) -> None:
        for owner, name in ((os, "fsync"), (checkpoint, "put_in_place"), (shutil, "rmtree")):
            patch.setattr(owner, name, self._before(getattr(owner, name)))

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            self()
            return function(*args, **options)

        return called


def ticking_fit(output: Path, at: int, resume: bool = False) -> int:
    """One run that is killed at tick `at`; returns the ticks when it was not."""
    ticks = Ticks(at)
    with pytest.MonkeyPatch.context() as patch:
        ticks.watch_files(patch)
        fit(output, KILLED, data=Data(ticks), resume=resume)
    return ticks.count


KILLED = TrainOptions(
    epochs=2, batch_size=BATCH, gradient_accumulation=3, log_every=2, eval_every=2, save_every=1,
    tensorboard=False,
)  # fmt: skip


def killed_child(output: Path, at: int, resume: bool) -> None:
    """Runs `ticking_fit` in a child process, and checks that it was killed."""
    child = os.fork()
    if child == 0:
        try:
            ticking_fit(output, at, resume)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_and_resumed_gives_the_same_bytes(tmp_path: Path) -> None:
    total = ticking_fit(tmp_path / "whole", at=-1)
    assert total > 60
    expected = final_bytes(tmp_path / "whole")
    for at in range(0, total, 4):
        output = tmp_path / f"at{at}"
        killed_child(output, at, resume=False)
        ticking_fit(output, at=-1, resume=True)
        assert final_bytes(output) == expected, f"killed at tick {at} of {total}"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_again_and_again_gives_the_same_bytes(tmp_path: Path) -> None:
    ticking_fit(tmp_path / "whole", at=-1)
    for at in (3, 20, 25, 16, 15, 14):
        killed_child(tmp_path / "often", at, resume=True)
    ticking_fit(tmp_path / "often", at=-1, resume=True)
    assert final_bytes(tmp_path / "often") == final_bytes(tmp_path / "whole")


def test_resumed_by_a_fresh_interpreter(tmp_path: Path) -> None:
    fit(tmp_path / "whole")
    command = [sys.executable, __file__, str(tmp_path / "cut"), "11", str(int(signal.SIGKILL))]
    root = str(Path(loop.__file__).parents[2])
    killed = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    fit(tmp_path / "cut", resume=True)
    assert final_bytes(tmp_path / "cut") == final_bytes(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_resume(tmp_path: Path, number: int) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    fit(tmp_path / "whole")
    with pytest.raises(TrainingError, match="after step 4 of 6") as error:
        fit(tmp_path / "cut", data=Data(Ticks(10, number)))
    assert "--resume" in str(error.value)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    data = Data()
    fit(tmp_path / "cut", data=data, resume=True)
    assert final_bytes(tmp_path / "cut") == final_bytes(tmp_path / "whole")
    assert (data.collated, data.epochs) == (5, [1]), "skipped batches were collated"


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    def evaluate() -> Mapping[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return {"loss": 0.0}

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, evaluate=evaluate)


def test_resume_of_another_run_is_refused(tmp_path: Path) -> None:
    fit(tmp_path)
    other = TrainOptions(
        epochs=3, batch_size=BATCH, gradient_accumulation=3, log_every=2, tensorboard=False
    )
    with pytest.raises(ConfigError) as error:
        fit(tmp_path, other, resume=True)
    assert error.value.offenders == ("train.epochs: 2 in the checkpoint, 3 now",)


def test_a_finished_run_is_not_overwritten_and_resumes_to_its_result(tmp_path: Path) -> None:
    result = fit(tmp_path)
    before = final_bytes(tmp_path)
    with pytest.raises(OutputError, match="already holds"):
        fit(tmp_path)
    trainee, data = Learner(), Data()
    again = fit(tmp_path, trainee=trainee, data=data, resume=True)
    assert final_bytes(tmp_path) == before
    assert (again.history, again.best) == (result.history, result.best)
    assert data.collated == 0
    best = checkpoint.load_checkpoint(tmp_path / "checkpoints" / "best").tensors
    assert bits(trainee.tensors()) == bits(best)


def test_resume_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    fit(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step": 2}\n{"ste')
    fit(tmp_path / "b", resume=True)
    assert final_bytes(tmp_path / "a") == final_bytes(tmp_path / "b")


@pytest.fixture(params=["loss", "gradient"])
def broken(request: pytest.FixtureRequest) -> Learner:
    """A trainee that gets a loss, or only a gradient, that is not finite in step 5."""
    calls = itertools.count(1)

    class Broken(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
            out = super().forward(x, labels)
            if self.training and next(calls) == 13:
                weight = next(self.body.parameters())
                zero = torch.zeros(()) * weight.sum()
                out.loss = out.loss * math.nan if request.param == "loss" else (
                    out.loss + zero.sqrt()
                )  # fmt: skip
            return out

    return Learner(Broken())


@pytest.mark.parametrize("read_each_step", [True, False])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(
    tmp_path: Path, broken: Learner, read_each_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_is_free_to_read", lambda device: read_each_step)
    with pytest.raises(TrainingError, match=r"step 5 has loss") as error:
        fit(tmp_path, trainee=broken)
    assert "learning_rate" in str(error.value)
    saved = checkpoint.load_checkpoint(tmp_path / "checkpoints" / "last")
    assert saved.progress["step"] == 3
    assert all(bool(t.isfinite().all()) for t in saved.tensors.values())


def test_losses_read_late_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path / "a")
    monkeypatch.setattr(loop, "_is_free_to_read", lambda device: False)
    fit(tmp_path / "b")
    assert final_bytes(tmp_path / "a") == final_bytes(tmp_path / "b")


def test_a_tensor_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    trainee, values = Learner(), scores()

    def evaluate() -> Mapping[str, float]:
        metrics = values()
        if metrics["accuracy"] == 0.9:
            trainee.tensors()["body.3.bias"][0] = math.inf
        return metrics

    with pytest.raises(TrainingError, match=r"not finite any more: body\.3\.bias"):
        fit(tmp_path, trainee=trainee, evaluate=evaluate, metric="accuracy")
    assert checkpoint.load_checkpoint(tmp_path / "checkpoints" / "last").progress["step"] == 3


class Unused(Net):
    """Has parameters that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)
        self.scheduled = nn.Parameter(torch.zeros(3), requires_grad=False)


def test_tensors_without_a_gradient_are_listed_at_the_first_step(tmp_path: Path) -> None:
    data = Data()
    with pytest.raises(TrainingError) as error:
        fit(tmp_path, trainee=Learner(Unused()), data=data)
    assert error.value.offenders == ("spare.weight: no gradient", "spare.bias: no gradient")
    assert data.collated == 3


class Forgetful(Learner):
    """Hands only matrices to the optimizer, but claims to train everything."""

    def param_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
        params = [p for p in self.model.parameters() if p.ndim > 1]
        return [{"name": "all", "lr": 0.01, "params": params}]


def test_tensors_not_in_the_optimizer_are_listed(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as error:
        fit(tmp_path, trainee=Forgetful())
    assert error.value.offenders == (
        "body.0.bias: not in the optimizer",
        "body.3.bias: not in the optimizer",
    )


class Dead(Net):
    """The loss has a gradient of zero everywhere."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        out = super().forward(x, labels)
        return SimpleNamespace(loss=out.loss * 0, logits=out.logits)


def test_gradients_that_are_all_zero_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as error:
        fit(tmp_path, trainee=Learner(Dead()))
    assert error.value.offenders == ("every gradient is zero",)


def test_trained_tensors_in_half_precision_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as error:
        fit(tmp_path, trainee=Learner(Net().bfloat16()))
    assert len(error.value.offenders) == 4
    assert "torch.bfloat16" in str(error.value)


def test_nothing_to_train_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no tensors"):
        fit(tmp_path, trainee=Learner(Net().requires_grad_(False)))


def test_a_model_without_a_loss_is_an_error(tmp_path: Path) -> None:
    data = Data()
    data.collate = lambda indices: {"x": data.x[indices]}  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="no loss"):
        fit(tmp_path, data=data)


def test_out_of_memory_says_what_to_change(tmp_path: Path) -> None:
    class Huge(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
            raise torch.OutOfMemoryError

    with pytest.raises(TrainingError) as error:
        fit(tmp_path, trainee=Learner(Huge()))
    assert "train.batch_size=2 train.gradient_accumulation=6" in error.value.hint


def test_bf16_computes_in_bf16_and_keeps_fp32_tensors(tmp_path: Path) -> None:
    seen: set[torch.dtype] = set()
    trainee = Learner()
    trainee.model.get_submodule("body.0").register_forward_hook(
        lambda module, inputs, output: seen.add(output.dtype)
    )
    options = TrainOptions(epochs=1, mixed_precision="bf16", tensorboard=False)
    fit(tmp_path, options, trainee=trainee)
    assert seen == {torch.bfloat16}
    assert {t.dtype for t in trainee.tensors().values()} == {torch.float32}
    fit(tmp_path / "next", TrainOptions(epochs=1, tensorboard=False))


def test_fp16_keeps_fp32_tensors_and_resumes_exactly(tmp_path: Path) -> None:
    options = TrainOptions(epochs=2, mixed_precision="fp16", log_every=1, tensorboard=False)
    fit(tmp_path / "whole", options)
    with pytest.raises(TrainingError, match="stopped by a signal"):
        fit(tmp_path / "cut", options, data=Data(Ticks(9, signal.SIGINT)))
    fit(tmp_path / "cut", options, resume=True)
    saved = checkpoint.load_checkpoint(tmp_path / "cut" / "checkpoints" / "last")
    assert {t.dtype for t in saved.tensors.values()} == {torch.float32}
    assert final_bytes(tmp_path / "cut") == final_bytes(tmp_path / "whole")


def test_a_precision_that_the_device_lacks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(**_: Any) -> None:
        raise ValueError("fp16 mixed precision requires a GPU")

    monkeypatch.setattr(engine, "Accelerator", lacks)
    with pytest.raises(ConfigError, match=r"train\.mixed_precision=fp16 fails on cpu"):
        fit(tmp_path, TrainOptions(mixed_precision="fp16"))


class BertLearner(Learner):
    """A tiny BERT of which the query weights and the classifier train; the rest is frozen."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=24, max_position_embeddings=16,
        )  # fmt: skip
        model = BertForSequenceClassification(config)
        for name, p in model.named_parameters():
            p.requires_grad_("query" in name or "classifier" in name)
        super().__init__(model)

    def train_mode(self, dropout: bool) -> None:
        self.model.train(dropout)


def bert_batches(epoch: int) -> LazyBatches:
    ids = torch.randint(1, 40, (16, 9), generator=torch.Generator().manual_seed(1))
    labels = (ids[:, 1] > 20).long()
    order = batch_order([9] * 16, 4, epoch, 0, True)
    return LazyBatches(order, lambda i: {"input_ids": ids[i], "labels": labels[i]})


def fit_bert(output: Path, **options: Any) -> tuple[BertLearner, int, dict[str, bytes]]:
    """Trains; returns also the largest number of layer calls in a step, and the last tensors."""
    trainee, calls = BertLearner(), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    attention = trainee.model.get_submodule("bert.encoder.layer.1.attention")
    handle = attention.register_forward_hook(count)
    train(
        trainee, bert_batches, lambda: {"loss": 1.0},
        TrainOptions(epochs=2, tensorboard=False, **options),
        output=output, seed=0, main_metric="loss", resume=False, run={}, reporter=Silent(),
    )  # fmt: skip
    handle.remove()
    last = checkpoint.load_checkpoint(output / "checkpoints" / "last").tensors
    return trainee, calls, bits(last)


@pytest.mark.parametrize("dropout", [False, True])
def test_gradient_checkpointing_recomputes_and_changes_nothing(
    tmp_path: Path, dropout: bool
) -> None:
    _, plain_calls, plain = fit_bert(tmp_path / "plain", dropout=dropout)
    trainee, calls, same = fit_bert(
        tmp_path / "again", dropout=dropout, gradient_checkpointing=True
    )
    assert (plain_calls, calls) == (8, 16)
    assert same == plain
    flags = [getattr(m, "gradient_checkpointing", False) for m in trainee.model.modules()]
    assert not any(flags)
    assert not any(m.training for m in trainee.model.modules())
    assert not any("_gradient_checkpointing_func" in vars(m) for m in trainee.model.modules())


def test_frozen_dropout_is_off_by_default(tmp_path: Path) -> None:
    _, _, off = fit_bert(tmp_path / "off")
    _, _, on = fit_bert(tmp_path / "on", dropout=True)
    assert off != on


def test_gradient_checkpointing_needs_layers_that_can(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Net has no layer"):
        fit(tmp_path, TrainOptions(gradient_checkpointing=True))


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    trainee = BertLearner()
    before = {
        name: vars(m).keys() - {"_forward_hooks"} for name, m in trainee.model.named_modules()
    }
    frozen = {n: p for n, p in trainee.model.named_parameters() if not p.requires_grad}
    kept = bits(frozen)
    train(
        trainee, bert_batches, lambda: {"loss": 1.0},
        TrainOptions(epochs=1, mixed_precision="bf16", tensorboard=False),
        output=tmp_path, seed=0, main_metric="loss", resume=False, run={}, reporter=Silent(),
    )  # fmt: skip
    after = {name: vars(m).keys() - {"_forward_hooks"} for name, m in trainee.model.named_modules()}
    assert after == before
    assert bits(frozen) == kept
    assert all(p.grad is None for p in trainee.model.parameters())


def test_learning_rates_are_reported_by_group_as_they_were_used(tmp_path: Path) -> None:
    class Grouped(Learner):
        def param_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
            body = self.model.get_submodule("body")
            assert isinstance(body, nn.Sequential)
            return [
                {"name": "adapter", "lr": 0.1, "params": body[0].parameters()},
                {"name": "head", "lr": 0.2, "params": body[3].parameters()},
            ]

    options = TrainOptions(max_steps=4, warmup=1, log_every=1, tensorboard=False)
    fit(tmp_path, options, trainee=Grouped())
    rates = [e["learning_rate"] for e in lines(tmp_path / "metrics.jsonl") if e["event"] == "train"]
    used = [0.5, 1, 2 / 3, 1 / 3]
    assert [r["adapter"] for r in rates] == pytest.approx([0.1 * u for u in used])
    assert [r["head"] for r in rates] == pytest.approx([0.2 * u for u in used])


def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    fit(tmp_path, reporter=PlainLines(stream))
    text = stream.getvalue().splitlines()
    assert len(text) == 3 + 2
    assert text[0].startswith("step 2/6  epoch 0.75  loss ")
    assert "eval at step 3  epoch 1.00  accuracy" in text[1]


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    fit(tmp_path, reporter=Bar(console))
    assert "100%" in stream.getvalue()
    assert "6/6" in stream.getvalue()
    assert "eval at step 6" in stream.getvalue()


def test_tensorboard_writes_events_or_says_once_that_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = TrainOptions(max_steps=2)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    fit(tmp_path, options, reporter=reporter_for(tmp_path, options))
    assert capsys.readouterr().err.count("TensorBoard is not installed") == 1
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_events_hold_loss_and_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = TrainOptions(max_steps=4, log_every=2, eval_every=2)
    fit(tmp_path, options, reporter=reporter_for(tmp_path, options, quiet=True))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [2, 4]
    assert [e.step for e in events.Scalars("eval/accuracy")] == [2, 4]


def test_options_out_of_range_are_listed_together() -> None:
    with pytest.raises(ConfigError) as error:
        TrainOptions(epochs=0, learning_rate=-1.0, beta2=1.0, eval_every=0, patience=0)
    names = [line.split(":")[0] for line in error.value.offenders]
    assert names == ["epochs", "patience", "learning_rate", "beta2", "eval_every"]


if __name__ == "__main__":
    folder, tick, kind = sys.argv[1:]
    fit(Path(folder), data=Data(Ticks(int(tick), int(kind))))
