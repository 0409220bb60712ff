"""LLaMA-Adapter: learned prompts per layer, with a separate softmax and a zero-initialized gate.

    o' = o + g softmax(s q (W_k P + b_k)ᵀ) (W_v P + b_v)                (section 3.2, equation 6)

    o: the attention of a query q over the tokens    s: the scale of the attention
    P: (length, d), N(0, 1)    g: a number, 0    W_k, b_k, W_v, b_v: the frozen projections

The prompt of a layer is projected by that layer's own keys and values. It has a separate softmax,
so that the weights among the tokens are unchanged. The prompt has no positions, is never masked,
and is not in the KV cache. The paper adapts the topmost layers, `layers: top 30` of 32. Its code
has a gate for each head, tanh(g); this is the gate of the paper and of peft.

Parameters: length d + 1 per site.

Zhang et al. 2023, "LLaMA-Adapter: Efficient Fine-tuning of Language Models with Zero-init
Attention", section 3, https://arxiv.org/abs/2303.16199.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods.common.base import Layers, Method, Placement, register_method
from adapterhub.methods.common.ops import cast
from adapterhub.methods.common.projections import select_sites
from adapterhub.methods.common.site_module import ApartKeyValueModule


class GatedPrompt(ApartKeyValueModule):
    """Project P to keys and values, and multiply these by g."""

    def __init__(self, length: int, projections: tuple[Site, Site]) -> None:
        super().__init__()
        self.projections = projections
        self.P = nn.Parameter(torch.empty(length, projections[0].d_in))
        self.g = nn.Parameter(torch.zeros(1))
        nn.init.normal_(self.P)

    def forward(
        self, key: Tensor, key_bias: Tensor | None, value: Tensor, value_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return W_k P + b_k and g (W_v P + b_v)."""
        pairs = ((key, key_bias), (value, value_bias))
        keys, values = (
            F.linear(cast(self.P, w), w, b if b is None else b.to(w.dtype)) for w, b in pairs
        )
        return keys, cast(self.g, values) * values


@register_method
@dataclass(frozen=True)
class LLaMAAdapter(Method):
    """Learned prompts in each layer, behind a gate that is zero at first."""

    sized_by = "length"
    name = "llama-adapter"
    paper = "Zhang et al. 2023, https://arxiv.org/abs/2303.16199"
    summary = "prompts in each layer, attended to apart behind a gate that starts at zero"
    learning_rate = 9e-3

    length: int = option(10, "prompt length in tokens", least=1)
    sites: tuple[str, ...] = option(("attn.kv",), "attentions to adapt")
    layers: Layers = option("all", "layers to adapt: all, 'top 30', '0..3', [0, 5]")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one prompt per selected attention.

        Raises:
            SiteError: an attention whose keys and values are not two projections of its input.
        """
        for site, projections in self._sites(anatomy).items():
            yield Placement(site, GatedPrompt(self.length, projections))

    def count(self, anatomy: Anatomy) -> int:
        """Sum length d + 1 over the sites."""
        pairs = self._sites(anatomy).values()
        return sum(self.length * keys.d_in + 1 for keys, _ in pairs)

    def _sites(self, anatomy: Anatomy) -> dict[Site, tuple[Site, Site]]:
        """Return the selected attentions with the projections of their keys and values."""
        pairs: dict[Site, tuple[Site, Site]] = {}
        without = []
        for site in select_sites(self, anatomy, "keyvalue"):
            stem = site.id.removesuffix("kv")
            key, value = (anatomy.sites.get(f"{stem}{name}") for name in ("k", "v"))
            if key is None or value is None:
                without.append(site.id)
            else:
                pairs[site] = (key, value)
        if without:
            raise SiteError(
                f"{self.name} projects prompts as the attention does, and its projections of keys "
                "and values are unknown",
                offenders=without,
                expected="attentions with the sites attn.k and attn.v",
                hint="prefix, whose keys and values are learned",
            )
        return pairs
