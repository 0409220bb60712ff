"""An adapter as a trainee: parameter groups, stages and training mode."""

from __future__ import annotations

from typing import Any

import pytest

import adapterhub as ah
from adapterhub.adapters.adapter import Adapter
from adapterhub.loop.trainee import HEAD_LEARNING_RATE, AdapterTrainee
from adapterhub.methods import METHODS
from adapterhub.recipe.recipe import TrainOptions
from tests.kit import tiny_models

LAYERS = ("encoder.2.", "encoder.1.", "encoder.0.", "backbone.embeddings")


def attached(method: Any = "unfreeze", layers: int = 3) -> Adapter:
    return ah.attach(
        tiny_models.model("bert", num_hidden_layers=layers, **tiny_models.NO_DROPOUT), method
    )


def depth(name: str) -> int:
    """How many layers are above a tensor of the three-layer BERT."""
    below = [n for n, prefix in enumerate(LAYERS) if name.startswith(prefix)]
    return below[0] if below else 0


def test_what_is_frozen_now_is_in_evaluation_mode() -> None:
    adapter = attached()
    trainee = AdapterTrainee(adapter)
    for epoch, modes in ((0, [False, False, True]), (1, [False, True, True]), (3, [True] * 3)):
        trainee.enter(epoch, [], 0.0)
        trainee.train_mode(dropout=False)
        names = [f"bert.encoder.layer.{n}.attention.self.query" for n in range(3)]
        assert [adapter.model.get_submodule(name).training for name in names] == modes


@pytest.mark.parametrize(("method", "depths"), [("full", [0, 1, 2, 3]), ("freeze", [0, 1])])
def test_a_decay_gives_each_layer_its_own_rate(method: str, depths: list[int]) -> None:
    adapter = attached(f"{method}(decay=2.0)")
    rates = {g.rate: {depth(n) for n, _ in g.named} for g in adapter.groups() if g.method}
    assert rates == {2.0**-n: {n} for n in depths}
    assert sum(group.method is None for group in adapter.groups()) == 1
    groups = AdapterTrainee(adapter).param_groups(TrainOptions())
    rate = METHODS[method].learning_rate
    group_rates = {group["name"]: group["lr"] for group in groups}
    assert group_rates.pop("head") == 5e-3
    names = {0: method, 1: f"{method} x0.5", 2: f"{method} x0.25", 3: f"{method} x0.125"}
    assert group_rates == {names[n]: rate * 2.0**-n for n in depths}


def test_without_a_decay_there_is_one_group() -> None:
    assert [group.rate for group in attached("full").groups()] == [1.0, 1.0]


def test_learning_rates_come_from_the_options_or_the_methods() -> None:
    trainee = AdapterTrainee(attached("lora, norms"))
    rates = {g["name"]: g["lr"] for g in trainee.param_groups(TrainOptions())}
    assert rates == {
        "lora": METHODS["lora"].learning_rate,
        "norms": METHODS["norms"].learning_rate,
        "head": HEAD_LEARNING_RATE,
    }
    options = TrainOptions(learning_rate=0.5, head_learning_rate=0.25)
    rates = {g["name"]: g["lr"] for g in trainee.param_groups(options)}
    assert rates == {"lora": 0.5, "norms": 0.5, "head": 0.25}


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        (TrainOptions(), HEAD_LEARNING_RATE),
        (TrainOptions(learning_rate=0.5), 0.5),
        (TrainOptions(head_learning_rate=0.25), 0.25),
        (TrainOptions(learning_rate=0.5, head_learning_rate=0.25), 0.25),
    ],
)
def test_a_head_that_trains_alone_has_the_learning_rate(options: TrainOptions, rate: float) -> None:
    groups = AdapterTrainee(attached("head")).param_groups(options)
    assert {g["name"]: g["lr"] for g in groups} == {"head": rate}


def test_groups_and_tensors_are_the_same_parameters() -> None:
    trainee = AdapterTrainee(attached("mam"))
    grouped = [p for g in trainee.param_groups(TrainOptions()) for p in g["params"]]
    assert {id(p) for p in grouped} == {id(t) for t in trainee.tensors().values()}
    assert len(grouped) == len(trainee.tensors())


@pytest.mark.parametrize(("method", "staged"), [("unfreeze", True), ("lora", False)])
def test_only_methods_with_stages_are_staged(method: str, staged: bool) -> None:
    assert AdapterTrainee(attached(method)).staged is staged
