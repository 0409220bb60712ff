"""Modules at the weights of routed experts: updates of projections, one for each, and scales.

    y = W_e x + D_e x        y = l_e * W_e x        y = W_e (l_e * x)

    e: the expert that a row x is computed by    W_e, D_e: (d_out, d_in)    l: (experts, d)

D_e is the matrix that a module of the method adds at a projection. Its parameters are the stacked
parameters of all experts: A of a LoRA is (experts, rank, d_in). With `shared`, one update, or one
l, serves all experts: (rank, d_in), (d,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.backbone import copy_with
from adapterhub.anatomy.sites import Anatomy, Kind, Site
from adapterhub.config.options import option
from adapterhub.errors import SiteError
from adapterhub.methods.common.base import Placement
from adapterhub.methods.common.expert_rows import ExpertRows, OneExpert
from adapterhub.methods.common.ops import DeltaModule
from adapterhub.methods.common.projections import ProjectionMethod
from adapterhub.methods.common.site_module import (
    ExpertsInputModule,
    ExpertsModule,
    OutputModule,
    SiteModule,
)

PerExpert: TypeAlias = Literal["each", "shared"]
PER_EXPERT = "updates of routed experts: one for each, or one shared by all of a layer"


def matrices_of(site: Site, experts: PerExpert) -> int:
    """Return the number of updates at a site: one for each of its experts, or one."""
    count = site.held.experts if site.held else None
    return count if count and experts == "each" else 1


def refuse_unused(method: str, experts: PerExpert, sites: tuple[Site, ...]) -> None:
    """Refuse an option for experts where no site has experts.

    Raises:
        SiteError: `shared`, and no site of experts.
    """
    if experts == "shared" and not any(site.held and site.held.experts for site in sites):
        raise SiteError(
            f"{method}(experts=shared), and none of its sites is a weight of experts",
            offenders=sorted({site.role for site in sites}),
            expected="sites of routed experts",
            hint='sites=["ffn.experts.*"], or leave out experts=shared',
        )


class ExpertsUpdate(ExpertsModule):
    """The map (x, y) -> y + D_e x, with the D_e of a module of a projection for each expert.

    It has the attributes of such a module: its stacked parameters under the same names, and the
    fixed values shared by all experts. Rows of several experts are multiplied by the `factors` of
    the modules, or by their D_e, computed in each call.
    """

    affine = True

    def __init__(self, modules: Sequence[OutputModule], each: bool) -> None:
        super().__init__()
        first = modules[0]
        vars(self).update(vars(first))
        self.of, self.experts = type(first), len(modules) if each else None
        if not each:
            return
        for name in [name for name, _ in first.named_parameters()]:
            stacked = torch.stack([each.get_parameter(name).detach() for each in modules])
            path, _, last = name.rpartition(".")
            setattr(self.get_submodule(path), last, nn.Parameter(stacked))

    def forward(self, x: Tensor, y: Tensor, rows: ExpertRows) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y."""
        if self.experts is None or isinstance(rows, OneExpert):
            number = rows.number if isinstance(rows, OneExpert) else 0
            return self.module_of(number)(x, y)  # type: ignore[no-any-return]
        sizes = x.shape[-1], y.shape[-1]
        tensors = dict(self.named_parameters())
        matrices = torch.vmap(lambda own: _matrices(copy_with(self, own, self.of), *sizes))(tensors)
        x = F.dropout(x, getattr(self, "dropout", 0.0), self.training)
        for matrix in matrices:
            same = matrix.stride(0) == 0  # of all experts, as a fixed factor is
            each = matrix.to(x.dtype)
            x = F.linear(x, each[0]) if same else rows.product(x, each)
        return y + x.to(y.dtype)

    def module_of(self, number: int | Tensor) -> OutputModule:
        """Return the module of one expert, which has the same parameters or views of them."""
        tensors = dict(self.named_parameters())
        if self.experts is not None:
            tensors = {name: tensor[number] for name, tensor in tensors.items()}  # type: ignore[misc]
        module: OutputModule = copy_with(self, tensors, self.of)
        return module

    def extra_repr(self) -> str:
        """Return the settings that `print(model)` shows."""
        experts = [] if self.experts is None else [f"experts={self.experts}"]
        return ", ".join([*experts, *filter(None, [self.module_of(0).extra_repr()])])


def _matrices(module: OutputModule, d_in: int, d_out: int) -> tuple[Tensor, ...]:
    """Return the matrices whose product is D: (d_out, d_in), the first factor of x first."""
    if (factors := module.factors()) is not None:
        return factors[::-1]
    if isinstance(module, DeltaModule):
        return (module.delta(),)
    like = next(module.parameters())
    units = torch.eye(d_in, dtype=like.dtype, device=like.device)
    return (module(units, units.new_zeros(d_in, d_out)).T,)


class ExpertsOutputScale(ExpertsModule):
    """The map (x, y) -> l_e * y, before the host adds its bias."""

    affine = True

    def __init__(self, experts: int, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(experts, size))

    def forward(self, x: Tensor, y: Tensor, rows: ExpertRows) -> Tensor:
        """Rescale the output. y: (..., size) -> y' like y."""
        return y * _of_rows(self.scale, rows).to(y.dtype)


class ExpertsInputScale(ExpertsInputModule):
    """The map x -> l_e * x."""

    affine = True

    def __init__(self, experts: int, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(experts, size))

    def forward(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """Rescale the input. x: (..., size) -> x' like x."""
        return x * _of_rows(self.scale, rows).to(x.dtype)


def _of_rows(scale: Tensor, rows: ExpertRows) -> Tensor:
    return scale[0] if len(scale) == 1 else rows.select(scale)


@dataclass(frozen=True)
class AtExperts(ProjectionMethod):
    """A mixin: updates also of weights of experts, as in `class LoHa(AtExperts, RankMethod)`.

    For methods whose modules compute y + D x, where D depends only on parameters and fixed numbers.
    It adds only sites that a user names.
    """

    kinds: ClassVar[tuple[Kind, ...]] = ("linear", "weight")

    experts: PerExpert = option("each", PER_EXPERT, omitted=True)

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one module per selected projection.

        Raises:
            SiteError: a site that is not a projection, or that the module does not fit.
        """
        for site, rank in self.ranks_by_site(anatomy).items():
            build = partial(self.module, site, rank, anatomy)
            yield Placement(site, self.of_experts(site, build))

    def of_experts(self, site: Site, build: Callable[[], SiteModule]) -> SiteModule:
        """Return the module of a site, built from its experts' modules if it has experts."""
        if not (site.held and site.held.experts):
            return build()
        modules: Any = [build() for _ in range(matrices_of(site, self.experts))]
        return ExpertsUpdate(modules, each=self.experts == "each")

    def count(self, anatomy: Anatomy) -> int:
        """Sum the numbers of the sites: one matrix for each expert."""
        ranks = self.ranks_by_site(anatomy).items()
        return sum(matrices_of(s, self.experts) * self.size(s, rank) for s, rank in ranks)

    def ranks_by_site(self, anatomy: Anatomy) -> Mapping[Site, int]:
        """Return the rank of each selected site.

        Raises:
            SiteError: `experts=shared`, and none is of experts.
        """
        ranks = super().ranks_by_site(anatomy)
        refuse_unused(self.name, self.experts, tuple(ranks))
        return ranks
