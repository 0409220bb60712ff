"""Adapters on top of others, on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import adapterhub as ah
from adapterhub.adapters.adapter import Adapter
from tests.kit import tiny_models


def outputs(model: PreTrainedModel, rows: int = 3) -> Tensor:
    """Return the first output of a model, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        first: Tensor = model(**tiny_models.batch(rows))[0]
    return first.clone()


def save_alone(
    folder: Path, method: Any = "pfeiffer(size=4)", architecture: str = "bert", seed: int = 1
) -> Path:
    """Save an adapter of the bare backbone, with arbitrary values, named like its folder."""
    adapter = ah.attach(tiny_models.model(architecture), method, name=folder.name)
    tiny_models.scramble(adapter, seed=seed)
    adapter.save(folder)
    return folder


def attach_on(
    references: list[Any], method: Any = "lora(rank=2)", name: str = "task", seed: int = 2
) -> Adapter:
    """Attach an adapter with arbitrary values on top of others, on a new model."""
    model = tiny_models.model("bert")
    names = [ah.load(model, each, frozen=True).name for each in references]
    adapter = ah.attach(model, method, name=name, on=names)
    tiny_models.scramble(adapter, seed=seed)
    return adapter


def save_on(folder: Path, references: list[Any], method: Any = "lora(rank=2)") -> Tensor:
    """Save an adapter on top of others, named like its folder, and return its outputs."""
    adapter = attach_on(references, method, folder.name)
    adapter.save(folder)
    return outputs(adapter.model)
