"""The key of recorded states changes with everything that they depend on, and with nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import adapterhub as ah
from adapterhub.hooks.replay import replayable
from adapterhub.training.activation_key import activation_key
from adapterhub.training.prepare import PreparedRun, prepare
from adapterhub.training.recipe import read


@pytest.fixture
def prepared(backbone: Path, data: tuple[Path, Path], tmp_path: Path) -> PreparedRun:
    """A prepared run that trains the head."""
    files = {"train": str(data[0]), "eval": str(data[1])}
    flags = {"backbone": str(backbone), "output": str(tmp_path / "run"), "data": files}
    return prepare(read(None, ["method=lora(layers=top 1)"], flags))


def key(prepared: PreparedRun, below: int = 1, layers: tuple[int, ...] = (0,)) -> str | None:
    """Return the key for the training rows."""
    with replayable(prepared.adapter.anatomy, "encoder") as replay:
        return activation_key(prepared, replay, below, layers, prepared.train)


def nudge(name: str) -> Callable[[PreparedRun], None]:
    """Return a change of the least significant bits of one value."""

    def change(prepared: PreparedRun) -> None:
        with torch.no_grad():
            prepared.model.get_parameter(name).view(-1)[-1].mul_(1 + 1e-6).add_(1e-7)

    return change


def other_row(prepared: PreparedRun) -> None:
    prepared.train.rows[3]["input_ids"][1] += 1


def other_attention(prepared: PreparedRun) -> None:
    prepared.model.config._attn_implementation = "eager"


def other_config(prepared: PreparedRun) -> None:
    prepared.model.config.layer_norm_eps = 1e-5


CHANGES = (
    nudge("bert.embeddings.word_embeddings.weight"),
    nudge("bert.encoder.layer.0.output.LayerNorm.bias"),
    other_row,
    other_attention,
    other_config,
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_states_changes_the_key(
    prepared: PreparedRun, change: Callable[[PreparedRun], None]
) -> None:
    before = key(prepared)
    assert key(prepared) == before
    change(prepared)
    assert key(prepared) != before
    assert key(prepared, 2, (0,)) != key(prepared, 2, (1,))


def test_labels_head_and_trained_layers_do_not_change_the_key(prepared: PreparedRun) -> None:
    before = key(prepared)
    prepared.train.rows[0]["labels"] = 0
    for name, parameter in prepared.model.named_parameters():
        if name.startswith(("classifier", "bert.encoder.layer.1.")):
            with torch.no_grad():
                parameter.add_(1)
    assert key(prepared) == before


def test_a_frozen_adapter_below_has_no_key(prepared: PreparedRun) -> None:
    ah.attach(prepared.model, "lora", name="below")
    for parameter in ah.adapters(prepared.model)["below"].parameters():
        parameter.requires_grad_(False)
    assert key(prepared) is None


def test_autocast_changes_the_key(prepared: PreparedRun) -> None:
    before: Any = key(prepared)
    with torch.autocast("cpu", torch.bfloat16):
        assert key(prepared) != before
    assert replace(prepared) == prepared
