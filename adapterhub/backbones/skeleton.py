"""A skeleton of a module: the same modules with parameters of the same sizes, without values.

What a method would add is planned on it, without reading a weight: so it costs as little for a
model of any size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adapterhub.anatomy.own_modules import CHILD
from adapterhub.anatomy.projections import in_features, is_projection, out_features


def skeleton(module: nn.Module) -> Any:
    """Return a copy of a module on the meta device, which shares all but tensors with it.

    Projections with quantized weights are plain ones there. Adapters are left out.
    """
    return _copied(module, {})


def _copied(module: nn.Module, known: dict[int, Any]) -> Any:
    """Copy a module, and those below it; `known` has what was copied, by the original's id."""
    if (found := known.get(id(module))) is not None:
        return found
    if is_projection(module) and not _has_matrix(module):
        bias = getattr(module, "bias", None) is not None
        plain = nn.Linear(in_features(module), out_features(module), bias, device="meta")
        return known.setdefault(id(module), plain)
    copied: Any = object.__new__(type(module))
    known[id(module)] = copied
    vars(copied).update(vars(module))
    for tensors in ("_parameters", "_buffers"):
        own = vars(module)[tensors].items()
        vars(copied)[tensors] = {name: _empty(tensor, known) for name, tensor in own}
    children = module._modules.items()
    vars(copied)["_modules"] = {
        name: None if child is None else _copied(child, known)
        for name, child in children
        if name != CHILD
    }
    return copied


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a projection's weight is a matrix of numbers, and not of codes."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 2 and weight.is_floating_point()


def _empty(tensor: torch.Tensor | None, known: dict[int, Any]) -> Any:
    """Return a tensor of the same size, dtype and kind; the same one wherever it is used."""
    if tensor is None or id(tensor) in known:
        return None if tensor is None else known[id(tensor)]
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=False)
    return known.setdefault(id(tensor), empty)
