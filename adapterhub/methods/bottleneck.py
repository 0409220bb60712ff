"""Bottleneck adapters: a two-layer network with a narrow hidden layer at a sublayer.

    y' = y + s up(f(down(source)))

    sequential:  source = y (output) or norm(r + y) (block)
    parallel:    source = x (input) or r (residual)

    x, y: (batch, tokens, d), input and output of the sublayer before its residual connection
    r: the residual stream that y is added to    norm: the norm after the sum (post-norm backbones)
    down: d -> size, up: size -> d, both with bias, f: activation, s: scale

He et al. 2022 describe adapters by functional form, insertion form, modified representation and
composition. In these terms the four adapters are four rows:

    name             sites      source   scale  start                 paper
    houlsby          attn, ffn  output   1      N(0, 0.01²) cut 2 sd  Houlsby et al. 2019, 2.1
    pfeiffer         ffn        output   1      N(0, 0.01²) cut 2 sd  Pfeiffer et al. 2021
    parallel         ffn        input    1      up is zero            He et al. 2022
    scaled-parallel  ffn        input    4      up is zero            He et al. 2022, 4.6

In the library `adapters` (AdapterHub), pfeiffer has the source `block`, and the parallel adapters
have the source `residual`: on a post-norm backbone this is the input, on a pre-norm backbone the
input before its norm.

Parameters: 2 d size + size + d per site.

Houlsby et al. 2019, section 2.1, https://arxiv.org/abs/1902.00751; Pfeiffer et al. 2021,
https://arxiv.org/abs/2005.00247; He et al. 2022, "Towards a Unified View of Parameter-Efficient
Transfer Learning", sections 3.3 and 4.6 and table 1, https://arxiv.org/abs/2110.04366.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import STREAM, Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import (
    Layers,
    Method,
    Placement,
    activation_module,
    register_method,
)
from adapterhub.methods.common.ops import RowStack, add_product, cast, padded
from adapterhub.methods.common.projections import require_stream, select_sites, sizes_by_site
from adapterhub.methods.common.site_module import (
    OutputModule,
    OutputSource,
    SiteModule,
    init_is_skipped,
)

SequentialSource = Literal["output", "block"]
ParallelSource = Literal["input", "residual"]


def stack_networks(modules: Sequence[SiteModule | None]) -> RowStack | None:
    """Stack networks of one source and one activation without state; narrower ones are padded."""
    networks: list[Bottleneck] = [m for m in modules if isinstance(m, Bottleneck)]
    some = networks[0]
    if len({_settings(network) for network in networks}) > 1 or any(some.activation.parameters()):
        return None
    width, d_out = some.down.in_features, some.up.out_features
    empty = [some.up.bias.new_zeros(n) for n in ((0, width), 0, (0, d_out), d_out)]
    tensors = [m.scaled() if isinstance(m, Bottleneck) else empty for m in modules]
    stacked = tuple(padded([each[n] for each in tensors]) for n in range(4))
    return RowStack(stacked, partial(_run_networks, some.activation, some.source))


def _settings(network: Bottleneck) -> tuple[object, ...]:
    """Return the settings shared by all networks of a stack."""
    plain = {k: str(v) for k, v in vars(network.activation).items() if not k.startswith("_")}
    return network.source, type(network.activation), *sorted(plain.items())


def _run_networks(
    activation: nn.Module, source: OutputSource, x: Tensor, y: Tensor, *tensors: Tensor
) -> Tensor:
    """Compute y + s up(f(down(source))), like y, with tensors of `Bottleneck.scaled`, stacked.

    x: (networks, tokens, d_in), y: (networks, tokens, d_out). The input of the network is y with
    the source `output`, otherwise x.
    """
    down, down_bias, up, up_bias = tensors
    read = y if source == "output" else x
    hidden = activation(torch.baddbmm(down_bias[:, None], read, down.transpose(1, 2)))
    return torch.baddbmm(y + up_bias[:, None], hidden.to(y.dtype), up)


class Bottleneck(OutputModule):
    """The map (x, y) -> y + s up(f(down(source))).

    The source is y (`output`) or x; the hook passes the states of `OutputModule.source` as x.
    """

    stack = staticmethod(stack_networks)

    def __init__(
        self, d_in: int, d_out: int, size: int, activation: str, source: OutputSource, scale: float
    ) -> None:
        super().__init__()
        self.source = source
        self.sequential = source in ("output", "block")
        self.down = nn.Linear(d_in if source == "input" else d_out, size)
        self.activation = activation_module(activation)
        self.up = nn.Linear(size, d_out)
        self.scale = scale
        self._init_near_identity() if self.sequential else self._init_identity()

    def _init_near_identity(self) -> None:
        if init_is_skipped():
            return
        for linear in (self.down, self.up):
            nn.init.trunc_normal_(linear.weight, std=1e-2, a=-2e-2, b=2e-2)
            nn.init.zeros_(linear.bias)

    def _init_identity(self) -> None:
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        source = y if self.source == "output" else x
        down, (weight, bias) = self.down, self.up_parameters()
        hidden = self.activation(
            F.linear(source, cast(down.weight, source), cast(down.bias, source))
        )
        biased = y + (self.scale * bias).to(y.dtype)
        return add_product(biased, hidden, weight, self.scale)

    def up_parameters(self) -> tuple[Tensor, Tensor]:
        """Return the weight and bias of up: (d, size) and (d,)."""
        return self.up.weight, self.up.bias

    def scaled(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the weights and biases of down, and of up times s: (size, d) and (d,) each."""
        down, (weight, bias) = self.down, self.up_parameters()
        return down.weight, down.bias, self.scale * weight.T, self.scale * bias

    def extra_repr(self) -> str:
        """Return the settings that `print(model)` shows."""
        return f"source={self.source}, scale={self.scale:g}"


@dataclass(frozen=True)
class BottleneckMethod(Method):
    """The base class of the four methods: the network."""

    sized_by = "size"

    size: int = option(64, "bottleneck width")
    sizes: dict[str, int] = option({}, "other widths for some sites: {encoder.ffn: 32}")
    activation: str = option("relu", "activation function, by its transformers name")
    scale: float = option(1.0, "factor s of the network's output")
    source: OutputSource = option("output", "input of the network")
    sites: tuple[str, ...] = option(("ffn",), "sublayers to adapt")
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one network per selected sublayer.

        Raises:
            SiteError: the source is in the residual stream, whose position at a site is unknown.
        """
        for site, size in self.sizes_of(anatomy).items():
            network = Bottleneck(
                site.d_in, site.d_out, size, self.activation, self.source, self.scale
            )
            yield Placement(site, network)

    def count(self, anatomy: Anatomy) -> int:
        """Sum size (d_source + 1) + d_out (size + 1) over the sites."""
        return sum(
            size * ((s.d_in if self.source == "input" else s.d_out) + 1) + s.d_out * (size + 1)
            for s, size in self.sizes_of(anatomy).items()
        )

    def sizes_of(self, anatomy: Anatomy) -> dict[Site, int]:
        """Return the bottleneck width of each selected sublayer."""
        sites = select_sites(self, anatomy)
        if self.source in STREAM:
            require_stream(self, self.source, sites)
        return sizes_by_site("size", sites, self.size, self.sizes)


@dataclass(frozen=True)
class SequentialMethod(BottleneckMethod):
    """Adapters after a sublayer."""

    source: SequentialSource = option(
        "output", "input of the network: y (output) or norm(r + y) (block)"
    )


@dataclass(frozen=True)
class ParallelMethod(BottleneckMethod):
    """Adapters parallel to a sublayer."""

    source: ParallelSource = option("input", "input of the network: x (input) or r (residual)")


@register_method
@dataclass(frozen=True)
class Houlsby(SequentialMethod):
    """Sequential adapters after every sublayer."""

    name = "houlsby"
    paper = "Houlsby et al. 2019, https://arxiv.org/abs/1902.00751"
    summary = "sequential bottleneck adapters after attention and feed-forward"
    start = "near-identity"

    activation: str = option("gelu", "activation function, by its transformers name")
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
    """Adapters parallel to the feed-forward sublayer."""

    name = "parallel"
    paper = "He et al. 2022, https://arxiv.org/abs/2110.04366"
    summary = "bottleneck adapters parallel to feed-forward"


@register_method
@dataclass(frozen=True)
class ScaledParallel(ParallelMethod):
    """Scaled adapters parallel to the feed-forward sublayer."""

    name = "scaled-parallel"
    paper = "He et al. 2022, https://arxiv.org/abs/2110.04366"
    summary = "scaled bottleneck adapters parallel to feed-forward"
    learning_rate = 3e-4

    scale: float = option(4.0, "factor s of the network's output")
