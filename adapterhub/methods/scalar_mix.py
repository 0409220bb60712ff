"""Scalar mix: a learned weighted mean of the outputs of all layers, on a frozen backbone.

    y' = gamma sum_j softmax(w)_j h_j                                               (equation 1)

    h_0: input of the first layer, h_j: output of layer j    h_j, y': (batch, tokens, d)
    w: (layers + 1,), zero    gamma: (1,), one

y' replaces the output of the last layer, before a final norm. An encoder-decoder has one mix per
stack.

Parameters: layers + 2 per stack.

Peters et al. 2018, "Deep contextualized word representations" (ELMo), section 3.2,
https://arxiv.org/abs/1802.05365.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy
from adapterhub.config.options import option
from adapterhub.methods.common.base import Method, Placement, register_method
from adapterhub.methods.common.projections import select_sites
from adapterhub.methods.common.site_module import LayerMixModule


class ScalarMixLayer(LayerMixModule):
    """The map (h_0 .. h_L) -> gamma sum_j softmax(w)_j h_j."""

    def __init__(self, states: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(states))
        self.gamma = nn.Parameter(torch.ones(1))

    def forward(self, states: Sequence[Tensor], y: Tensor) -> Tensor:
        """Mix the outputs. states: h_0 .. h_(L-1), y: h_L, each (batch, tokens, d) -> y' like y."""
        shares = (self.gamma * self.w.softmax(0)).to(y.dtype)
        mixed = shares[-1] * y
        for share, state in zip(shares[:-1], states, strict=True):
            mixed = mixed + share * state
        return mixed


@register_method
@dataclass(frozen=True)
class ScalarMix(Method):
    """A learned weighted mean of the outputs of all layers."""

    name = "scalar-mix"
    paper = "Peters et al. 2018, https://arxiv.org/abs/1802.05365"
    summary = "learned weighted mean of the outputs of all layers"
    start = "paper"
    learning_rate = 1e-2

    sites: tuple[str, ...] = option(("mix",), "stacks to adapt: mix, encoder.mix, decoder.mix")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one mix per selected stack."""
        for site in select_sites(self, anatomy, "mix"):
            yield Placement(site, ScalarMixLayer(anatomy.depth(site.stack) + 1))

    def count(self, anatomy: Anatomy) -> int:
        """Sum layers + 2 over the stacks."""
        sites = select_sites(self, anatomy, "mix")
        return sum(anatomy.depth(site.stack) + 2 for site in sites)
