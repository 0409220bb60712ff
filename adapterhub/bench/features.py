"""What a backbone makes of texts with each of several adapters: the mean state of the last layer.

Adapters that can share a batch do: each text is in it once for each adapter, by a route.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from adapterhub.adapters.activate import activate
from adapterhub.adapters.attached import adapters, disabled
from adapterhub.adapters.route import route
from adapterhub.bench.linear_probe import Features
from adapterhub.tasks import Encoded
from adapterhub.tasks._losses import model_inputs

ROWS = 64  # in one forward pass


def features_of(
    model: PreTrainedModel, encoded: Encoded, names: Sequence[str | None]
) -> dict[str | None, Features]:
    """Return the features of all rows with each adapter, (rows, width).

    The name of the bare backbone is None.
    """
    attached = adapters(model)
    alone = [name for name in names if name is None or attached[name].replaces]
    shared = [name for name in names if name not in alone]
    found = _shared(model, encoded, shared) if shared else {}
    return found | {name: _alone(model, encoded, name) for name in alone}


def _shared(
    model: PreTrainedModel, encoded: Encoded, names: Sequence[str | None]
) -> dict[str | None, Features]:
    """Compute several adapters in one pass: row i goes through adapter i modulo their number."""
    parts: list[Features] = []
    count, rows = len(names), max(ROWS // len(names), 1)
    for batch in _batches(model, encoded, rows):
        repeated = {key: value.repeat_interleave(count, 0) for key, value in batch.items()}
        size = len(batch["input_ids"])
        with route(model, [*names] * size):
            states = _mean_state(model, repeated)
        parts.append(states.reshape(size, count, -1))
    every = np.concatenate(parts)
    return {name: every[:, number] for number, name in enumerate(names)}


def _alone(model: PreTrainedModel, encoded: Encoded, name: str | None) -> Features:
    way: AbstractContextManager[Any] = nullcontext()
    if name is not None:
        activate(model, name)
    elif adapters(model):
        way = disabled(model)
    with way:
        return np.concatenate([_mean_state(model, b) for b in _batches(model, encoded, ROWS)])


def _batches(model: PreTrainedModel, encoded: Encoded, rows: int) -> list[dict[str, torch.Tensor]]:
    found = []
    for start in range(0, len(encoded.rows), rows):
        batch = encoded.batch(range(start, min(start + rows, len(encoded.rows))))
        kept = {key: value for key, value in model_inputs(batch).items() if key != "labels"}
        found.append({key: value.to(model.device) for key, value in kept.items()})
    return found


@torch.inference_mode()
def _mean_state(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> Features:
    """Return the mean over the tokens of each row, (rows, width)."""
    outputs = model(**batch, output_hidden_states=True)
    layers = getattr(outputs, "hidden_states", None) or outputs.encoder_hidden_states
    mask = batch["attention_mask"][..., None].to(layers[-1].dtype)
    states = layers[-1][:, -mask.shape[1] :]  # virtual tokens are in front
    mean = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
    features: Features = mean.float().cpu().numpy()
    return features
