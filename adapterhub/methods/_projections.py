"""The base of methods that add one module at each selected projection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from adapterhub.anatomy.own_modules import parameter_at
from adapterhub.anatomy.sites import Anatomy, Kind, Site
from adapterhub.backbones.weights import read_bias, read_weight
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods._base import Layers, Method, Placement
from adapterhub.methods._site_module import SiteModule
from adapterhub.methods._sites import select_sites, sizes_by_site

ATTENTION = ("attn.q", "attn.v", "cross.q", "cross.v")


def weight_at(site: Site, anatomy: Anatomy) -> Tensor:
    """Return the weight of a projection, (d_out, d_in), in fp32.

    Raises:
        SiteError: the weight cannot be read.
    """
    host = anatomy.model.get_submodule(site.host)
    if site.matrix is not None:
        return site.matrix.of(host.get_parameter(site.matrix.weight)).detach().float()
    return read_weight(host, site.part).detach()


def bias_at(site: Site, anatomy: Anatomy) -> Tensor | None:
    """Return the bias of a projection, (d_out,), as it is stored; None if it has none."""
    host, matrix = anatomy.model.get_submodule(site.host), site.matrix
    if matrix is None:
        return read_bias(host, site.part)
    bias = parameter_at(host, matrix.bias)
    return None if bias is None else matrix.bias_of(bias)


def has_bias(site: Site, anatomy: Anatomy) -> bool:
    """Return whether a projection has a bias."""
    return bias_at(site, anatomy) is not None


def divisor(size: int, most: int) -> int:
    """Return the largest number up to `most` that divides a size."""
    return next(n for n in range(min(most, size), 0, -1) if size % n == 0)


@dataclass(frozen=True)
class ProjectionMethod(Method):
    """One module at each selected projection; a subclass has `module` and `size`.

    Attributes:
        kinds: the kinds of sites that it fits.
    """

    kinds: ClassVar[tuple[Kind, ...]] = ("linear",)

    sites: tuple[str, ...] = option(ATTENTION, "projections to adapt")
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one module per selected projection.

        Raises:
            SiteError: a site that is not a projection, or that the module does not fit.
        """
        for site, rank in self.ranks_by_site(anatomy).items():
            yield Placement(site, self.module(site, rank, anatomy))

    def count(self, anatomy: Anatomy) -> int:
        """Sum the numbers of the sites."""
        return sum(self.size(*each) for each in self.ranks_by_site(anatomy).items())

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> SiteModule:
        """Return the module of one site; the rank is 0 for a method without ranks."""
        raise NotImplementedError(f"{self.name} has no module")

    def size(self, site: Site, rank: int) -> int:
        """Return how many numbers train at one site."""
        raise NotImplementedError(f"{self.name} has no size")

    def ranks_by_site(self, anatomy: Anatomy) -> Mapping[Site, int]:
        """Return the rank of each selected site."""
        return dict.fromkeys(select_sites(self, anatomy, *self.kinds), 0)


@dataclass(frozen=True)
class RankOption:
    """The option of a rank; those of a base that comes last are first."""

    rank: int = option(8, "rank r of the update", least=1)


@dataclass(frozen=True)
class _Ranks(RankOption):
    ranks: dict[str, int] = option({}, "other ranks for some sites: {attn.q: 4}")


@dataclass(frozen=True)
class RankMethod(ProjectionMethod, _Ranks):
    """One module of some rank at each selected projection."""

    sized_by: ClassVar[str | None] = "rank"

    def ranks_by_site(self, anatomy: Anatomy) -> Mapping[Site, int]:
        """Return the rank of each selected site."""
        sites = select_sites(self, anatomy, *self.kinds)
        return sizes_by_site("rank", sites, self.rank, self.ranks)


def require_components(method: Method, site: Site, rank: int) -> None:
    """Refuse a rank that is more than the components of a weight.

    Raises:
        SiteError: it is.
    """
    most = min(site.d_in, site.d_out)
    if rank > most:
        raise SiteError(
            f"{method.name} needs {rank} components of the weight at {site.id}",
            expected=f"a rank of at most {most}",
            hint=f"{method.name}(rank={most})",
        )
