"""What a projection computes with the site modules that sit at it, as a weight and a bias.

A site module whose y' is affine in the host's input x and output y turns y = W x + b into another
such map, so that its host can do without it:

    y' = f(x, W x + b) = W' x + b'       W'ᵀ = f(I, Wᵀ) - f(0, 0)       b' = f(0, b)
    x' = G x                             W' = W G

f is not written a second time: the slot of the host is evaluated on the unit vectors, with all that
is active there in its order. The input changes before all else, so G is the last factor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adapterhub.backbones.weights import read_bias, read_weight
from adapterhub.errors import MergeError
from adapterhub.hooks.projection import OutputSlot

CHUNK = 2048  # unit vectors at a time


def merged_weight_and_bias(host: nn.Module, slot: OutputSlot) -> tuple[Tensor, Tensor | None]:
    """W': (d_out, d_in) and b': (d_out,) of a projection that computes alone what it computes now
    with its slot, in fp32; b' is None if the bias stays as it is.

    Raises:
        MergeError: it would need a bias, and has none.
    """
    with torch.no_grad(), torch.autocast(next(host.parameters()).device.type, enabled=False):
        weight, bias = read_weight(host), read_bias(host)
        d_out, d_in = weight.shape
        nothing = weight.new_zeros(1, d_in)
        start = weight.new_zeros(1, d_out) if bias is None else bias.float()[None]
        offset = slot(host, nothing, torch.zeros_like(start))
        pieces = []
        for first in range(0, d_in, CHUNK):
            rows = weight.T[first : first + CHUNK]
            units = torch.zeros(len(rows), d_in, device=rows.device)
            units.diagonal(first).fill_(1)
            pieces.append(slot(host, units, rows) - offset)
        end = slot(host, nothing, start)
        changed = not torch.equal(end, start)
        if changed and bias is None:
            raise MergeError(
                "the adapter adds a bias to a projection that has none",
                offenders=[site.id for site in slot.sites.values()],
                hint="keep the adapter on the model",
            )
        return _behind_input(slot, torch.cat(pieces).T), end[0] if changed else None


def _behind_input(slot: OutputSlot, weight: Tensor) -> Tensor:
    """W: (d_out, d_in) -> W G, for the change G of the input that the slot makes: the vector-
    Jacobian products of x' = G x with the rows of W."""
    if not slot.takes_input:
        return weight
    with torch.enable_grad():
        x = torch.zeros_like(weight, requires_grad=True)
        return torch.autograd.grad(slot.enter(x), x, weight)[0]
