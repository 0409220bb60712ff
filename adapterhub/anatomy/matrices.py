"""Matrices in the parameters of modules that are no projections: kernels, tables, packed weights.

    Conv1d, Conv2d, Conv3d   (d_out, d_in / groups, k, ...)   as (d_out, d_in / groups * k * ...)
    Embedding                (numbers, d)                     as (d, numbers)
    MultiheadAttention       (3 d, d)                         as three of (d, d)

A convolution is a projection of patches of its input: so what changes a matrix changes a kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class WeightMatrix(NamedTuple):
    """A matrix in a parameter of a module.

    Attributes:
        weight: the path of the parameter in the module.
        bias: the path of the bias of its outputs, which may be None; None if it can have none.
        start: the first row that belongs to the matrix.
        rows: how many do; None for all.
        transposed: whether the parameter is stored as (d_in, d_out).
    """

    weight: str = "weight"
    bias: str | None = None
    start: int = 0
    rows: int | None = None
    transposed: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        """Return the matrix, (d_out, d_in), as a view of the parameter."""
        if self.transposed:
            return parameter.T
        rows = len(parameter) if self.rows is None else self.rows
        return parameter[self.start : self.start + rows].flatten(1)

    def bias_of(self, bias: Tensor) -> Tensor:
        """Return the bias of the outputs of the matrix, (d_out,)."""
        rows = len(bias) if self.rows is None else self.rows
        return bias[self.start : self.start + rows]

    def within(self, parameter: Tensor, changed: Tensor) -> Tensor:
        """Return a parameter, or a bias, with other rows in the place of those of the matrix."""
        if self.transposed:
            return changed.T
        rows = changed.reshape(len(changed), *parameter.shape[1:]).to(parameter.dtype)
        if self.rows is None:
            return rows
        end = self.start + self.rows
        return torch.cat([parameter[: self.start], rows, parameter[end:]])

    def sizes(self, host: nn.Module) -> tuple[int, int]:
        """Return the input and the output size."""
        rows, columns = self.of(host.get_parameter(self.weight)).shape
        return columns, rows


def only_shifts(host: nn.Module) -> bool:
    """Return whether a convolution has one group, no dilation, and pads with zeros.

    peft's update of another one mixes groups, is not dilated, and pads with zeros.
    """
    assert isinstance(host, CONVOLUTIONS)
    plain = host.groups == 1 and host.padding_mode == "zeros"
    return plain and all(step == 1 for step in host.dilation)


def as_factor(host: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of an update of a kernel, which peft stores as a kernel, as of a matrix.

    `name` is A: (rank, d_in, k, ...), B: (d_out, rank, 1, ...) or a magnitude: (1, d_out, 1, ...).
    """
    if not isinstance(host, CONVOLUTIONS) or tensor.ndim < 2:
        return tensor
    return tensor.flatten(1) if name in ("A", "B") else tensor.flatten()


def as_kernel(host: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of an update of a matrix as peft stores that of a kernel."""
    if not isinstance(host, CONVOLUTIONS):
        return tensor
    kernel: tuple[int, ...] = tuple(host.kernel_size)
    ones = (1,) * len(kernel)
    if name == "A":
        return tensor.view(len(tensor), -1, *kernel)
    return tensor.view(*tensor.shape, *ones) if name == "B" else tensor.view(1, -1, *ones)


def matrices_in(module: nn.Module) -> dict[str, WeightMatrix]:
    """Map the roles of the matrices of a module to them; "" is the role of the only one.

    Returns:
        {} for a projection, and for any other module.
    """
    if isinstance(module, CONVOLUTIONS):
        return {"": WeightMatrix(bias="bias")}
    if isinstance(module, nn.Embedding):
        return {"": WeightMatrix(transposed=True)}
    return _of_attention(module) if isinstance(module, nn.MultiheadAttention) else {}


def _of_attention(attention: nn.MultiheadAttention) -> dict[str, WeightMatrix]:
    """Return the matrices of torch's attention, whose forward reads all parameters itself."""
    size = attention.embed_dim
    found: dict[str, WeightMatrix] = {}
    for number, role in enumerate("qkv"):
        own = f"{role}_proj_weight"
        packed = getattr(attention, own, None) is None
        if packed:
            found[role] = WeightMatrix("in_proj_weight", "in_proj_bias", number * size, size)
            found["qkv"] = WeightMatrix("in_proj_weight", "in_proj_bias")
        else:  # keys or values of another size; their bias is still packed
            found[role] = WeightMatrix(own)
    found["o"] = WeightMatrix("out_proj.weight", "out_proj.bias")
    return found
