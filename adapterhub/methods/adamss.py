"""AdaMSS: clusters of outputs, each with a low-rank update of the principal inputs of the weight.

    [W, b] = U S V^T,   y_c = W_c x + b_c + B_c A_c V^T [x; 1],   for each cluster c of outputs

    x: (..., d_in)    V: (d_in + 1, k), fixed; (d_in, k) without a bias b
    A_c: (rank, k)    B_c: (size of the cluster, rank), zero

The rows of U, (d_out, k), are clustered by k-means; the clusters are in the file. A_c are the
first right singular vectors of the rows of its cluster. B is zero at first, so the initial update
is zero. V is not in the file: each loading decomposes W again, exactly and in fp64, so the backbone
must be loaded in the same precision. With `stored` it is, as for imports. All clusters stay
in training; the paper also fixes the less important ones.

Parameters: rank (d_out + clusters k) per site, k = components, at most min(d_in, d_out).

Zheng et al. 2025, "AdaMSS: Adaptive Multi-Subspace Approach for Parameter-Efficient Fine-Tuning",
https://openreview.net/forum?id=8ZdWmpYxT0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import AffineLayer, add_product, cast
from adapterhub.methods.common.projections import RankMethod, bias_at, weight_at
from adapterhub.methods.common.site_module import OutputModule, init_is_skipped
from adapterhub.methods.lora_xs import decomposed


def with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [W, b]: (d_out, d_in + 1); W without a bias."""
    return weight if bias is None else torch.cat([weight, bias.detach().to(weight)[:, None]], 1)


def clustered(
    weight: Tensor, components: int, clusters: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the number of the cluster of each row of [W, b], as the authors compute it: (d_out,).

    The SVD is randomized, so that the clusters equal peft's on this processor. Other processors
    round differently and get other components and clusters, which the components, (k, width),
    reveal.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        u, _, v = torch.svd_lowrank(weight.cpu(), q=components, niter=2)
    return clusters_of_rows(u, clusters), v.T


def clusters_of_rows(u: Tensor, clusters: int) -> Tensor:
    """Return the number of the cluster of each row, (d_out,), by the k-means of the authors."""
    from sklearn.cluster import KMeans  # slow to import

    means = KMeans(clusters, init="random", n_init=1, max_iter=10, random_state=123456789)
    return torch.from_numpy(means.fit_predict(u.numpy())).long()


class ClusteredUpdate(OutputModule):
    """The map (x, y) -> y + B_c A_c V^T [x; 1] in each cluster c of outputs."""

    affine = True
    V: Tensor
    places: Tensor

    def __init__(self, site: Site, rank: int, clusters: int, components: int, width: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.zeros(clusters, rank, components))
        self.B = nn.Parameter(torch.zeros(site.d_out, rank))
        self.register_buffer("V", torch.zeros(components, width))
        self.register_buffer("places", torch.zeros(site.d_out, dtype=torch.long))
        self.d_in = site.d_in

    @property
    def limit(self) -> int:
        """The upper bound of all places: the number of clusters."""
        return len(self.A)

    @torch.no_grad()
    def begin(self, places: Tensor, u: Tensor) -> None:
        """Begin with these clusters, and the first directions of their rows. u: (d_out, k)."""
        self.places = places.to(u.device)
        for cluster, a in enumerate(self.A):
            _, _, vh = torch.linalg.svd(u[self.places == cluster])
            a[: len(vh)] = vh[: len(a)]

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Return the change of the weight as a product; None where the bias changes too."""
        return self._product() if self.V.shape[1] == self.d_in else None

    def _product(self) -> tuple[Tensor, Tensor]:
        """Return B of all clusters, (d_out, clusters rank), and A V^T: (clusters rank, width)."""
        own = F.one_hot(self.places, self.limit).to(self.B)
        return (own[:, :, None] * self.B[:, None]).flatten(1), self.A.flatten(0, 1) @ self.V

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        left, right = self._product()
        ones = right[:, self.d_in :].sum(1)  # nothing without a bias
        u = F.linear(x, cast(right[:, : self.d_in], x), cast(ones, x))
        return add_product(y, u, left, 1.0)

    def constant(self, site: Site) -> AffineLayer:
        """Return the update as one product and a shift."""
        left, right = self._product()
        shift = left @ right[:, self.d_in :].sum(1)
        return AffineLayer(right[:, : self.d_in], left.T, shift=shift)


@register_method
@dataclass(frozen=True)
class AdaMSS(RankMethod):
    """Clusters of outputs, each with a low-rank update."""

    name = "adamss"
    paper = "Zheng et al. 2025, https://openreview.net/forum?id=8ZdWmpYxT0"
    summary = "clusters of outputs, each with a low-rank update of principal inputs"
    learning_rate = 1e-2

    rank: int = option(1, "rank of the update of a cluster", least=1)
    clusters: int = option(5, "clusters of the outputs of a projection", least=1)
    components: int = option(100, "principal components of the weight, or all", least=1)
    stored: bool = option(False, "the components are in the file")

    def decomposes_again(self) -> bool:
        """Return whether the file lacks the components."""
        return not self.stored

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> ClusteredUpdate:
        """Return the update of one site."""
        weight = with_bias(weight_at(site, anatomy), bias_at(site, anatomy))
        clusters, count = self._sizes(site)
        module = ClusteredUpdate(site, rank, clusters, count, weight.shape[1])
        if not self.stored:
            module.register_buffer("V", module.V, persistent=False)
        if not (weight.is_meta or (self.stored and init_is_skipped())):
            u, _, module.V = decomposed(weight, count)
            if not init_is_skipped():
                module.begin(clustered(weight, count, clusters)[0], u)
        return module

    def size(self, site: Site, rank: int) -> int:
        """Return rank (d_out + clusters k)."""
        clusters, components = self._sizes(site)
        return rank * (site.d_out + clusters * components)

    def _sizes(self, site: Site) -> tuple[int, int]:
        """Return the clusters and components of a site, which is the maximum."""
        return min(self.clusters, site.d_out), min(self.components, site.d_in, site.d_out)
