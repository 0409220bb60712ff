"""Try a linear layer whose code is its own: whether it computes x Wᵀ + b, and passes gradients on.

Quantizations bring layers that scale, round or divide their weight when they are called, and some
whose kernels have no backward pass. What such a layer does is tried on a few random inputs rather
than believed of its class. Hooks are not called, so adapters on it do not matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapterhub.backbones.same import same

_INPUTS = 4
_ROUNDING = 0.1  # activations in 8 bits are rounded by some 3 %
# A layer with other inputs or outputs, or without a kernel for this device.
_NO_ANSWER = (RuntimeError, TypeError, ValueError, AttributeError, ImportError, NameError)


def has_own_code(layer: nn.Module) -> bool:
    """Return whether a layer computes by other code than nn.Linear, Conv1D and bitsandbytes."""
    if "forward" in vars(layer) and not hasattr(layer, "_hf_hook"):  # which accelerate sets
        return True
    usual = type(layer).forward in (nn.Linear.forward, Conv1D.forward)
    return not usual and not type(layer).__module__.startswith("bitsandbytes.")


@torch.no_grad()
def computes_with(layer: nn.Module, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a layer computes x Wᵀ + b, up to the rounding of activations to 8 bits.

    Args:
        layer: the layer.
        weight: W, (d_out, d_in).
        dtype: the dtype of inputs.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_INPUTS, weight.shape[1], generator=generator).to(weight.device, dtype)
    bias: Tensor | None = getattr(layer, "bias", None)
    try:
        expected = x.float() @ weight.float().T + (0 if bias is None else bias.float())
        return bool(same({"": expected}, {"": _called(layer, x)}, _ROUNDING))
    except _NO_ANSWER:
        return False


def blocks_gradients(layer: nn.Module, width: int, like: Tensor) -> bool:
    """Return whether no gradient reaches the input of a layer: none, an error, or zeros.

    Args:
        layer: the layer.
        width: the size of its inputs.
        like: a tensor with the device and dtype of inputs.
    """
    with torch.enable_grad():
        x = torch.linspace(-1, 1, width, dtype=like.dtype, device=like.device)[None]
        try:
            output = _called(layer, x.requires_grad_())
        except _NO_ANSWER:  # the model says so when it is called
            return False
        if not isinstance(output, Tensor):
            return False
        try:
            (gradient,) = torch.autograd.grad(output.sum(), x)
        except RuntimeError:  # it needs no gradient, or has no backward pass
            return True
    return not bool(gradient.any())


def _called(layer: nn.Module, x: Tensor) -> Any:
    # accelerate's forward would move weights that are in place already.
    forward = type(layer).forward if hasattr(layer, "_hf_hook") else None
    return forward(layer, x) if forward else layer.forward(x)
