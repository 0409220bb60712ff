"""BitFit: only the bias terms of the backbone train.

    y = W x + b,   W frozen, b trained; the biases of layer normalization too      (section 3)

    x: (..., d_in)    W: (d_out, d_in)    b: (d_out,)    y: (..., d_out)

The paper's smaller set, the biases of the query and of the first feed-forward projection (b_q and
b_m2 in section 4), is `sites: [attn.q, ffn.up]`.

Parameters: the sizes of the selected biases.

Ben Zaken et al. 2022, "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked
Language-models", sections 3 and 4, https://arxiv.org/abs/2106.10199.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods.common.base import Layers, Unfreezing, register_method
from adapterhub.methods.common.projections import in_layers

# Other parameters with such names are not added to an output: they select experts, or time steps.
_BIAS = re.compile(r"(^|\.)((q|k|v|in_proj|dense)_)?bias$")


@register_method
@dataclass(frozen=True)
class BitFit(Unfreezing):
    """Train only the bias terms of the backbone."""

    name = "bitfit"
    paper = "Ben Zaken et al. 2022, https://arxiv.org/abs/2106.10199"
    summary = "train only the bias terms of the backbone"
    learning_rate = 1e-3

    sites: Literal["all"] | tuple[str, ...] = option(
        "all", "projections and norms whose bias to train, or all"
    )
    layers: Layers = option("all", "layers to train: all, 'top 4', '0..3', [0, 5]")

    def paths(self, anatomy: Anatomy) -> list[str]:
        """Return the selected biases.

        Raises:
            SiteError: the sites have no biases, or only a slice of one.
        """
        parameters = anatomy.parameters().items()
        biases = [path for path, p in parameters if _BIAS.search(path) and p.ndim == 1]
        kind = anatomy.backbone.model_type
        if not biases:
            raise SiteError(
                f"bitfit trains biases, and this {kind} backbone has none",
                expected="a backbone with biases, such as bert, gpt2 or bart",
                hint="norms, which trains the scales of the normalization layers instead",
            )
        selected = in_layers(anatomy, biases, self.layers)
        if self.sites != "all":
            hosts = tuple(f"{site.host}." for site in self._whole_sites(anatomy))
            selected = [path for path in selected if path.startswith(hosts)]
        if not selected:
            raise SiteError(
                f"this {kind} backbone has no bias at the sites that bitfit names",
                offenders=[f"sites {self.sites!r}, layers {self.layers!r}"],
                expected=f"sites with a bias, such as {anatomy.key(biases[0])}",
                hint="bitfit(sites=all)",
            )
        return selected

    def _whole_sites(self, anatomy: Anatomy) -> list[Site]:
        sites = [s for s in anatomy.select(self.sites) if s.kind in ("linear", "norm")]
        if slices := sorted({s.role for s in sites if s.part}):
            raise SiteError(
                "bitfit trains whole biases, and these sites share one",
                offenders=slices,
                hint=f"bitfit(sites=['{slices[0].split('.')[0]}.qkv'])",
            )
        return sites
