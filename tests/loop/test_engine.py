"""One optimizer step: gradients, precision, and the checks of losses and tensors."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from adapterhub.errors import ConfigError, TrainingError
from adapterhub.loop import checkpoint, engine, loop
from adapterhub.recipe.recipe import TrainOptions
from tests.kit.runs import Data, Learner, Net, Ticks, final_bytes, fit, lines, scores


@pytest.fixture(params=["loss", "gradient"])
def broken(request: pytest.FixtureRequest) -> Learner:
    """A trainee whose loss, or only its gradient, is not finite in step 5."""
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


def test_a_tensor_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    trainee, values = Learner(), scores()

    def evaluate() -> Mapping[str, float]:
        metrics = values()
        if metrics["accuracy"] == 0.9:
            trainee.tensors()["body.3.bias"][0] = math.inf
        return metrics

    with pytest.raises(TrainingError, match=r"no longer finite: body\.3\.bias"):
        fit(tmp_path, trainee=trainee, evaluate=evaluate, metric="accuracy")
    assert checkpoint.load_checkpoint(tmp_path / "checkpoints" / "last").progress["step"] == 3


class Unused(Net):
    """Parameters that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)
        self.scheduled = nn.Parameter(torch.zeros(3), requires_grad=False)


class Forgetful(Learner):
    """Hands only matrices to the optimizer, but claims to train everything."""

    def param_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
        params = [p for p in self.model.parameters() if p.ndim > 1]
        return [{"name": "all", "lr": 0.01, "params": params}]


class Dead(Net):
    """The loss has a gradient of zero everywhere."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        out = super().forward(x, labels)
        return SimpleNamespace(loss=out.loss * 0, logits=out.logits)


BIASES = [f"body.{n}.bias: not in the optimizer" for n in (0, 3)]
HALF = [f"body.{n}.{kind}: torch.bfloat16" for n in (0, 3) for kind in ("weight", "bias")]


@pytest.mark.parametrize(
    ("trainee", "offenders"),
    [
        (lambda: Learner(Unused()), ["spare.weight: no gradient", "spare.bias: no gradient"]),
        (Forgetful, BIASES),
        (lambda: Learner(Dead()), ["every gradient is zero"]),
        (lambda: Learner(Net().bfloat16()), HALF),
        (lambda: Learner(Net().requires_grad_(False)), []),
    ],
)
def test_what_does_not_train_is_listed_at_the_first_step(tmp_path, trainee, offenders) -> None:
    data = Data()
    with pytest.raises(TrainingError, match=None if offenders else "no tensors") as error:
        fit(tmp_path, trainee=trainee(), data=data)
    assert list(error.value.offenders) == offenders
    assert data.collated <= 3


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
    assert error.value.hint == (
        "train.batch_size=2 train.gradient_accumulation=6; train.gradient_checkpointing=true; "
        "train.max_length=64, if that cuts few texts; quantize=nf4, or train.mixed_precision=bf16"
    )
    options = TrainOptions(epochs=1, batch_size=1, max_length=128, tensorboard=False)
    with pytest.raises(TrainingError) as error:
        fit(tmp_path / "one", options, trainee=Learner(Huge()))
    assert error.value.hint.startswith("train.gradient_checkpointing=true"), "not half of 1"


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


def test_sounds_have_no_tokens():
    mask = torch.ones(2, 8)
    assert engine.token_count({"input_ids": mask, "attention_mask": mask}) == 16
    assert engine.token_count({"input_values": mask, "attention_mask": mask}) == 0
    assert engine.token_count({"input_values": mask}) == 0
