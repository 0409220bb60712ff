"""ReFT: states of a few tokens are edited in a low-rank subspace.

    loreft   h' = h + Rᵀ (W h + b - R h)    R: orthonormal rows                   (equation 2)
    noreft   h' = h + Pᵀ (W h + b - P h)                                          (appendix E)
    direft   h' = h + Pᵀ (W h + b)                                                (equation 3)

    h, h': (tokens, d), the output of a layer    W, P, R: (rank, d)    b: (rank,)

In the subspace of R the state becomes W h + b; outside of it, h stays. R is L⁻¹ P with a trained P
of full rank and L Lᵀ = P Pᵀ: Gram-Schmidt. The initial edit is zero: W = R, or P (direft: W = 0),
and b = 0. With `init: paper`, W and b are initialized like a linear layer.

The output of a layer is edited at the first and the last tokens of the prompt: `f1+l1` are one of
each. The prompt is the text before the first learned token, and in `generate` its input; models
that do not generate use whole texts. With `shared`, one edit is used for both. An edit is applied
once, when the prompt is read: further tokens cost the same as without it.

Parameters: rank (2 d + 1) per edit.

Wu et al. 2024, "ReFT: Representation Finetuning for Language Models", section 3.2 and appendix E,
https://arxiv.org/abs/2404.03592.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.errors import ConfigError, SiteError
from adapterhub.methods.common.base import Layers, Method, Placement, register_method
from adapterhub.methods.common.ops import cast
from adapterhub.methods.common.projections import of_texts, select_sites
from adapterhub.methods.common.site_module import OutputModule, TokenSet

Init = Literal["identity", "paper"]
_POSITIONS = re.compile(r"(?:f([1-9]\d*))?\+?(?:l([1-9]\d*))?")


def token_sets(positions: str) -> tuple[TokenSet, ...]:
    """Parse sets of tokens: `f2+l3` is the first two, and the last three.

    Raises:
        ConfigError: another form.
    """
    match = _POSITIONS.fullmatch(positions)
    counts = {} if match is None else dict(zip(("first", "last"), match.groups(), strict=True))
    kinds = [kind for kind in ("first", "last") if counts.get(kind)]
    if not kinds or ("+" in positions) != (len(kinds) == 2):
        raise ConfigError(
            f"positions: {positions!r}",
            expected="f1+l1, f3 or l2: the first and the last tokens of the prompt to edit",
        )
    return tuple(TokenSet(kind, int(counts[kind])) for kind in kinds)  # type: ignore[arg-type]


class Edit(nn.Module):
    """The map h -> h + Pᵀ (W h + b - P h), or without P h."""

    def __init__(self, d: int, rank: int, orthonormal: bool, subtracts: bool, init: Init) -> None:
        super().__init__()
        self.orthonormal, self.subtracts = orthonormal, subtracts
        self.P = nn.Parameter(torch.empty(rank, d))
        self.W = nn.Parameter(torch.zeros(rank, d))
        self.b = nn.Parameter(torch.zeros(rank))
        (nn.init.orthogonal_ if orthonormal else _like_linear)(self.P)
        if init == "paper":
            _like_linear(self.W)
            nn.init.uniform_(self.b, -1 / math.sqrt(d), 1 / math.sqrt(d))
        elif subtracts:
            with torch.no_grad():
                self.W.copy_(self.subspace())

    def subspace(self) -> Tensor:
        """Return P: (rank, d)."""
        if not self.orthonormal:
            return self.P
        # In fp64, which autocast leaves alone, each device and each call rounds to the same fp32:
        # W - P is 0 at first.
        rows = self.P if self.P.device.type == "mps" else self.P.double()
        lower, _ = torch.linalg.cholesky_ex(rows @ rows.T)
        orthonormal: Tensor = torch.linalg.solve_triangular(lower, rows, upper=False)
        return orthonormal.to(self.P.dtype)

    def forward(self, h: Tensor) -> Tensor:
        """Edit states. h: (..., d) -> h' like h."""
        subspace = self.subspace()
        source = self.W - subspace if self.subtracts else self.W
        edit = F.linear(h, cast(source, h), cast(self.b, h))
        return h + F.linear(edit, cast(subspace, edit).T).to(h.dtype)


def _like_linear(weight: Tensor) -> None:
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


class StateEdit(OutputModule):
    """Edits of the first and the last tokens of each prompt: one for both, or one for each.

    If one set is empty, so is the other: both belong to the prompt.
    """

    source = "output"

    def __init__(self, sets: tuple[TokenSet, ...], edits: dict[str, Edit]) -> None:
        super().__init__()
        self.token_sets = sets
        for name, edit in edits.items():
            self.add_module(name, edit)

    def forward(self, x: Tensor, y: Tensor, *chosen: Tensor | None) -> Tensor:
        """Edit the output of a layer.

        x, y: (batch, tokens, d); chosen: (batch, tokens, 1) of each set, None for an empty set ->
        y' like y. A token in both sets counts as one of the last.
        """
        some = [mask for mask in chosen if mask is not None]
        if not some:
            return y
        edits = list(self.children())
        masks = some if len(edits) > 1 else [functools.reduce(torch.logical_or, some)]
        edited = y
        for edit, mask in zip(edits, masks, strict=True):
            edited = torch.where(mask, edit(y), edited)
        return edited


@dataclass(frozen=True)
class StateMethod(Method):
    """Low-rank edits of a layer's output at the first and the last tokens of the prompt.

    Attributes:
        orthonormal: whether the rows of P are orthonormal.
        subtracts: whether P h is subtracted.
    """

    paper = "Wu et al. 2024, https://arxiv.org/abs/2404.03592"
    learning_rate = 2e-3
    sized_by: ClassVar[str | None] = "rank"
    orthonormal: ClassVar[bool]
    subtracts: ClassVar[bool]

    rank: int = option(8, "rank of the edits: the size of the subspace", least=1)
    positions: str = option("f1+l1", "tokens to edit: the first and the last ones of the prompt")
    shared: bool = option(True, "one edit for the first and the last tokens, not one for each")
    sites: tuple[str, ...] = option(("layer",), "stacks to adapt: layer, decoder.layer")
    layers: Layers = option("all", "layers to adapt: all, 'top 4', '0..3', [0, 5]")
    init: Init = option("identity", "edits before training: none (identity), or as in the paper")

    def __post_init__(self) -> None:
        super().__post_init__()
        token_sets(self.positions)

    def plan(self, anatomy: Anatomy) -> Iterator[Placement]:
        """Yield one module per selected layer.

        Raises:
            SiteError: the backbone's layers have no single output, or more than its rank.
        """
        for site in self._sites(anatomy):
            edits = {
                name: Edit(site.d_out, self.rank, self.orthonormal, self.subtracts, self.init)
                for name in self._edits()
            }
            yield Placement(site, StateEdit(token_sets(self.positions), edits))

    def count(self, anatomy: Anatomy) -> int:
        """Sum rank (2 d + 1) over the edits of all layers."""
        sizes = [self.rank * (2 * site.d_out + 1) for site in self._sites(anatomy)]
        return len(self._edits()) * sum(sizes)

    def _edits(self) -> list[str]:
        kinds = [tokens.kind for tokens in token_sets(self.positions)]
        return ["edit"] if self.shared else list(kinds)

    def _sites(self, anatomy: Anatomy) -> tuple[Site, ...]:
        sites = of_texts(self, anatomy, select_sites(self, anatomy, "layer"))
        if self.orthonormal and any(site.d_out < self.rank for site in sites):
            width = min(site.d_out for site in sites)
            raise SiteError(
                f"{self.name} needs {self.rank} orthonormal rows of {width} numbers",
                expected=f"a rank of at most {width}",
            )
        return sites


@register_method
@dataclass(frozen=True)
class LoReFT(StateMethod):
    """Edits of the states of a few tokens in an orthonormal subspace."""

    name = "loreft"
    summary = "edits of the states of a few tokens in an orthonormal subspace"
    orthonormal = True
    subtracts = True


@register_method
@dataclass(frozen=True)
class NoReFT(StateMethod):
    """Edits of the states of a few tokens in any subspace."""

    name = "noreft"
    summary = "LoReFT without an orthonormal basis"
    orthonormal = False
    subtracts = True


@register_method
@dataclass(frozen=True)
class DiReFT(StateMethod):
    """Low-rank updates of the states of a few tokens."""

    name = "direft"
    summary = "low-rank updates of the states of a few tokens"
    orthonormal = False
    subtracts = False
