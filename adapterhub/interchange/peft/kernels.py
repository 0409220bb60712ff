"""Conversion of peft's updates of convolutions to and from updates of a matrix.

Its factors are convolutions: A has the size of the kernel, and B has size one. With groups,
dilation or non-zero padding, this is not a change of the kernel.
"""

from __future__ import annotations

from torch import Tensor, nn

from adapterhub.anatomy.projections import CONVOLUTIONS

OTHER_KERNEL = (
    "peft's update of a convolution that groups, dilates or pads with other than zeros is no "
    "change of its weight"
)


def only_shifts(host: nn.Module) -> bool:
    """Return whether a convolution has one group, no dilation, and pads with zeros."""
    assert isinstance(host, CONVOLUTIONS)
    plain = host.groups == 1 and host.padding_mode == "zeros"
    return plain and all(step == 1 for step in host.dilation)


def as_factor(host: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Convert a tensor of a kernel's update, stored by peft as a kernel, to a matrix.

    `name` is A: (rank, d_in, k, ...), B: (d_out, rank, 1, ...) or a magnitude: (1, d_out, 1, ...).
    """
    if not isinstance(host, CONVOLUTIONS) or tensor.ndim < 2:
        return tensor
    return tensor.flatten(1) if name in ("A", "B") else tensor.flatten()


def as_kernel(host: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Convert a tensor of a matrix update to the form of peft's kernel updates."""
    if not isinstance(host, CONVOLUTIONS):
        return tensor
    kernel: tuple[int, ...] = tuple(host.kernel_size)
    ones = (1,) * len(kernel)
    if name == "A":
        return tensor.view(len(tensor), -1, *kernel)
    return tensor.view(*tensor.shape, *ones) if name == "B" else tensor.view(1, -1, *ones)
