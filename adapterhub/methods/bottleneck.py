"""Bottleneck adapters: a two-layer network with a narrow middle at a sublayer.

    sequential:  y' = y + s up(f(down(y)))          parallel:  y' = y + s up(f(down(x)))

    x, y: (batch, tokens, d), input and output of the sublayer before its residual connection
    down: d -> size, up: size -> d, both with bias, f: activation, s: scale

He et al. 2022, "Towards a Unified View of Parameter-Efficient Transfer Learning", section 3.3 and
table 1, https://arxiv.org/abs/2110.04366, names the axes: functional form, insertion form, modified
representation and
composition. On these axes the four adapters are four rows (parameters a site: 2 d size + size + d):

    name             place      insertion    scale  start                 source
    houlsby          attn, ffn  sequential   1      N(0, 0.01²) cut 2 sd  Houlsby et al. 2019, 2.1
    pfeiffer         ffn        sequential   1      N(0, 0.01²) cut 2 sd  Pfeiffer et al. 2021
    parallel         ffn        parallel     1      up is zero            He et al. 2022
    scaled-parallel  ffn        parallel     4      up is zero            He et al. 2022, 4.6
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.backbones.anatomy import Anatomy, Site
from adapterhub.config import option
from adapterhub.methods.base import (
    Layers,
    Method,
    Placement,
    add_product,
    cast,
    register,
    select,
    sized,
)
from adapterhub.methods.base import activation as activation_of

Insertion = Literal["sequential", "parallel"]


class Bottleneck(nn.Module):
    """The map (x, y) -> y + s up(f(down(source))), where the source is y (sequential) or x
    (parallel)."""

    def __init__(
        self, d_in: int, d_out: int, size: int, activation: str, insertion: Insertion, scale: float
    ) -> None:
        super().__init__()
        self.sequential = insertion == "sequential"
        self.down = nn.Linear(d_out if self.sequential else d_in, size)
        self.activation = activation_of(activation)
        self.up = nn.Linear(size, d_out)
        self.scale = scale
        self._init_near_identity() if self.sequential else self._init_identity()

    def _init_near_identity(self) -> None:
        for linear in (self.down, self.up):
            nn.init.trunc_normal_(linear.weight, std=1e-2, a=-2e-2, b=2e-2)
            nn.init.zeros_(linear.bias)

    def _init_identity(self) -> None:
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (..., d_in), y: (..., d_out) -> y' like y."""
        source = y if self.sequential else x
        down, up = self.down, self.up
        middle = self.activation(
            F.linear(source, cast(down.weight, source), cast(down.bias, source))
        )
        biased = y + (self.scale * up.bias).to(y.dtype)
        return add_product(biased, middle, up.weight, self.scale)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{'sequential' if self.sequential else 'parallel'}, scale={self.scale:g}"


@dataclass(frozen=True)
class BottleneckMethod(Method):
    """What the four rows share: the form of the network."""

    insertion: ClassVar[Insertion]

    size: int = option(64, "width of the bottleneck")
    sizes: dict[str, int] = option({}, "widths that differ, by site: {encoder.ffn: 32}")
    activation: str = option("relu", "activation, by its transformers name")
    scale: float = option(1.0, "factor s of the network's output")
    sites: tuple[str, ...] = option(("ffn",), "sublayers to adapt")
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """One network a chosen sublayer."""
        for site, size in self._sized(anatomy):
            network = Bottleneck(
                site.d_in, site.d_out, size, self.activation, self.insertion, self.scale
            )
            yield Placement(site, network)

    def count(self, anatomy: Anatomy) -> int:
        """size (d_source + 1) + d_out (size + 1), summed over the sites."""
        sequential = self.insertion == "sequential"
        return sum(
            size * ((s.d_out if sequential else s.d_in) + 1) + s.d_out * (size + 1)
            for s, size in self._sized(anatomy)
        )

    def _sized(self, anatomy: Anatomy) -> list[tuple[Site, int]]:
        return sized("size", select(self, anatomy), self.size, self.sizes)


@register
@dataclass(frozen=True)
class Houlsby(BottleneckMethod):
    """Sequential adapters after every sublayer."""

    name = "houlsby"
    paper = "Houlsby et al. 2019, https://arxiv.org/abs/1902.00751"
    summary = "sequential bottleneck adapters after attention and feed-forward"
    start = "near-identity"
    insertion = "sequential"

    activation: str = option("gelu", "activation, by its transformers name")
    sites: tuple[str, ...] = option(("attn", "cross", "ffn"), "sublayers to adapt")


@register
@dataclass(frozen=True)
class Pfeiffer(BottleneckMethod):
    """Sequential adapters after the feed-forward sublayer."""

    name = "pfeiffer"
    paper = "Pfeiffer et al. 2021, https://arxiv.org/abs/2005.00247"
    summary = "sequential bottleneck adapters after feed-forward"
    start = "near-identity"
    insertion = "sequential"


@register
@dataclass(frozen=True)
class Parallel(BottleneckMethod):
    """Adapters beside the feed-forward sublayer."""

    name = "parallel"
    paper = "He et al. 2022, https://arxiv.org/abs/2110.04366"
    summary = "bottleneck adapters beside feed-forward"
    insertion = "parallel"


@register
@dataclass(frozen=True)
class ScaledParallel(BottleneckMethod):
    """Scaled adapters beside the feed-forward sublayer."""

    name = "scaled-parallel"
    paper = "He et al. 2022, https://arxiv.org/abs/2110.04366"
    summary = "scaled bottleneck adapters beside feed-forward"
    learning_rate = 3e-4
    insertion = "parallel"

    scale: float = option(4.0, "factor s of the network's output")
