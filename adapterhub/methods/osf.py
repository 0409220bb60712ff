"""OSF: the smaller components of the weight train, orthogonal to the larger ones, which are fixed.

    W = U S V^T = U_h S_h V_h^T + U_0 S_0 V_0^T
    y = W x + (U S V - U_0 S_0 V_0) x
    dU' = (I - U_h U_h^T) dU,   dV' = dV (I - V_h^T V_h)

    x: (..., d_in)    U: (d_out, r)    S: (r,)    V: (r, d_in), with the gradients dU' and dV'

A share `kept` of the components, with the largest singular values, is fixed, and training avoids
their directions, which reduces forgetting between tasks learned one after the other. U, S and V are
U_0, S_0 and V_0 at first, so nothing changes. The components of W are not in the file: each loading
decomposes W again, exactly and in fp64, so the backbone must be loaded in the same precision.

Parameters: r (d_in + d_out + 1) per site, r = (1 - kept) min(d_in, d_out).

Nayak et al. 2025, "Sculpting Subspaces: Constrained Full Fine-Tuning in LLMs for Continual
Learning", https://arxiv.org/abs/2504.07097.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.ops import FactorModule, cast, stack_low_rank
from adapterhub.methods.common.projections import ProjectionMethod, select_sites, weight_at
from adapterhub.methods.lora_xs import decomposed


class LowComponents(FactorModule):
    """The map (x, y) -> y + (U S V - U_0 S_0 V_0) x."""

    stack = staticmethod(stack_low_rank)
    left_kept: Tensor
    right_kept: Tensor
    U0: Tensor
    V0: Tensor

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        u, s, vh = decomposed(weight, min(weight.shape))
        left, sizes, right = u[:, -rank:], s[-rank:], vh[-rank:]
        self.U, self.S, self.V = (nn.Parameter(t.contiguous()) for t in (left, sizes, right))
        kept = {"left_kept": u[:, :-rank], "right_kept": vh[:-rank]}
        for name, tensor in {**kept, "U0": left * sizes, "V0": right}.items():
            self.register_buffer(name, tensor.clone().contiguous(), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the new output. x: (..., d_in), y: (..., d_out) -> y' like y.

        Computed separately, both products round equally and cancel exactly at first.
        """
        left, right = self.trained()
        current = F.linear(F.linear(x, cast(right, x)), cast(left, x))
        initial = F.linear(F.linear(x, cast(self.V0, x)), cast(self.U0, x))
        return y + (current - initial).to(y.dtype)

    def trained(self) -> tuple[Tensor, Tensor]:
        """Return U S: (d_out, r) and V: (r, d_in), with projected gradients."""
        u: Tensor = self.U
        v: Tensor = self.V
        if torch.is_grad_enabled():
            # The subtracted part is zero; its gradient is the part in the kept directions.
            u = u - self.left_kept @ (self.left_kept.T @ (u - u.detach()))
            v = v - (v - v.detach()) @ self.right_kept.T @ self.right_kept
        return u * self.S, v

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return [U S, -U_0 S_0]: (d_out, 2 r) and [V; V_0]: (2 r, d_in)."""
        left, right = self.trained()
        return torch.cat([left, -self.U0], 1), torch.cat([right, self.V0])


@register_method
@dataclass(frozen=True)
class OSF(ProjectionMethod):
    """The smaller components of weights, trained orthogonally to the larger ones."""

    sized_by = "kept"
    name = "osf"
    paper = "Nayak et al. 2025, https://arxiv.org/abs/2504.07097"
    summary = "the smaller components of weights, trained orthogonally to the larger ones"
    learning_rate = 1e-4

    kept: float = option(0.5, "share of the components that stay, the largest", least=0, most=1)

    def decomposes_again(self) -> bool:
        """Return true: no file has the components."""
        return True

    def ranks_by_site(self, anatomy: Anatomy) -> Mapping[Site, int]:
        """Return the number of components that train, of each selected site."""
        sites = select_sites(self, anatomy, *self.kinds)
        counts = {site: min(site.d_in, site.d_out) for site in sites}
        return {s: n - min(n - 1, max(1, round(n * self.kept))) for s, n in counts.items()}

    def module(self, site: Site, rank: int, anatomy: Anatomy) -> LowComponents:
        """Return the components of one site."""
        return LowComponents(weight_at(site, anatomy), rank)

    def size(self, site: Site, rank: int) -> int:
        """Return r (d_in + d_out + 1)."""
        return rank * (site.d_in + site.d_out + 1)
