"""LoRA and (IA)^3 of `adapters`, which are two modes of one configuration there.

Its (IA)^3 rescales the output of a projection everywhere: of the first one of the feed-forward
network too, before the activation. On Llama and Mistral it has the feed-forward projections the
other way round. A fused projection holds A of all its adapted parts stacked, and B likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adapterhub.anatomy.sites import Site
from adapterhub.interchange.adapters_library.files import MethodConfig
from adapterhub.interchange.adapters_library.gated import add_gated
from adapterhub.interchange.adapters_library.places import (
    Held,
    check_places,
    note_dropout,
    projections_at,
    wanted_sites,
)
from adapterhub.interchange.specs import sites_option
from adapterhub.interchange.translation import Translation
from adapterhub.methods.ia3 import IA3
from adapterhub.methods.lora import LoRA

_FEED_FORWARD = ("intermediate_lora", "output_lora")
_LOW_RANK = {"lora_A": "A", "lora_B": "B"}
_SCALE = {"lora_B": "scale"}
_GATED = {"lora_A": "update.A", "lora_B": "update.B"} | {
    name: name for name in ("gate.weight", "gate.bias")
}


def import_adapters_low_rank(part: MethodConfig, held: Held, draft: Translation) -> None:
    """Translate the LoRA or (IA)^3 of a checkpoint."""
    options, gated = part.options, part.options["use_gating"]
    adds = options["composition_mode"] == "add"
    names = _SCALE if not adds else _GATED if gated else _LOW_RANK
    method = LoRA.name if adds else IA3.name
    if gated and not adds:
        draft.problems.append("use_gating: with composition_mode scale it is not expressible")
    found: dict[str, Site] = {}
    for path, parameter, tensor in held.take("loras"):
        sites = _adapted(projections_at(draft.anatomy, path), options["attn_matrices"])
        if not sites or parameter not in names or not tensor.dim():
            draft.problems.append(f"{path}.{parameter}: has no place here")
            continue
        for site, piece in zip(sites, tensor.chunk(len(sites)), strict=False):
            found[site.id] = site
            own = piece.flatten() if names[parameter] == "scale" else piece
            draft.tensors[f"{site.id}.{method}.{names[parameter]}"] = own.clone()
    check_places(found.values(), _wanted(options, found.values(), draft), draft)
    if found and gated:  # a gate stands in the place of alpha / r
        note_dropout(options, draft)
        add_gated({"rank": options["r"]}, found.values(), draft)
    elif found and not draft.problems:
        draft.methods.append({method: _spec(options, found, draft)})


def _adapted(sites: list[Site], matrices: Iterable[str]) -> list[Site]:
    """Of the parts of a fused projection those that are adapted."""
    return [s for s in sites if s.part is None or s.role.rpartition(".")[2] in matrices]


def _wanted(options: Mapping[str, Any], found: Iterable[Site], draft: Translation) -> list[Site]:
    matrices = options["attn_matrices"] if options["selfattn_lora"] else []
    roles = {f"{sublayer}.{m}" for sublayer in ("attn", "cross") for m in matrices}
    feed_forward = {site.role for site in found if site.role.startswith("ffn.")}
    flags = [flag for flag in _FEED_FORWARD if options[flag]]
    if len(feed_forward) != len(flags):
        draft.problems.append(
            f"{' and '.join(flags) or 'no feed-forward projection'}: the options name, and tensors "
            f"are at {', '.join(sorted(feed_forward)) or 'none'}"
        )
    return wanted_sites(draft.anatomy, roles | feed_forward, options["leave_out"])


def _spec(
    options: Mapping[str, Any], found: Mapping[str, Site], draft: Translation
) -> dict[str, Any]:
    sites = sites_option(draft.anatomy, found.values())
    if options["composition_mode"] == "add":
        alpha, dropout = float(options["alpha"]), float(options["dropout"])
        return {"rank": options["r"], "alpha": alpha, "dropout": dropout, "sites": sites}
    if options["r"] != 1 or options["alpha"] != 1:
        draft.problems.append("composition_mode: scale is expressible with r 1 and alpha 1 alone")
    return {"sites": sites, "inputs": []}
