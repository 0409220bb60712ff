"""Bottleneck adapters and Compacter of `adapters`.

    y' = y + s up(f(down(source)))

Its sequential adapters read the output of a sublayer or, with `original_ln_before`, the block; its
parallel ones read the residual stream. A learned scale s is folded into up, and so is the scale of
a gated adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from adapterhub.anatomy.site_patterns import sites_option
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.interchange.adapters_library.files import MethodConfig
from adapterhub.interchange.adapters_library.gated import add_gated
from adapterhub.interchange.adapters_library.module_paths import (
    RemainingTensors,
    check_sites,
    layer_number,
    sites_with_roles,
    sublayer_at,
)
from adapterhub.interchange.method_options import size_options
from adapterhub.interchange.translation import Translation
from adapterhub.methods.bottleneck import Houlsby, Parallel, Pfeiffer, ScaledParallel
from adapterhub.methods.compacter import Compacter

_ONE = torch.ones(1)
_ROLES = {"mh_adapter": "attn", "cross_adapter": "cross", "output_adapter": "ffn"}
_ACTIVATIONS = {"leakyrelu": "leaky_relu"}
_LAYERS = {"adapter_down.0.": "down.", "adapter_up.": "up."}
_LINEAR = {"weight": "weight", "bias": "bias"}
_KRONECKER = {"W_left": "s", "W_right": "t", "b": "bias"}
_GATE = ("gate.weight", "gate.bias")
_COMPACTER_OPTIONS = {
    "factorized_phm_W": True,
    "shared_phm_rule": True,
    "phm_bias": True,
    "shared_W_phm": False,
    "factorized_phm_rule": False,
}


@dataclass(frozen=True)
class _Networks:
    """The bottlenecks of a checkpoint.

    `sizes` are the bottleneck widths by site id, `tensors` the tensors of each network by site id.
    """

    options: Mapping[str, Any]
    sites: Mapping[str, Site]
    sizes: Mapping[str, int]
    tensors: Mapping[str, dict[str, Tensor]]
    remaining: RemainingTensors


def import_bottleneck(
    part: MethodConfig, remaining: RemainingTensors, translation: Translation
) -> None:
    """Translate bottleneck adapters or Compacter."""
    options, anatomy = part.options, translation.anatomy
    roles = [role for flag, role in _ROLES.items() if options[flag]]
    named = sites_with_roles(anatomy, roles, options["leave_out"])
    sites, tensors = _take_networks(remaining, named, anatomy)
    translation.note_dropout(options["dropout"])
    check_sites(sites.values(), named, translation)
    spec = {
        "activation": _activation(options, translation),
        "source": _source(options, translation),
        "sites": sites_option(anatomy, named),
    }
    if not named:
        translation.problems.append("bottleneck: the options name no sublayer of this backbone")
    if translation.problems:
        return
    sizes = {site.id: _size(anatomy, site, options["reduction_factor"]) for site in named}
    networks = _Networks(options, sites, sizes, tensors, remaining)
    gated, low_rank = options["use_gating"], options["phm_layer"]
    add = _add_gated if gated else _add_compacter if low_rank else _add_bottleneck
    add(networks, spec, translation)


def _take_networks(
    remaining: RemainingTensors, named: Iterable[Site], anatomy: Anatomy
) -> tuple[dict[str, Site], dict[str, dict[str, Tensor]]]:
    """Take the tensors at the named sublayers; others may belong to another part."""
    ids = {site.id for site in named}

    def is_named(path: str) -> bool:
        site = sublayer_at(anatomy, path)
        return site is not None and site.id in ids

    sites: dict[str, Site] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for path, parameter, tensor in remaining.take("adapters", is_named):
        if site := sublayer_at(anatomy, path):
            sites[site.id] = site
            tensors.setdefault(site.id, {})[parameter] = tensor
    return sites, tensors


def _size(anatomy: Anatomy, site: Site, factor: float | Mapping[str, float]) -> int:
    """Return the bottleneck width at a site."""
    if isinstance(factor, Mapping):
        factor = factor.get(str(layer_number(anatomy, site)), factor.get("default", 0))
    return max(int(site.d_out // factor), 1) if factor > 0 else 1


def _activation(options: Mapping[str, Any], translation: Translation) -> str:
    name: str = options["non_linearity"].lower()
    activation = _ACTIVATIONS.get(name, name)
    if activation not in ACT2FN:
        translation.problems.append(f"non_linearity: unknown activation {name!a}")
    return activation


def _source(options: Mapping[str, Any], translation: Translation) -> str:
    if options["is_parallel"]:
        return "residual"
    if options["original_ln_before"] and options["residual_before_ln"] is not True:
        translation.problems.append(
            f"residual_before_ln: {options['residual_before_ln']!r:.40} replaces the output by the "
            "block, which is not supported"
        )
    return "block" if options["original_ln_before"] else "output"


def _common_size(networks: _Networks, flag: str, translation: Translation) -> int:
    """Return the width of all networks; refuse different ones."""
    if len(set(networks.sizes.values())) > 1:
        translation.problems.append(f"reduction_factor: with {flag}, all sites need one size")
    return next(iter(networks.sizes.values()))


def _add_bottleneck(networks: _Networks, spec: dict[str, Any], translation: Translation) -> None:
    options = networks.options
    learned = isinstance(options["scaling"], str)
    scaling = 1.0 if learned else float(options["scaling"])
    spec |= size_options("size", networks.sizes) | {"scale": scaling}
    if options["is_parallel"]:
        method = Parallel.name if scaling == 1 else ScaledParallel.name
    else:
        method = Houlsby.name if options["mh_adapter"] else Pfeiffer.name
    translation.methods.append({method: spec})
    if learned:
        translation.notes.append("learned scales are folded into up")
    for site_id, tensors in networks.tensors.items():
        scale = tensors.pop("scaling", _ONE) if learned else _ONE
        _add_network(tensors, scale, f"{site_id}.{method}", translation)


def _add_gated(networks: _Networks, spec: dict[str, Any], translation: Translation) -> None:
    options, scaling = networks.options, networks.options["scaling"]
    if options["is_parallel"] or options["phm_layer"]:
        translation.problems.append("use_gating: only sequential bottlenecks are supported")
    size = _common_size(networks, "use_gating", translation)
    if translation.problems:
        return
    part_options = {"size": size, "source": spec["source"], "activation": spec["activation"]}
    add_gated(part_options, networks.sites.values(), translation)
    if scaling != 1:
        translation.notes.append("scales of gated adapters are folded into up")
    for site_id, tensors in networks.tensors.items():
        prefix = f"{site_id}.{Pfeiffer.name}"
        for name in [name for name in tensors if name in _GATE]:
            translation.tensors[f"{prefix}.{name}"] = tensors.pop(name)
        learned = isinstance(scaling, str)
        scale = tensors.pop("scaling", _ONE) if learned else torch.tensor([float(scaling)])
        _add_network(tensors, scale, f"{prefix}.update", translation)


def _add_network(
    tensors: Mapping[str, Tensor], scale: Tensor, prefix: str, translation: Translation
) -> None:
    """Add the tensors of one network; fold its scale, (1,) or (d,), into up."""
    for name, tensor in tensors.items():
        new_name = _renamed(name, _LINEAR)
        if new_name is None:
            translation.problems.append(f"{prefix}: unexpected tensor {name}")
        elif new_name.startswith("up."):
            if scale.dim() != 1 or not tensor.dim() or len(scale) not in (1, len(tensor)):
                translation.problems.append(
                    f"{prefix}: a scale of shape {tuple(scale.shape)} at {name}"
                )
                continue
            tensor = tensor * (scale[:, None] if tensor.dim() == 2 else scale)
        translation.tensors[f"{prefix}.{new_name}"] = tensor


def _add_compacter(networks: _Networks, spec: dict[str, Any], translation: Translation) -> None:
    options = networks.options
    translation.problems += [
        f"{name}: {options[name]!r:.40}, only {supported} is supported"
        for name, supported in _COMPACTER_OPTIONS.items()
        if options[name] is not supported
    ]
    if options["is_parallel"] or isinstance(options["scaling"], str):
        translation.problems.append("phm_layer: must be sequential, with a fixed scale")
    size = _common_size(networks, "phm_layer", translation)
    if translation.problems:
        return
    method = Compacter.name
    spec |= {"size": size, "n": options["phm_dim"], "rank": options["phm_rank"]}
    translation.methods.append({method: spec})
    for site_id, tensors in networks.tensors.items():
        for name, tensor in tensors.items():
            new_name = _renamed(name, _KRONECKER)
            if new_name is None:
                translation.problems.append(f"{site_id}: unexpected tensor {name}")
            scaled = new_name in ("up.t", "up.bias")
            value = tensor * options["scaling"] if scaled else tensor
            translation.tensors[f"{site_id}.{method}.{new_name}"] = value
    first = next(i for i in translation.anatomy.sites if i in networks.tensors)
    for _, name, tensor in networks.remaining.take("shared_parameters"):
        if name == "phm_rule":
            translation.tensors[f"{first}.{method}.shared.A"] = tensor
        else:
            translation.problems.append(f"shared_parameters: unexpected tensor {name}")


def _renamed(name: str, parameters: Mapping[str, str]) -> str | None:
    """Return our name of a network's tensor, None if unknown."""
    for prefix, layer in _LAYERS.items():
        if name.startswith(prefix) and name.removeprefix(prefix) in parameters:
            return layer + parameters[name.removeprefix(prefix)]
    return None
