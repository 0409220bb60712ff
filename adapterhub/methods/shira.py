"""SHiRA: a sparse update of a projection: some entries of its weight train.

    y = W x + S x                                                                 (section 3.1)

    x: (..., d_in)    S: (d_out, d_in), zero but at n fixed places    n = rank (d_in + d_out)

The places are drawn from a seed, or belong to the largest or smallest weights (`places: largest` or
`smallest`, which files then contain). S is zero at first, so the initial update is zero. It has as
many parameters as a LoRA of that rank, and the rank of S is not limited. With a `share`, n is that
share of all entries: `shira(places=largest, share=0.01)` is Super tuning, and Supra with an
additional `lora`.

Parameters: rank (d_in + d_out) per site, at most d_in d_out; or share d_in d_out.

Bhardwaj et al. 2024, "Sparse High Rank Adapters", section 3, https://arxiv.org/abs/2406.13175;
"Supra-Tuning: Combining Outlier and Low-Rank Adaptation", https://arxiv.org/abs/2607.09287.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.experts import AtExperts
from adapterhub.methods.common.generated import PlacedNumbers
from adapterhub.methods.common.ops import DeltaModule
from adapterhub.methods.common.projections import RankMethod, weight_at
from adapterhub.methods.common.site_module import init_is_skipped


class SparseUpdate(DeltaModule):
    """The map (x, y) -> y + S x."""

    def __init__(self, site: Site, count: int, seed: int, stored: bool) -> None:
        super().__init__()
        shape = (site.d_out, site.d_in)
        self.S = PlacedNumbers(f"shira.{site.id}", seed, count, shape, stored)

    def delta(self) -> Tensor:
        """Return S: (d_out, d_in)."""
        return self.S.matrix()


@register_method
@dataclass(frozen=True)
class SHiRA(AtExperts, RankMethod):
    """Sparse updates of projections."""

    name = "shira"
    paper = "Bhardwaj et al. 2024, https://arxiv.org/abs/2406.13175"
    summary = "sparse updates: some entries of each weight train"
    learning_rate = 1e-3

    places: Literal["seed", "largest", "smallest", "file"] = option(
        "seed", "trained entries: drawn, at the largest or smallest weights, or in a file"
    )
    seed: int = option(0, "number that the places are drawn from")
    share: float = option(
        0.0, "share of the entries that train; 0: as many as a LoRA of the rank", least=0, most=1
    )

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> SparseUpdate:
        """Return the update of one site."""
        count = self.size(site, rank)
        module = SparseUpdate(site, count, self.seed, self.places != "seed")
        if self.places in ("largest", "smallest") and not init_is_skipped():
            sizes = weight_at(site, anatomy).abs().flatten()
            chosen = sizes.topk(count, largest=self.places == "largest").indices
            module.S.places = chosen.sort().values
        return module

    def size(self, site: Site, rank: int) -> int:
        """Return rank (d_in + d_out), at most all entries; or their share."""
        if self.share:
            return max(1, int(site.d_in * site.d_out * self.share))
        return min(rank * (site.d_in + site.d_out), site.d_in * site.d_out)
