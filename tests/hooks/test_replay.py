"""Layers return what was recorded, on every architecture; what cannot be right is not replayed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import FULL_MATRIX, MATRIX
from torch import Tensor

import adapterhub as ah
from adapterhub.hooks.replay import LayerCall, StackReplay, plan_of_calls, replayable, rows_of
from adapterhub.training.activation_store import MemoryWriter, RecordedStates
from adapterhub.training.replay_check import NotReplayable, evaluating, find_plan, record

METHODS = ("head", "lora(layers=top 1, targets=attn.o)", "freeze(top=1)", "scalar-mix")
# Their layers return what depends on the whole batch, or is handed on from layer to layer.
COMPUTED: dict[str, set[str]] = {}


def attached(architecture: str, method: str) -> Any:
    """Attach an adapter to a tiny model and set it to training mode."""
    model = tiny_models.usual_model(architecture, num_labels=3)
    adapter = ah.attach(model, method, name="mine")
    tiny_models.scramble(adapter)
    adapter.train_mode()
    return adapter
