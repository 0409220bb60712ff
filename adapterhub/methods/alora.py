"""aLoRA: a LoRA that applies only after its invocation.

    y_t = W x_t                t < t0                                             (section 3)
    y_t = W x_t + s B A x_t    t >= t0,   s = alpha / rank

    x: (tokens, d_in)    A: (rank, d_in), Kaiming-uniform    B: (d_out, rank), zero
    t0: where the last occurrence of the invocation tokens begins; none: the backbone alone

For the text before the invocation, a decoder's outputs, keys and values are bit-identical to the
backbone's, so that several adapters can continue from one cache. In `generate` the invocation is
searched in its input; tokens that follow it in a cache stay invoked. Without invocation tokens, the
adapter applies from the last token of the prompt on: in `generate` the last input token, in
training the token before the first learned one.

An encoder, where all tokens see each other, lacks such a cache; there, only the tokens from the
invocation on are changed.

Parameters: rank (d_in + d_out) per site.

Greenewald et al. 2025, "Activated LoRA: Fine-tuned LLMs for Intrinsics", section 3,
https://arxiv.org/abs/2504.12397.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.projections import of_texts
from adapterhub.methods.common.site_module import TokenSet
from adapterhub.methods.lora import LoRALayer, LowRank


class InvokedLoRALayer(LoRALayer):
    """The map (x, y) -> y + s B A x at the tokens from the invocation on."""

    affine = False

    def forward(self, x: Tensor, y: Tensor, *chosen: Tensor | None) -> Tensor:
        """Compute the new output.

        x: (..., d_in), y: (..., d_out), chosen: (..., 1), the tokens to change -> y' like y.
        """
        (some,) = chosen
        return y if some is None else torch.where(some, super().forward(x, y), y)

    def factors(self) -> None:
        """Return None: some tokens are not changed, so this is not a change of the weight."""


@register_method
@dataclass(frozen=True)
class ALoRA(LowRank):
    """Low-rank updates of projections from the invocation tokens on."""

    name = "alora"
    paper = "Greenewald et al. 2025, https://arxiv.org/abs/2504.12397"
    summary = "LoRA from its invocation tokens on: the cache in front is the backbone's"
    learning_rate = 1e-3
    kinds = ("linear",)

    invocation: tuple[int, ...] = option(
        (), "ids of the tokens that invoke the adapter; none: the last token of the prompt"
    )

    @classmethod
    def example(cls) -> ALoRA:
        """Return the method where its tokens reach the first one, which classifiers may read."""
        return cls(sites=("attn.v",), layers="first 1")

    def ranks_by_site(self, anatomy: Anatomy) -> Mapping[Site, int]:
        """Return the rank of each selected site.

        Raises:
            SiteError: a site that is not a projection, or a stack that does not read text.
        """
        ranks = super().ranks_by_site(anatomy)
        return {site: ranks[site] for site in of_texts(self, anatomy, tuple(ranks))}

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> InvokedLoRALayer:
        """Return the update of one site."""
        module = InvokedLoRALayer(site.d_in, site.d_out, rank, self.scale(rank), self.dropout)
        module.token_sets = (TokenSet("from", ids=self.invocation),)
        return module
