"""LoRA and (IA)^3 of `adapters`, two modes of one configuration.

Its (IA)^3 always rescales a projection's output, also that of the first feed-forward projection,
before the activation. On Llama and Mistral the names of the feed-forward projections are swapped. A
fused projection stores A of all adapted parts stacked, and B likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adapterhub.anatomy.site_patterns import sites_option
from adapterhub.anatomy.sites import Site
from adapterhub.interchange.adapters_library.files import MethodConfig
from adapterhub.interchange.adapters_library.gated import add_gated
from adapterhub.interchange.adapters_library.module_paths import (
    RemainingTensors,
    check_sites,
    projections_at,
    sites_with_roles,
)
from adapterhub.interchange.translation import Translation
from adapterhub.methods.ia3 import IA3
from adapterhub.methods.lora import LoRA

_FEED_FORWARD = ("intermediate_lora", "output_lora")
_LOW_RANK = {"lora_A": "A", "lora_B": "B"}
_SCALE = {"lora_B": "scale"}
_GATED = {"lora_A": "update.A", "lora_B": "update.B"} | {
    name: name for name in ("gate.weight", "gate.bias")
}


def import_adapters_low_rank(
    part: MethodConfig, remaining: RemainingTensors, translation: Translation
) -> None:
    """Translate LoRA or (IA)^3."""
    options, gated = part.options, part.options["use_gating"]
    is_lora = options["composition_mode"] == "add"
    names = _SCALE if not is_lora else _GATED if gated else _LOW_RANK
    method = LoRA.name if is_lora else IA3.name
    if gated and not is_lora:
        translation.problems.append("use_gating: not supported with composition_mode scale")
    adapted: dict[str, Site] = {}
    for path, parameter, tensor in remaining.take("loras"):
        sites = _adapted_parts(projections_at(translation.anatomy, path), options["attn_matrices"])
        if not sites or parameter not in names or not tensor.dim():
            translation.problems.append(f"{path}.{parameter}: unexpected tensor")
            continue
        for site, chunk in zip(sites, tensor.chunk(len(sites)), strict=False):
            adapted[site.id] = site
            value = chunk.flatten() if names[parameter] == "scale" else chunk
            translation.tensors[f"{site.id}.{method}.{names[parameter]}"] = value.clone()
    check_sites(adapted.values(), _named(options, adapted.values(), translation), translation)
    if adapted and gated:  # the gate replaces alpha / r
        translation.note_dropout(options["dropout"])
        add_gated({"rank": options["r"]}, adapted.values(), translation)
    elif adapted and not translation.problems:
        translation.methods.append({method: _spec(options, adapted.values(), translation)})


def _adapted_parts(sites: list[Site], matrices: Iterable[str]) -> list[Site]:
    """Return the adapted parts of a fused projection, or the projection itself."""
    return [s for s in sites if s.part is None or s.role.rpartition(".")[2] in matrices]


def _named(
    options: Mapping[str, Any], adapted: Iterable[Site], translation: Translation
) -> list[Site]:
    """Return the sites that the options name."""
    matrices = options["attn_matrices"] if options["selfattn_lora"] else []
    roles = {f"{sublayer}.{m}" for sublayer in ("attn", "cross") for m in matrices}
    feed_forward = {site.role for site in adapted if site.role.startswith("ffn.")}
    flags = [flag for flag in _FEED_FORWARD if options[flag]]
    if len(feed_forward) != len(flags):
        translation.problems.append(
            f"the options name {' and '.join(flags) or 'no feed-forward projection'}, but tensors "
            f"are at {', '.join(sorted(feed_forward)) or 'none'}"
        )
    return sites_with_roles(translation.anatomy, roles | feed_forward, options["leave_out"])


def _spec(
    options: Mapping[str, Any], adapted: Iterable[Site], translation: Translation
) -> dict[str, Any]:
    """Return our options of LoRA or (IA)^3."""
    sites = sites_option(translation.anatomy, adapted)
    if options["composition_mode"] == "add":
        alpha, dropout = float(options["alpha"]), float(options["dropout"])
        return {"rank": options["r"], "alpha": alpha, "dropout": dropout, "sites": sites}
    if options["r"] != 1 or options["alpha"] != 1:
        translation.problems.append(
            "composition_mode: scale is supported only with r 1 and alpha 1"
        )
    return {"sites": sites, "inputs": []}
