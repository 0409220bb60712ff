"""Export of low-rank updates to peft: one update per module, with scale alpha / rank.

Several of our updates on one module (q and v of a fused projection, or the initial factors that
PiSSA subtracts) are stacked: B A + B' A' = [B B'] [A; A'].
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
from adapterhub.interchange.peft.export_types import (
    CheckpointPart,
    ExportedModule,
    ExportSource,
    target_options,
)
from adapterhub.methods.dora import DoRALayer
from adapterhub.methods.lora import LoRALayer
from adapterhub.methods.pissa import PiSSALayer
from adapterhub.methods.rslora import RsLoRA

LOW_RANK_MODULES = (LoRALayer, DoRALayer, PiSSALayer)


@dataclass(frozen=True)
class ModuleUpdate:
    """The update of one module: tensors by peft's names, rank and scale."""

    tensors: Mapping[str, Tensor]
    rank: int
    scale: float


def export_low_rank(source: ExportSource) -> CheckpointPart:
    """Return the low-rank updates as those of one LORA checkpoint."""
    by_host: dict[str, list[ExportedModule]] = {}
    for part in source.parts:
        if type(part.module) in LOW_RANK_MODULES and part.site.kind == "linear":
            by_host.setdefault(part.site.host, []).append(part)
    parts = [part for group in by_host.values() for part in group]
    decomposed = {isinstance(part.module, DoRALayer) for part in parts}
    problems = []
    if len(decomposed) > 1:
        problems.append("peft uses DoRA for all updates of a checkpoint, or for none")
    updates: dict[str, ModuleUpdate] = {}
    for host, group in by_host.items():
        pieces = [(p.site, p.module) for p in group if isinstance(p.module, LoRALayer)]
        update = joined_update(source.modules[host], pieces)
        if update is None:
            problems.append(f"{host}: two DoRA updates of one weight cannot be joined")
        else:
            updates[host] = update
    rooted = all(isinstance(part.method, RsLoRA) for part in parts)
    return CheckpointPart(
        config=target_options(source, by_host)
        | pattern_options(updates, rooted)
        | {
            "use_dora": True in decomposed,
            "lora_dropout": max(
                (getattr(part.method, "dropout", 0.0) for part in parts), default=0.0
            ),
            "bias": "none",
            "init_lora_weights": True,
        },
        tensors={
            f"{host}.{name}": tensor
            for host, update in updates.items()
            for name, tensor in update.tensors.items()
        },
        targets=sorted(by_host),
        problems=problems,
    )


def joined_update(host: nn.Module, pieces: Sequence[tuple[Site, LoRALayer]]) -> ModuleUpdate | None:
    """Join all updates of one module; return None if DoRA makes that impossible."""
    decomposed = any(isinstance(module, DoRALayer) for _, module in pieces)
    # Parts of a fused projection have separate rows, and so separate norms.
    separate = len({site.id for site, _ in pieces if site.part}) == len(pieces)
    if decomposed and len(pieces) > 1 and not separate:
        return None
    scale = pieces[0][1].scale
    lows: list[Tensor] = []
    highs: list[Tensor] = []
    for site, module in pieces:
        for low, high in _factors(module):
            # Equal scales leave the factors bit-identical.
            high = high if module.scale == scale else high * (module.scale / scale)
            lows.append(low)
            highs.append(high if site.part is None else _full_rows(site, host, high))
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


def _full_rows(site: Site, host: nn.Module, high: Tensor) -> Tensor:
    """Pad B of a part of a fused projection to all rows: (d_fused, rank)."""
    assert site.part is not None
    rows = read_weight(host).shape[0]
    return site.part.write(high.new_zeros(high.shape[1], rows), high.T).T.contiguous()


def _magnitude(host: nn.Module, pieces: Sequence[tuple[Site, LoRALayer]]) -> Tensor:
    """Return DoRA's magnitudes of all rows; rows without an update keep their norms."""
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


def pattern_options(updates: Mapping[str, ModuleUpdate], rooted: bool) -> dict[str, Any]:
    """Return peft's rank and alpha, and patterns for the modules that differ from them.

    `rooted`: the scale is alpha / sqrt(rank), as in rsLoRA.
    """
    if not updates:
        return {}
    ranks = {host: update.rank for host, update in updates.items()}
    alphas = {host: _alpha(update, rooted) for host, update in updates.items()}
    (rank, _), *_ = Counter(ranks.values()).most_common(1)
    (alpha, _), *_ = Counter(alphas.values()).most_common(1)
    return {
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rooted,
        "rank_pattern": {re.escape(h): r for h, r in ranks.items() if r != rank},
        "alpha_pattern": {re.escape(h): a for h, a in alphas.items() if a != alpha},
    }


def _alpha(update: ModuleUpdate, rooted: bool) -> int | float:
    alpha = update.scale * (math.sqrt(update.rank) if rooted else update.rank)
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha
