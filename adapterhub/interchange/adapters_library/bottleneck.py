"""Bottleneck adapters and Compacter of `adapters`.

    y' = y + s up(f(down(source)))

Its sequential adapters read the output of a sublayer or, with `original_ln_before`, the block; its
parallel ones read the residual stream. A learned scale s is folded into up, and so is that of a
gated adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.interchange.adapters_library.files import MethodConfig
from adapterhub.interchange.adapters_library.gated import add_gated
from adapterhub.interchange.adapters_library.places import (
    Held,
    check_places,
    common,
    layer_number,
    note_dropout,
    sublayer_at,
    wanted_sites,
)
from adapterhub.interchange.specs import sites_option
from adapterhub.interchange.translation import Translation
from adapterhub.methods.bottleneck import Houlsby, Parallel, Pfeiffer, ScaledParallel
from adapterhub.methods.compacter import Compacter

_ONE = torch.ones(1)
_ROLES = {"mh_adapter": "attn", "cross_adapter": "cross", "output_adapter": "ffn"}
_ACTIVATIONS = {"leakyrelu": "leaky_relu"}
_NAMES = {"adapter_down.0.": "down.", "adapter_up.": "up."}
_KRONECKER = {"W_left": "s", "W_right": "t", "b": "bias"}
_KNOWN_RULE = {
    "factorized_phm_W": True,
    "shared_phm_rule": True,
    "phm_bias": True,
    "shared_W_phm": False,
    "factorized_phm_rule": False,
}


@dataclass(frozen=True)
class _Found:
    """What a checkpoint has of bottlenecks; a network's width and tensors by its sublayer's id."""

    options: Mapping[str, Any]
    sizes: Mapping[str, int]
    networks: Mapping[str, tuple[Site, dict[str, Tensor]]]
    held: Held


def import_bottleneck(part: MethodConfig, held: Held, draft: Translation) -> None:
    """Translate the bottleneck adapters of a checkpoint."""
    options = part.options
    roles = [role for flag, role in _ROLES.items() if options[flag]]
    wanted = wanted_sites(draft.anatomy, roles, options["leave_out"])
    networks = _networks(held, wanted, draft)
    note_dropout(options, draft)
    check_places((site for site, _ in networks.values()), wanted, draft)
    sizes = {site.id: _size(draft.anatomy, site, options["reduction_factor"]) for site in wanted}
    source = _source(options, draft)
    name = options["non_linearity"].lower()
    activation = _ACTIVATIONS.get(name, name)
    if activation not in ACT2FN:
        draft.problems.append(f"non_linearity: {name!a} is not known here")
    if not wanted:
        draft.problems.append("bottleneck: its options name no sublayer of this backbone")
    if draft.problems:
        return
    spec = {
        "activation": activation,
        "source": source,
        "sites": sites_option(draft.anatomy, wanted),
    }
    gated, low_rank = options["use_gating"], options["phm_layer"]
    translate = _gated if gated else _compacter if low_rank else _bottleneck
    translate(_Found(options, sizes, networks, held), spec, draft)


def _networks(
    held: Held, wanted: Iterable[Site], draft: Translation
) -> dict[str, tuple[Site, dict[str, Tensor]]]:
    """The tensors of each sublayer that the options name; another part may have others."""
    ids = {site.id for site in wanted}

    def is_wanted(path: str) -> bool:
        site = sublayer_at(draft.anatomy, path)
        return site is not None and site.id in ids

    found: dict[str, tuple[Site, dict[str, Tensor]]] = {}
    for path, parameter, tensor in held.take("adapters", is_wanted):
        if site := sublayer_at(draft.anatomy, path):
            found.setdefault(site.id, (site, {}))[1][parameter] = tensor
    return found


def _size(anatomy: Anatomy, site: Site, factor: float | Mapping[str, float]) -> int:
    if isinstance(factor, Mapping):
        factor = factor.get(str(layer_number(anatomy, site)), factor.get("default", 0))
    return max(int(site.d_out // factor), 1) if factor > 0 else 1


def _source(options: Mapping[str, Any], draft: Translation) -> str:
    if options["is_parallel"]:
        return "residual"
    if options["original_ln_before"] and options["residual_before_ln"] is not True:
        draft.problems.append(
            f"residual_before_ln: {options['residual_before_ln']!r:.40} puts the block in the "
            "place of the output, which is not expressible"
        )
    return "block" if options["original_ln_before"] else "output"


def _bottleneck(found: _Found, spec: dict[str, Any], draft: Translation) -> None:
    options = found.options
    learned = isinstance(options["scaling"], str)
    spec |= common("size", found.sizes) | {"scale": 1.0 if learned else float(options["scaling"])}
    if options["is_parallel"]:
        method = Parallel.name if spec["scale"] == 1 else ScaledParallel.name
    else:
        method = Houlsby.name if options["mh_adapter"] else Pfeiffer.name
    draft.methods.append({method: spec})
    if learned:
        draft.notes.append("learned scales are folded into up")
    for site_id, (_, tensors) in found.networks.items():
        scale = tensors.pop("scaling", _ONE) if learned else _ONE
        _take(tensors, scale, f"{site_id}.{method}", draft)


def _gated(found: _Found, spec: dict[str, Any], draft: Translation) -> None:
    options = found.options
    if options["is_parallel"] or options["phm_layer"]:
        draft.problems.append("use_gating: of bottlenecks, only sequential ones are expressible")
    if len(set(found.sizes.values())) > 1:
        draft.problems.append("reduction_factor: with use_gating all sites have one size")
    if draft.problems:
        return
    shared = {name: spec[name] for name in ("source", "activation")}
    own = {"size": next(iter(found.sizes.values()))} | shared
    add_gated(own, (site for site, _ in found.networks.values()), draft)
    scaling = options["scaling"]
    if scaling != 1:
        draft.notes.append("scales of gated adapters are folded into up")
    for site_id, (_, tensors) in found.networks.items():
        place = f"{site_id}.{Pfeiffer.name}"
        for name in [name for name in tensors if name in ("gate.weight", "gate.bias")]:
            draft.tensors[f"{place}.{name}"] = tensors.pop(name)
        learned = isinstance(scaling, str)
        scale = tensors.pop("scaling", _ONE) if learned else torch.tensor([float(scaling)])
        _take(tensors, scale, f"{place}.update", draft)


def _take(tensors: Mapping[str, Tensor], scale: Tensor, place: str, draft: Translation) -> None:
    """The tensors of one network, to this place; its scale, (1,) or (d,), is folded into up."""
    for name, tensor in tensors.items():
        own = _renamed(name, {"weight": "weight", "bias": "bias"})
        if own is None:
            draft.problems.append(f"{place}: {name} has no place here")
        elif own.startswith("up."):
            if scale.dim() != 1 or not tensor.dim() or len(scale) not in (1, len(tensor)):
                draft.problems.append(f"{place}: a scale of shape {tuple(scale.shape)} at {name}")
                continue
            tensor = tensor * (scale[:, None] if tensor.dim() == 2 else scale)
        draft.tensors[f"{place}.{own}"] = tensor


def _compacter(found: _Found, spec: dict[str, Any], draft: Translation) -> None:
    options = found.options
    problems = [
        f"{name}: {options[name]!r:.40}, only {known} is expressible"
        for name, known in _KNOWN_RULE.items()
        if options[name] is not known
    ]
    if options["is_parallel"] or isinstance(options["scaling"], str):
        problems.append("phm_layer: only sequential adapters with a fixed scale are expressible")
    if len(set(found.sizes.values())) > 1:
        problems.append("reduction_factor: with phm_layer all sites have one size")
    if problems:
        draft.problems += problems
        return
    method, scale = Compacter.name, options["scaling"]
    size = next(iter(found.sizes.values()))
    spec |= {"size": size, "n": options["phm_dim"], "rank": options["phm_rank"]}
    draft.methods.append({method: spec})
    for site_id, (_, tensors) in found.networks.items():
        for name, tensor in tensors.items():
            own = _renamed(name, _KRONECKER)
            if own is None:
                draft.problems.append(f"{site_id}: {name} has no place here")
            elif own in ("up.t", "up.bias"):
                tensor = tensor * scale
            draft.tensors[f"{site_id}.{method}.{own}"] = tensor
    first = next(i for i in draft.anatomy.sites if i in found.networks)
    for _, name, tensor in found.held.take("shared_parameters"):
        if name == "phm_rule":
            draft.tensors[f"{first}.{method}.shared.A"] = tensor
        else:
            draft.problems.append(f"shared_parameters: {name} has no place here")


def _renamed(name: str, parameters: Mapping[str, str]) -> str | None:
    """The name of a network's tensor here, None where it has none."""
    for theirs, own in _NAMES.items():
        if name.startswith(theirs) and name.removeprefix(theirs) in parameters:
            return own + parameters[name.removeprefix(theirs)]
    return None
