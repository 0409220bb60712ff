"""The weight and bias of a projection that replace it together with its active site modules.

If a site module f is affine in the host's input x and output y = W x + b, then so is the result:

    y' = f(x, W x + b) = W' x + b'       W'ᵀ = f(I, Wᵀ) - f(0, 0)       b' = f(0, b)

Methods do not implement W' and b': they are computed by calling the host's slot, which applies all
active modules in order, as in a forward pass. Its x are the unit vectors, the rows of I; its y are
their products with W, the rows of Wᵀ. The outputs are the rows of W'ᵀ, plus the constant f(0, 0).
Modules that change the input come first, x' = G x, which gives W' G.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adapterhub.anatomy.backbone import parameter_at
from adapterhub.anatomy.sites import Site
from adapterhub.backbones.weights import as_stored, read_bias, read_weight
from adapterhub.errors import MergeError
from adapterhub.hooks.own_weight import HeldWeightSlot
from adapterhub.hooks.slot import OutputSlot
from adapterhub.hooks.weight_host import EmbeddingSlot, MatrixSlot, merged_matrices
from adapterhub.methods.common.expert_rows import OneExpert

CHUNK = 2048  # unit vectors per call of the slot


def merged_parameters(host: nn.Module, slot: nn.Module | None) -> dict[str, Tensor]:
    """Compute the parameters of a host merged with its slot, in fp32, by name.

    Raises:
        MergeError: the result needs a bias, but the projection lacks one.
    """
    if isinstance(slot, MatrixSlot | EmbeddingSlot):
        return _checked(host, slot, merged_matrices(host, slot))
    if isinstance(slot, HeldWeightSlot):
        return merged_held_weights(host, slot)
    assert isinstance(slot, OutputSlot)
    weight, bias = merged_weight_and_bias(host, slot)
    return {"weight": as_stored(host, weight)} | ({} if bias is None else {"bias": bias})


def _checked(
    host: nn.Module, slot: MatrixSlot | EmbeddingSlot, merged: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Leave out new biases that are zero, and refuse others.

    Raises:
        MergeError: the result needs a bias, but the host lacks one.
    """
    new = [name for name in merged if parameter_at(host, name) is None]
    if any(bool(merged[name].any()) for name in new):
        raise _needs_bias(slot)
    return {name: tensor for name, tensor in merged.items() if name not in new}


def _needs_bias(slot: OutputSlot | MatrixSlot | EmbeddingSlot) -> MergeError:
    return MergeError(
        "the adapter adds a bias to a projection that has none",
        offenders=[site.id for site in slot.sites.values()],
        hint="keep the adapter attached",
    )


def merged_names(site: Site) -> tuple[str, ...]:
    """Return the names of the parameters that a merge at a site may change."""
    if site.matrix is not None:
        return (site.matrix.weight, site.matrix.bias)
    if site.held is not None and site.held.experts is not None:
        return (site.held.parameter,)
    return ("weight", "bias")


def merged_held_weights(host: nn.Module, slot: HeldWeightSlot) -> dict[str, Tensor]:
    """Compute the weights of a host merged with the active modules, in fp32."""
    merged: dict[str, Tensor] = {}
    with torch.no_grad(), torch.autocast(next(host.parameters()).device.type, enabled=False):
        for name, weight in slot.weights(host, slot.keys).items():
            if weight.held.experts is not None:
                matrices = [weight[number].float().changed() for number in range(len(weight))]
                merged[name] = torch.stack(matrices)
                continue
            merged[name] = weight.float().changed()
            bias = read_bias(host)
            if bias is not None:
                zero_x = weight.tensor.new_zeros(1, weight.tensor.shape[1]).float()
                old = bias.float()[None]
                merged["bias"] = weight.apply(zero_x, lambda _, old=old: old, OneExpert(0))[0]  # type: ignore[misc]
    return merged


def merged_weight_and_bias(host: nn.Module, slot: OutputSlot) -> tuple[Tensor, Tensor | None]:
    """Compute the weight and bias of a projection merged with its slot, in fp32.

    Returns:
        W': (d_out, d_in) and b': (d_out,); b' is None if the bias does not change.

    Raises:
        MergeError: the result needs a bias, but the projection lacks one.
    """
    with torch.no_grad(), torch.autocast(next(host.parameters()).device.type, enabled=False):
        weight, bias = read_weight(host), read_bias(host)
        d_out, d_in = weight.shape
        zero_x = weight.new_zeros(1, d_in)
        old_bias = weight.new_zeros(1, d_out) if bias is None else bias.float()[None]
        constant = slot(host, zero_x, torch.zeros_like(old_bias))
        chunks = []
        for first in range(0, d_in, CHUNK):
            rows = weight.T[first : first + CHUNK]
            units = torch.zeros(len(rows), d_in, device=rows.device)
            units.diagonal(first).fill_(1)
            chunks.append(slot(host, units, rows) - constant)
        new_bias = slot(host, zero_x, old_bias)
        bias_changes = not torch.equal(new_bias, old_bias)
        if bias_changes and bias is None:
            raise _needs_bias(slot)
        merged = _with_input_change(slot, torch.cat(chunks).T)
        return merged, new_bias[0] if bias_changes else None


def _with_input_change(slot: OutputSlot, weight: Tensor) -> Tensor:
    """Compute W G, (d_out, d_in), for the slot's change of the input, x' = G x.

    These are the vector-Jacobian products of x' with the rows of W.
    """
    if not slot.takes_input:
        return weight
    with torch.enable_grad():
        x = torch.zeros_like(weight, requires_grad=True)
        return torch.autograd.grad(slot.enter(x), x, weight)[0]
