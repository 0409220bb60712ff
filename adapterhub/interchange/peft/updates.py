"""Low-rank updates of ours as those of peft: one a module, its scale alpha / rank.

Where several of ours sit on one module (the q and v of a fused projection, or the start that PiSSA
takes off), their factors are stacked: B A + B' A' = [B B'] [A; A'].
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adapterhub.anatomy.sites import Site
from adapterhub.backbones.weights import read_weight
from adapterhub.methods.dora import DoRALayer
from adapterhub.methods.lora import LoRALayer
from adapterhub.methods.pissa import PiSSALayer


@dataclass(frozen=True)
class ModuleUpdate:
    """The update of one module: tensors by peft's names, rank and scale."""

    tensors: Mapping[str, Tensor]
    rank: int
    scale: float


def joined_update(host: nn.Module, pieces: Sequence[tuple[Site, nn.Module]]) -> ModuleUpdate | None:
    """All updates of one module as one; None where DoRA forbids it."""
    modules = [m for _, m in pieces if isinstance(m, LoRALayer)]
    decomposed = any(isinstance(m, DoRALayer) for m in modules)
    # Parts of a fused projection have rows, and so norms, of their own.
    apart = len({site.id for site, _ in pieces if site.part}) == len(pieces)
    if decomposed and len(modules) > 1 and not apart:
        return None
    scale = modules[0].scale
    lows: list[Tensor] = []
    highs: list[Tensor] = []
    for site, module in pieces:
        assert isinstance(module, LoRALayer)
        for low, high in _factors(module):
            # Untouched where the scales agree, so that the files hold the very bits.
            high = high if module.scale == scale else high * (module.scale / scale)
            lows.append(low)
            highs.append(high if site.part is None else _whole(site, host, high))
    tensors = {
        "lora_A.weight": torch.cat(lows),
        "lora_B.weight": torch.cat(highs, dim=1),
    }
    if decomposed:
        tensors["lora_magnitude_vector"] = _magnitude(host, pieces)
    return ModuleUpdate(tensors, sum(len(low) for low in lows), scale)


def _factors(module: LoRALayer) -> list[tuple[Tensor, Tensor]]:
    factors = [(module.A.detach(), module.B.detach())]
    if isinstance(module, PiSSALayer):
        factors.append((module.A0, -module.B0))
    return factors


def _whole(site: Site, host: nn.Module, high: Tensor) -> Tensor:
    """B of a part of a fused projection as rows of all of it: (d_fused, rank)."""
    assert site.part is not None
    rows = read_weight(host).shape[0]
    return site.part.write(high.new_zeros(high.shape[1], rows), high.T).T.contiguous()


def _magnitude(host: nn.Module, pieces: Sequence[tuple[Site, nn.Module]]) -> Tensor:
    """Rows that nothing updates keep their norms."""
    norms: Tensor | None = None
    for site, module in pieces:
        if isinstance(module, DoRALayer):
            if site.part is None:
                return module.magnitude.detach()
            if norms is None:
                norms = read_weight(host).detach().norm(dim=1)
            norms = site.part.write(norms, module.magnitude.detach())
    assert norms is not None
    return norms


def pattern_options(sizes: Mapping[str, tuple[int, float]], rooted: bool) -> dict[str, Any]:
    """peft's rank and alpha, and its patterns for the modules that differ; `rooted`: the scale is
    alpha / sqrt(rank)."""
    if not sizes:
        return {}
    alphas = {h: _alpha(rank, scale, rooted) for h, (rank, scale) in sizes.items()}
    ranks = {host: rank for host, (rank, _) in sizes.items()}
    (rank, _), *_ = Counter(ranks.values()).most_common(1)
    (alpha, _), *_ = Counter(alphas.values()).most_common(1)
    return {
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rooted,
        "rank_pattern": {re.escape(h): r for h, r in ranks.items() if r != rank},
        "alpha_pattern": {re.escape(h): a for h, a in alphas.items() if a != alpha},
    }


def _alpha(rank: int, scale: float, rooted: bool) -> int | float:
    alpha = scale * (math.sqrt(rank) if rooted else rank)
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha
