"""Gradient checkpointing and dropout of a frozen backbone."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.hooks.composition import RecomputedInContext
from adapterhub.loop import checkpoint, engine
from adapterhub.loop.engine import Engine, LazyBatches, _kept_on_host, batch_order, recompute
from adapterhub.loop.loop import TrainingSession, train
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import RunOptions
from adapterhub.speed.activation_memory import activation_bytes
from tests.kit import tiny_models
from tests.kit.runs import Learner, bits, fit


class BertLearner(Learner):
    """A tiny BERT whose query weights and classifier train; the rest is frozen."""

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


def train_bert(trainee: BertLearner, output: Path, **options: Any) -> None:
    session = TrainingSession(
        Engine(trainee, RunOptions(tensorboard=False, **options)),
        bert_batches, lambda: {"loss": 1.0},
        output=output, seed=0, main_metric="loss", resume=False, run={}, reporter=Reporter(),
    )  # fmt: skip
    train(session)


def fit_bert(output: Path, **options: Any) -> tuple[BertLearner, int, dict[str, bytes]]:
    """Train; return the trainee, the number of calls of one layer, and the last tensors."""
    trainee, calls = BertLearner(), []
    attention = trainee.model.get_submodule("bert.encoder.layer.1.attention")
    handle = attention.register_forward_hook(lambda *_: calls.append(1))
    train_bert(trainee, output, epochs=2, **options)
    handle.remove()
    last = checkpoint.load_checkpoint(output / "checkpoints" / "last").tensors
    return trainee, len(calls), bits(last)


def test_gradient_checkpointing_recomputes_and_changes_nothing(tmp_path):
    """Dropout of what is frozen is off by default, and the model is left as it was."""
    ended = []
    for dropout in (False, True):
        _, plain_calls, plain = fit_bert(tmp_path / f"plain-{dropout}", dropout=dropout)
        trainee, calls, same = fit_bert(
            tmp_path / f"again-{dropout}", dropout=dropout, gradient_checkpointing=True
        )
        assert (plain_calls, calls) == (8, 16)
        assert same == plain
        ended.append(plain)
        modules = [*trainee.model.modules()]
        assert not any(getattr(m, "gradient_checkpointing", False) for m in modules)
        assert not any(m.training for m in modules)
        assert not any("_gradient_checkpointing_func" in vars(m) for m in modules)
    assert ended[0] != ended[1]


def test_gradient_checkpointing_needs_layers_that_can(tmp_path):
    with pytest.raises(ConfigError, match="Net has no layer"):
        fit(tmp_path, RunOptions(gradient_checkpointing=True))
    with pytest.raises(ConfigError, match="out of range") as error:
        RunOptions(offload_activations=True)
    assert "only with gradient_checkpointing=true" in str(error.value)


def test_the_model_is_left_as_it_was(tmp_path):
    trainee = BertLearner()
    before = {
        name: vars(m).keys() - {"_forward_hooks"} for name, m in trainee.model.named_modules()
    }
    frozen = {n: p for n, p in trainee.model.named_parameters() if not p.requires_grad}
    frozen_bytes = bits(frozen)
    train_bert(trainee, tmp_path, epochs=1, mixed_precision="bf16")
    after = {name: vars(m).keys() - {"_forward_hooks"} for name, m in trainee.model.named_modules()}
    assert after == before
    assert bits(frozen) == frozen_bytes
    assert all(p.grad is None for p in trainee.model.parameters())


def test_inputs_are_kept_on_the_host_and_nothing_else(tmp_path, monkeypatch):
    """On a CPU there is nothing to move, so what would be moved is counted here."""
    kept: list[torch.Size] = []

    @contextmanager
    def counted(inputs):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.shape) or tensor.clone(), lambda tensor: tensor
        ):
            yield

    _, _, expected = fit_bert(tmp_path / "plain")
    on = {"gradient_checkpointing": True, "offload_activations": True}
    _, _, unmoved = fit_bert(tmp_path / "cpu", **on)
    monkeypatch.setattr(engine, "_kept_on_host", counted)
    _, _, moved = fit_bert(tmp_path / "counted", **on)
    assert unmoved == moved == expected
    batches = 2 * 4
    assert kept.count(torch.Size([4, 9, 16])) == batches * 3, "the input of each of three layers"
    assert {len(shape) for shape in kept} <= {0, 1, 3, 4}, "no weight of a projection"

    # A context moves what is saved only if it is not on the host.
    assert isinstance(_kept_on_host([torch.zeros(1), None]), nullcontext)
    assert isinstance(_kept_on_host([torch.zeros(1, device="meta")]), save_on_cpu)


def checkpointed(architecture: str) -> Any:
    """Return a tiny model whose user has turned checkpointing on."""
    model = tiny_models.model(architecture, "features")
    tiny_models.enable_gradient_checkpointing(model)
    return model


def switches(model: Any) -> list[tuple[bool, Any]]:
    """Return what checkpoints each layer, which a pass with adapters wraps."""
    layers = [m for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")]
    assert layers
    functions = [m._gradient_checkpointing_func for m in layers]
    own = [f.checkpoint if isinstance(f, RecomputedInContext) else f for f in functions]
    return [(m.gradient_checkpointing, f) for m, f in zip(layers, own, strict=True)]


@pytest.mark.parametrize("architecture", ["bert", "llama", "t5"])
def test_a_users_own_checkpointing_comes_back(architecture):
    """Behind a prediction of memory, and behind training."""
    model = checkpointed(architecture)
    before = switches(model)
    assert all(on for on, _ in before)
    adapter = ah.attach(model, "lora")
    for recomputed in (False, True):
        activation_bytes(adapter, 2, 8, recomputed)
        assert switches(model) == before
    ah.detach(model)
    with recompute(model, True) as layers:
        assert layers is not None
        layers.apply()
        assert switches(model) != before
    assert switches(model) == before
