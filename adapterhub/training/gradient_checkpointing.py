"""Gradient checkpointing: activations of a layer are computed again in the backward pass.

transformers checkpoints a layer only while `layer.training` is true. A frozen backbone is in
evaluation mode, so that its dropout is off, and there the option would silently do nothing. Here
the layer is in training mode for that check alone, and back in its own mode while it computes.

What a layer keeps beside autograd's saved tensors is not seen here: bitsandbytes' int8 layers do
(`adapterhub.backbones.quantized_training.drop_saved_input`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from adapterhub.errors import ConfigError


class Recompute:
    """Gradient checkpointing on the layers of one model, until `undo`.

    Raises `ConfigError` when the model has no layer that transformers can checkpoint.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.layers: list[Any] = [
            m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)
        ]
        if not self.layers:
            raise ConfigError(
                f"{type(model).__name__} has no layer that supports gradient checkpointing",
                hint="train.gradient_checkpointing=false",
            )
        self.modes = [layer.training for layer in self.layers]

    def apply(self) -> None:
        """Turns it on, for the modes that the layers have now. Call again when modes change."""
        self.modes = [layer.training for layer in self.layers]
        for layer, mode in zip(self.layers, self.modes, strict=True):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = _in_mode(layer, mode)
            layer.training = True

    def undo(self) -> None:
        """Puts modes and layers back as they were."""
        for layer, mode in zip(self.layers, self.modes, strict=True):
            layer.training = mode
            layer.__dict__.pop("gradient_checkpointing", None)
            layer.__dict__.pop("_gradient_checkpointing_func", None)


@contextmanager
def recompute(model: torch.nn.Module, on: bool) -> Iterator[Recompute | None]:
    """Gradient checkpointing while the block runs, if `on`."""
    layers = Recompute(model) if on else None
    try:
        yield layers
    finally:
        if layers is not None:
            layers.undo()


def _in_mode(layer: torch.nn.Module, mode: bool) -> Callable[..., Any]:
    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        return checkpoint(_quietly, layer, mode, function, *inputs, use_reentrant=False)

    return run


def _quietly(layer: torch.nn.Module, mode: bool, function: Callable[..., Any], *inputs: Any) -> Any:
    layer.training = mode
    try:
        return function(*inputs)
    finally:
        layer.training = True
