"""Tensor operations that site modules share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cast(parameter: Tensor, like: Tensor) -> Tensor:
    """Cast a parameter to the dtype of `like`; under autocast, leave the dtype to autocast."""
    if parameter.dtype == like.dtype or torch.is_autocast_enabled(like.device.type):
        return parameter
    return parameter.to(like.dtype)


def add_product(y: Tensor, u: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Compute y + scale * u weightᵀ in one pass, like y.

    y: (..., d_out), u: (..., r), weight: (d_out, r).
    """
    if torch.compiler.is_compiling():
        # A compiler fuses this; with dynamic shapes the scale is a symbol, which addmm cannot take.
        return y + scale * F.linear(u.to(y.dtype), cast(weight, y))
    rows = y.reshape(-1, y.shape[-1])
    u = u.reshape(-1, u.shape[-1]).to(y.dtype)
    return torch.addmm(rows, u, cast(weight, y).T, alpha=scale).view(y.shape)
