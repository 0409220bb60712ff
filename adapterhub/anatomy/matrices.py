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
        bias: the path of the bias of its outputs; there may be none.
        start: the first row that belongs to the matrix, where others are packed with it.
        rows: how many do; None for all.
        transposed: whether the parameter is stored as (d_in, d_out).
    """

    weight: str = "weight"
    bias: str = "bias"
    start: int = 0
    rows: int | None = None
    transposed: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        """Return the matrix, (d_out, d_in), as a view of the parameter."""
        return parameter.T if self.transposed else self.bias_of(parameter).flatten(1)

    def bias_of(self, bias: Tensor) -> Tensor:
        """Return the bias of the outputs of the matrix, (d_out,)."""
        return bias[self._own(bias)]

    def _own(self, parameter: Tensor) -> slice:
        """Return which rows of a weight or a bias belong to the matrix."""
        if self.rows is None or len(parameter) == self.rows:
            return slice(None)
        return slice(self.start, self.start + self.rows)

    def within(self, parameter: Tensor, changed: Tensor) -> Tensor:
        """Return a parameter, or a bias, with other rows in the place of those of the matrix."""
        if self.transposed:
            return changed.T
        rows = changed.reshape(len(changed), *parameter.shape[1:]).to(parameter.dtype)
        own = self._own(parameter)
        if own.stop is None:
            return rows
        return torch.slice_scatter(parameter, rows, 0, own.start, own.stop)

    def sizes(self, host: nn.Module) -> tuple[int, int]:
        """Return the input and the output size."""
        rows, columns = self.of(host.get_parameter(self.weight)).shape
        return columns, rows


def matrices_in(module: nn.Module) -> dict[str, WeightMatrix]:
    """Map the roles of the matrices of a module to them; "" is the role of the only one.

    Returns:
        {} for a projection, for a weight that is computed of other parameters (a weight norm), and
        for any other module.
    """
    if isinstance(module, nn.MultiheadAttention):
        return _of_attention(module)
    if not isinstance(module._parameters.get("weight"), nn.Parameter):  # made of others
        return {}
    if isinstance(module, CONVOLUTIONS):
        return {"": WeightMatrix()}
    return {"": WeightMatrix(transposed=True)} if is_table(module) else {}


def is_table(module: nn.Module) -> bool:
    """Return whether a module looks up rows of its weight, perhaps with a factor on them.

    transformers' scaled embeddings keep that as `embed_scale`. An embedding with another forward,
    as of positions that it counts itself, or one that changes its rows (`max_norm`), is none.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    if len(module._parameters) > 1:  # a row of its own for some token
        return False
    return type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")


def _of_attention(attention: nn.MultiheadAttention) -> dict[str, WeightMatrix]:
    """Return the matrices of torch's attention, whose forward reads all parameters itself."""
    size = attention.embed_dim
    found: dict[str, WeightMatrix] = {}
    for number, role in enumerate("qkv"):
        own = f"{role}_proj_weight"  # where keys or values have another size; biases are packed
        apart = getattr(attention, own, None) is not None
        weight = own if apart else "in_proj_weight"
        found[role] = WeightMatrix(weight, "in_proj_bias", number * size, size)
    if attention.in_proj_weight is not None:
        found["qkv"] = WeightMatrix("in_proj_weight", "in_proj_bias")
    found["o"] = WeightMatrix("out_proj.weight", "out_proj.bias")
    return found
