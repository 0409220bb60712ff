"""Gradient checkpointing: the activations of a layer are recomputed in the backward pass.

transformers checkpoints a layer only while `layer.training` is true. A frozen backbone is in
evaluation mode, which disables its dropout, so there the option would silently have no effect. Here
the layer is in training mode for that check alone, and in its own mode while it computes.

What is kept of a layer is its input, which may be moved to the memory of the host until the
backward pass needs it (`torch.autograd.graph.save_on_cpu`).

Inputs that a layer keeps outside autograd's saved tensors are not freed by this: see bitsandbytes'
int8 layers (`adapterhub.backbones.quantized_layers.drop_saved_input`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from adapterhub.errors import ConfigError

_SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func")  # of a layer


class CheckpointedLayers:
    """The layers of one model that are recomputed, from `apply` until `undo`.

    With `offload`, their inputs are kept in the memory of the host.

    Raises:
        ConfigError: the model has no layer that transformers can checkpoint.
    """

    def __init__(self, model: torch.nn.Module, offload: bool = False) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.layers: list[Any] = [
            m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)
        ]
        # Models of diffusers have switches of their own.
        self.others: list[Any] = [
            m for m in model.modules() if hasattr(m, "enable_gradient_checkpointing")
        ]
        self.others = [m for m in self.others if m._supports_gradient_checkpointing]
        self.were = [m.is_gradient_checkpointing for m in self.others]
        if not self.layers and not self.others:
            raise ConfigError(
                f"{type(model).__name__} has no layer that supports gradient checkpointing",
                hint="train.gradient_checkpointing=false",
            )
        self.offload = offload
        self.modes = [layer.training for layer in self.layers]
        # A user's own checkpointing, which `undo` brings back.
        self.own = [{n: v for n, v in vars(m).items() if n in _SWITCHES} for m in self.layers]

    def apply(self) -> None:
        """Enable it with the current modes of the layers. Call again when modes change."""
        self.modes = [layer.training for layer in self.layers]
        for layer, mode in zip(self.layers, self.modes, strict=True):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = _checkpoint_in_mode(layer, mode, self.offload)
            layer.training = True
        for model in self.others:
            model.enable_gradient_checkpointing()

    def undo(self) -> None:
        """Restore the layers and their modes."""
        for layer, mode, own in zip(self.layers, self.modes, self.own, strict=True):
            layer.training = mode
            for name in _SWITCHES:
                layer.__dict__.pop(name, None)
            layer.__dict__.update(own)
        for model, was in zip(self.others, self.were, strict=True):
            if not was:
                model.disable_gradient_checkpointing()


@contextmanager
def recompute(
    model: torch.nn.Module, enabled: bool, offload: bool = False
) -> Iterator[CheckpointedLayers | None]:
    """Allow gradient checkpointing while the block runs, if `enabled`; `apply` turns it on."""
    layers = CheckpointedLayers(model, offload) if enabled else None
    try:
        yield layers
    finally:
        if layers is not None:
            layers.undo()


def _checkpoint_in_mode(layer: torch.nn.Module, mode: bool, offload: bool) -> Callable[..., Any]:
    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        with _kept_on_host(inputs) if offload else nullcontext():
            return checkpoint(_call_in_mode, layer, mode, function, *inputs, use_reentrant=False)

    return run


def _kept_on_host(inputs: Sequence[Any]) -> AbstractContextManager[None]:
    """Return a context in which what is saved for the backward pass leaves the GPU.

    Inside `checkpoint` only its inputs are saved; the rest has hooks of its own.
    """
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    on_gpu = any(tensor.device.type != "cpu" for tensor in tensors)
    context: AbstractContextManager[None] = save_on_cpu(pin_memory=on_gpu)
    return context if on_gpu else nullcontext()


def _call_in_mode(
    layer: torch.nn.Module, mode: bool, function: Callable[..., Any], *inputs: Any
) -> Any:
    layer.training = mode
    try:
        return function(*inputs)
    finally:
        layer.training = True
