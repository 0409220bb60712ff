"""Bottleneck adapters: a two-layer network with a narrow middle at a sublayer.

    y' = y + s up(f(down(source)))

    sequential:  source = y (output) or norm(r + y) (block)
    parallel:    source = x (input) or r (residual)

    x, y: (batch, tokens, d), input and output of the sublayer before its residual connection
    r: the residual stream that y is added to, norm: the one behind the sum, on post-norm backbones
    down: d -> size, up: size -> d, both with bias, f: activation, s: scale

He et al. 2022, "Towards a Unified View of Parameter-Efficient Transfer Learning", section 3.3 and
table 1, https://arxiv.org/abs/2110.04366, names the axes: functional form, insertion form, modified
representation and
composition. On these axes the four adapters are four rows (parameters a site: 2 d size + size + d):

    name             place      source   scale  start                 paper
    houlsby          attn, ffn  output   1      N(0, 0.01²) cut 2 sd  Houlsby et al. 2019, 2.1
    pfeiffer         ffn        output   1      N(0, 0.01²) cut 2 sd  Pfeiffer et al. 2021
    parallel         ffn        input    1      up is zero            He et al. 2022
    scaled-parallel  ffn        input    4      up is zero            He et al. 2022, 4.6

The library `adapters` (AdapterHub) has the same rows, but its pfeiffer has the source `block`, and
its parallel adapters have the source `residual`: on a post-norm backbone that is the input, on a
pre-norm one the input before its norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import STREAM, Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods._base import Layers, Method, Placement, register_method
from adapterhub.methods._ops import add_product, cast
from adapterhub.methods._options import activation as activation_of
from adapterhub.methods._site_module import OutputModule, OutputSource
from adapterhub.methods._sites import require_stream, select_sites, sizes_by_site

Sequential = Literal["output", "block"]
Beside = Literal["input", "residual"]


class Bottleneck(OutputModule):
    """The map (x, y) -> y + s up(f(down(source))): the source is y (`output`), or else x, in the
    place of which the slot gives what the network `reads`."""

    def __init__(
        self, d_in: int, d_out: int, size: int, activation: str, source: OutputSource, scale: float
    ) -> None:
        super().__init__()
        self.source = source
        self.sequential = source in ("output", "block")
        self.down = nn.Linear(d_in if source == "input" else d_out, size)
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
        source = y if self.source == "output" else x
        down, up = self.down, self.up
        middle = self.activation(
            F.linear(source, cast(down.weight, source), cast(down.bias, source))
        )
        biased = y + (self.scale * up.bias).to(y.dtype)
        return add_product(biased, middle, up.weight, self.scale)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"source={self.source}, scale={self.scale:g}"


@dataclass(frozen=True)
class BottleneckMethod(Method):
    """What the four rows share: the form of the network."""

    size: int = option(64, "width of the bottleneck")
    sizes: dict[str, int] = option({}, "widths that differ, by site: {encoder.ffn: 32}")
    activation: str = option("relu", "activation, by its transformers name")
    scale: float = option(1.0, "factor s of the network's output")
    source: OutputSource = option("output", "what the network reads")
    sites: tuple[str, ...] = option(("ffn",), "sublayers to adapt")
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """One network a chosen sublayer.

        Raises:
            SiteError: a site whose residual stream is not known, where the source is of it.
        """
        for site, size in self._sized(anatomy):
            network = Bottleneck(
                site.d_in, site.d_out, size, self.activation, self.source, self.scale
            )
            yield Placement(site, network)

    def count(self, anatomy: Anatomy) -> int:
        """size (d_source + 1) + d_out (size + 1), summed over the sites."""
        return sum(
            size * ((s.d_in if self.source == "input" else s.d_out) + 1) + s.d_out * (size + 1)
            for s, size in self._sized(anatomy)
        )

    def _sized(self, anatomy: Anatomy) -> list[tuple[Site, int]]:
        sites = select_sites(self, anatomy)
        if self.source in STREAM:
            require_stream(self, self.source, sites)
        return sizes_by_site("size", sites, self.size, self.sizes)


@dataclass(frozen=True)
class SequentialMethod(BottleneckMethod):
    """Adapters behind a sublayer."""

    source: Sequential = option("output", "what the network reads: y (output), norm(r + y) (block)")


@dataclass(frozen=True)
class ParallelMethod(BottleneckMethod):
    """Adapters beside a sublayer."""

    source: Beside = option("input", "what the network reads: x (input), r (residual)")


@register_method
@dataclass(frozen=True)
class Houlsby(SequentialMethod):
    """Sequential adapters after every sublayer."""

    name = "houlsby"
    paper = "Houlsby et al. 2019, https://arxiv.org/abs/1902.00751"
    summary = "sequential bottleneck adapters after attention and feed-forward"
    start = "near-identity"

    activation: str = option("gelu", "activation, by its transformers name")
    sites: tuple[str, ...] = option(("attn", "cross", "ffn"), "sublayers to adapt")


@register_method
@dataclass(frozen=True)
class Pfeiffer(SequentialMethod):
    """Sequential adapters after the feed-forward sublayer."""

    name = "pfeiffer"
    paper = "Pfeiffer et al. 2021, https://arxiv.org/abs/2005.00247"
    summary = "sequential bottleneck adapters after feed-forward"
    start = "near-identity"


@register_method
@dataclass(frozen=True)
class Parallel(ParallelMethod):
    """Adapters beside the feed-forward sublayer."""

    name = "parallel"
    paper = "He et al. 2022, https://arxiv.org/abs/2110.04366"
    summary = "bottleneck adapters beside feed-forward"


@register_method
@dataclass(frozen=True)
class ScaledParallel(ParallelMethod):
    """Scaled adapters beside the feed-forward sublayer."""

    name = "scaled-parallel"
    paper = "He et al. 2022, https://arxiv.org/abs/2110.04366"
    summary = "scaled bottleneck adapters beside feed-forward"
    learning_rate = 3e-4

    scale: float = option(4.0, "factor s of the network's output")
