"""What the outputs of frozen layers depend on, as one digest: equal for equal outputs only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import torch
import transformers
from torch import Tensor

from adapterhub.backbones.function_config import function_config
from adapterhub.hooks.replay import StackReplay
from adapterhub.hooks.slot import Slot
from adapterhub.tasks import Encoded
from adapterhub.training.prepare import PreparedRun

VERSION = 1
_BLOCK = 1 << 22  # values


def activation_key(
    prepared: PreparedRun,
    replay: StackReplay,
    below: int,
    layers: tuple[int, ...],
    encoded: Encoded,
) -> str | None:
    """Return the digest; None if the outputs depend on more than weights, tokens and versions.

    Args:
        prepared: the run.
        replay: the stack.
        below: the layers below this one are frozen.
        layers: those whose output is recorded.
        encoded: the rows.
    """
    if any(map(_changes_outputs, _frozen_slots(prepared, replay, below))):
        return None
    model = prepared.model
    device = prepared.model.device.type
    facts = [
        VERSION, torch.__version__, transformers.__version__, type(model).__name__, device,
        torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device)),
        model.config._attn_implementation, function_config(model.config), below, layers,
        sorted(json.dumps({k: v for k, v in row.items() if k != "labels"}) for row in encoded.rows),
        encoded.setting.tokenizer.padding_side,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts, default=str).encode())
    for name, tensor in _frozen_tensors(prepared, replay, below):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        values = tensor.detach().contiguous().flatten()
        for start in range(0, len(values), _BLOCK):
            part = values[start : start + _BLOCK].cpu()
            digest.update(part.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:40]


def _frozen_tensors(
    prepared: PreparedRun, replay: StackReplay, below: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that may decide what the frozen layers return, and others that do not."""
    anatomy = prepared.adapter.anatomy
    heads = tuple(f"{name}." for name in anatomy.head())
    above = tuple(f"{path}." for path in _layers_above(prepared, replay, below))
    for name, tensor in prepared.model.state_dict(keep_vars=True).items():
        if not name.startswith(heads + above) and not tensor.requires_grad:
            yield name, tensor


def _layers_above(prepared: PreparedRun, replay: StackReplay, below: int) -> list[str]:
    stacks = list(prepared.adapter.anatomy.layers.items())
    return [
        path
        for name, paths in stacks
        for number, path in enumerate(paths)
        if name != replay.name or number >= below
    ]


def _frozen_slots(prepared: PreparedRun, replay: StackReplay, below: int) -> Iterator[Slot]:
    above = tuple(f"{path}." for path in _layers_above(prepared, replay, below))
    for name, module in prepared.model.named_modules():
        if isinstance(module, Slot) and not name.startswith(above):
            yield module


def _changes_outputs(slot: Slot) -> bool:
    """Return whether a slot has modules that do not train: those that do are above all layers."""
    return not all(p.requires_grad for p in slot.parameters())
