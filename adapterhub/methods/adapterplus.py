"""AdapterPlus: bottleneck adapters after the feed-forward network, with a scale for each feature.

    y' = y + s * up(f(down(r + y)))                                               (section 3)

    y: (..., d), the output of the feed-forward network    r: the residual stream it is added to
    down: d -> size, up: size -> d, both with bias, N(0, 0.01²) cut at 2 sd    f: gelu
    s: (d,), ones

r + y is the source `block`: on post-norm backbones norm(r + y), as for bottleneck adapters. The
paper has vision transformers, which are pre-norm, and sizes from 8 on. Adapter files contain a
plain bottleneck adapter (pfeiffer): s is folded into up.

Parameters: 2 d size + size + 2 d per site; d less in files.

Steitz & Roth 2024, "Adapters Strike Back", section 3, https://arxiv.org/abs/2406.06820.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy
from adapterhub.config.options import option
from adapterhub.methods.bottleneck import (
    Bottleneck,
    Pfeiffer,
    SequentialMethod,
    SequentialSource,
    stack_networks,
)
from adapterhub.methods.common.base import Placement, register_method


class ChannelScaledBottleneck(Bottleneck):
    """The map (x, y) -> y + s * up(f(down(source))), with s for each feature."""

    stack = staticmethod(stack_networks)

    def __init__(self, width: int, size: int, activation: str, source: SequentialSource) -> None:
        super().__init__(width, width, size, activation, source, 1.0)
        self.s = nn.Parameter(torch.ones(width))

    def up_parameters(self) -> tuple[Tensor, Tensor]:
        """Return the weight and bias of up, times s."""
        return self.s[:, None] * self.up.weight, self.s * self.up.bias

    def inference_form(self) -> Bottleneck:
        """Return the network with s in its weights."""
        size, width = self.down.weight.shape
        with torch.device("meta"):
            plain = Bottleneck(width, width, size, "relu", self.source, self.scale)
        plain.activation, plain.down = self.activation, self.down
        weight, bias = (each.detach() for each in self.up_parameters())
        plain.up.weight, plain.up.bias = nn.Parameter(weight), nn.Parameter(bias)
        return plain


@register_method
@dataclass(frozen=True)
class AdapterPlus(SequentialMethod):
    """Sequential adapters with a scale for each feature."""

    name = "adapterplus"
    paper = "Steitz & Roth 2024, https://arxiv.org/abs/2406.06820"
    summary = "bottleneck adapters after feed-forward with a scale for each feature"
    start = "near-identity"

    size: int = option(8, "bottleneck width")
    activation: str = option("gelu", "activation function, by its transformers name")
    source: SequentialSource = option(
        "block", "input of the network: y (output) or norm(r + y) (block)"
    )

    @classmethod
    def example(cls) -> AdapterPlus:
        """Return a configuration that does not read the residual stream."""
        return cls(source="output")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one network per selected sublayer.

        Raises:
            SiteError: the residual stream at a site is unknown, and `source` is block.
        """
        for site, size in self.sizes_of(anatomy).items():
            network = ChannelScaledBottleneck(site.d_out, size, self.activation, self.source)
            network.scale = self.scale
            yield Placement(site, network)

    def count(self, anatomy: Anatomy) -> int:
        """Sum size (d + 1) + d (size + 2) over the sites."""
        return super().count(anatomy) + sum(site.d_out for site in self.sizes_of(anatomy))

    def inference_form(self) -> Pfeiffer:
        """Return sequential adapters without the scales."""
        return Pfeiffer(**self.options())
