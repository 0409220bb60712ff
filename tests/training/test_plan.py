"""The plan of a run: what it counts is what the run then has."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapterhub.training.plan import plan_of
from adapterhub.training.prepare import PreparedRun, prepare
from adapterhub.training.recipe import read


@pytest.fixture
def prepared(backbone: Path, data: tuple[Path, Path], tmp_path: Path):
    def with_overrides(*words: str) -> PreparedRun:
        files = {"train": str(data[0]), "eval": str(data[1])}
        flags = {"backbone": str(backbone), "output": str(tmp_path / "run"), "data": files}
        return prepare(read(None, words, flags))

    return with_overrides


@pytest.mark.parametrize("method", ["lora(rank=2)", "full", "[prompt, norms]"])
def test_the_sites_account_for_every_trained_parameter(prepared, method: str) -> None:
    ready = prepared(f"method={method}")
    plan = plan_of(ready)
    assert sum(count for _, _, count in plan.sites) == plan.trainable
    assert plan.trainable == sum(p.numel() for p in ready.adapter.parameters())
    heads = [count for site, method, count in plan.sites if method == "head"]
    assert sum(heads) == plan.head > 0
    assert plan.memory["gradients"] == 4 * plan.trainable
    assert plan.memory["optimizer"] == 8 * plan.trainable


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["train.epochs=2", "train.batch_size=10"], 14),
        (["train.epochs=2", "train.batch_size=10", "train.gradient_accumulation=3"], 6),
        (["train.max_steps=5"], 5),
    ],
)
def test_the_number_of_steps(prepared, words: list[str], steps: int) -> None:
    assert plan_of(prepared(*words)).steps == steps


def test_gradient_checkpointing_takes_less_activation_memory(prepared) -> None:
    plain = plan_of(prepared("train.max_length=64"))
    less = plan_of(prepared("train.max_length=64", "train.gradient_checkpointing=true"))
    assert less.memory["activations"] < plain.memory["activations"]
    assert less.memory["backbone weights"] == plain.memory["backbone weights"]
