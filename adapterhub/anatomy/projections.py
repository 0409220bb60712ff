"""Projections: modules that multiply by a matrix, whatever library they come from."""

from __future__ import annotations

from torch import nn


def is_projection(module: nn.Module) -> bool:
    """Return whether a module is a matrix with an input and an output size.

    torch's `Linear`, its quantized variants, with a weight or with packed codes, and GPT-2's
    `Conv1D`.
    """
    has_size = hasattr(module, "in_features") or hasattr(module, "nx")
    return has_size and getattr(module, "weight", module) is not None


def in_features(module: nn.Module) -> int:
    """Return the input size of a projection."""
    size = getattr(module, "in_features", None) or getattr(module, "nx", None)
    return int(size) if size else module.get_parameter("weight").shape[0]


def out_features(module: nn.Module) -> int:
    """Return the output size of a projection."""
    size = getattr(module, "out_features", None) or getattr(module, "nf", None)
    return int(size) if size else module.get_parameter("weight").shape[-1]
