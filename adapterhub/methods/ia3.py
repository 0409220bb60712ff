"""IA3: learned vectors rescale keys, values and the hidden layer of the feed-forward network.

    attention(Q, l_k * K, l_v * V)        ffn(x) = W_down (l_ff * f(W_up x))         (section 3.3)

    l_k, l_v: (d_kv,)    l_ff: (d_ff,)    all initialized as ones: at first, nothing changes

Keys and values are rescaled at the output of their projections, the hidden layer at the input of
`ffn.down`.

Weights of routed experts (`ffn.experts.down`) get a vector for each expert, or with `experts:
shared` one for all experts of a layer. The vector at the output of `ffn.experts.gate_up` rescales
the product, before a bias is added.

Parameters: the sizes of the vectors, by default 2 d_kv + d_ff per layer.

Liu et al. 2022, "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context
Learning", section 3.3, https://arxiv.org/abs/2205.05638.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site, matches
from adapterhub.config.options import option
from adapterhub.methods.common.base import Layers, Method, Placement, register_method
from adapterhub.methods.common.experts import (
    PER_EXPERT,
    ExpertsInputScale,
    ExpertsOutputScale,
    PerExpert,
    matrices_of,
    refuse_unused,
)
from adapterhub.methods.common.ops import AffineLayer, RowStack
from adapterhub.methods.common.projections import select_sites
from adapterhub.methods.common.site_module import InputModule, OutputModule, SiteModule


def _stack_scales(modules: Sequence[SiteModule | None]) -> RowStack:
    """Stack vectors: (modules, 1, size), with ones for no module."""
    some: Any = next(module for module in modules if module is not None)
    ones = torch.ones_like(some.scale)
    scales = [m.scale if isinstance(m, OutputScale | InputScale) else ones for m in modules]
    return RowStack((torch.stack(scales)[:, None],), _rescale)


def _rescale(*tensors: Tensor) -> Tensor:
    """Rescale the last of the inputs: (x, y, l) -> l * y, or (x, l) -> l * x."""
    *_, scaled, scale = tensors
    return scaled * scale


class OutputScale(OutputModule):
    """The map (x, y) -> l * y."""

    affine = True
    stack = staticmethod(_stack_scales)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Rescale the output. y: (..., size) -> y' like y."""
        return y * self.scale.to(y.dtype)

    def constant(self, site: Site) -> AffineLayer:
        """Return the form that is stacked with other affine modules."""
        down, up = self.scale.new_zeros(0, site.d_in), self.scale.new_zeros(0, len(self.scale))
        return AffineLayer(down, up, self.scale - 1)


class InputScale(InputModule):
    """The map x -> l * x."""

    affine = True
    stack = staticmethod(_stack_scales)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Rescale the input. x: (..., size) -> x' like x."""
        return x * self.scale.to(x.dtype)


@register_method
@dataclass(frozen=True)
class IA3(Method):
    """Learned vectors that rescale activations."""

    name = "ia3"
    paper = "Liu et al. 2022, https://arxiv.org/abs/2205.05638"
    summary = "learned vectors that rescale keys, values and the feed-forward hidden layer"
    learning_rate = 5e-3

    sites: tuple[str, ...] = option(
        ("attn.k", "attn.v", "cross.k", "cross.v", "ffn.down"),
        "projections to rescale: at their output, unless listed in inputs",
    )
    inputs: tuple[str, ...] = option(
        ("ffn.down",), "projections to rescale at their input; ffn.down: those of experts too"
    )
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")
    experts: PerExpert = option("each", PER_EXPERT, omitted=True)

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one vector per selected projection.

        Raises:
            SiteError: a site that is not a projection.
        """
        for site in self._sites(anatomy):
            yield Placement(site, self._scale(site))

    def _scale(self, site: Site) -> SiteModule:
        size = self._size(site)
        if site.held and site.held.experts:
            experts = matrices_of(site, self.experts)
            of_experts = ExpertsInputScale if self._at_input(site) else ExpertsOutputScale
            return of_experts(experts, size)
        return InputScale(size) if self._at_input(site) else OutputScale(size)

    def count(self, anatomy: Anatomy) -> int:
        """Sum d_out over the sites, d_in for those in `inputs`, and over the experts of each."""
        sites = self._sites(anatomy)
        return sum(self._size(site) * matrices_of(site, self.experts) for site in sites)

    def _sites(self, anatomy: Anatomy) -> tuple[Site, ...]:
        sites = select_sites(self, anatomy, "linear", "weight")
        refuse_unused(self.name, self.experts, sites)
        return sites

    def _at_input(self, site: Site) -> bool:
        id, role = (name.replace(".experts.", ".") for name in (site.id, site.role))
        dense = dataclasses.replace(site, id=id, role=role)
        return any(matches(pattern, s) for pattern in self.inputs for s in (site, dense))

    def _size(self, site: Site) -> int:
        return site.d_in if self._at_input(site) else site.d_out
