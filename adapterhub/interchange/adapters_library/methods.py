"""Translate the methods of `adapters`: bottlenecks, Compacter, LoRA, (IA)^3, prefixes, and gates.

Bottlenecks and Compacter: y' = y + s up(f(down(source))). Sequential ones read the output of a
sublayer or, with `original_ln_before`, the block; parallel ones read the residual stream. A learned
scale s is folded into up, and so is the scale of a gated adapter.

LoRA and (IA)^3 are two modes of one configuration. Its (IA)^3 always rescales a projection's
output, also the output of the first feed-forward projection, before the activation. On Llama and
Mistral the names of the feed-forward projections are swapped. A fused projection stores A of all
adapted parts stacked, and B likewise.

Prefixes: one tensor or network for all layers of a kind.

    flat      control_trans, (length, layers, keys and values, d_kv) in one row
    network   control_trans.2(f(control_trans.0(wte))), whose output is stored
    gate      prefix_gates at each attention, (1, d) and (1,)

With relative positions, a prefix counts as positions of keys but not of queries: our
`positions: keys`. `adapters` computes their bias in the first layer; a layer with another prefix
length, or without a prefix, then has no bias at all. That is not supported.

Gates, g = mean over the tokens i of sigmoid(w z_i + b), become the parts of one unipelt with
`gate: sequence`. In a decoder that gate depends on later tokens, and during generation only on the
tokens of the current step. It is therefore refused on a model that generates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from adapterhub.anatomy.sites import Anatomy, Site, sites_option
from adapterhub.interchange.adapters_library.files import MethodConfig
from adapterhub.interchange.adapters_library.module_paths import (
    RemainingTensors,
    attention_at,
    check_sites,
    layer_number,
    projections_at,
    sites_with_roles,
    sublayer_at,
)
from adapterhub.interchange.adapters_library.states import import_invertible
from adapterhub.interchange.translation import Translation, size_options
from adapterhub.methods.bottleneck import Houlsby, Parallel, Pfeiffer, ScaledParallel
from adapterhub.methods.common.base import activation_module
from adapterhub.methods.compacter import Compacter
from adapterhub.methods.ia3 import IA3
from adapterhub.methods.lora import LoRA
from adapterhub.methods.prefix import Prefix
from adapterhub.methods.unipelt import UniPELT

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
    spec: dict[str, Any] = {
        "activation": _activation(options, translation),
        "source": _source(options, translation),
        "sites": sites_option(anatomy, named),
    }
    if options["inv_adapter"]:
        import_invertible(options, spec["activation"], remaining, translation)
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
    """Take the tensors at the named sublayers; other tensors may belong to another part."""
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


_FLAT = {"control_trans"}
_NETWORK = {"wte.weight", *(f"control_trans.{n}.{p}" for n in (0, 2) for p in ("weight", "bias"))}


def import_adapters_prefix(
    part: MethodConfig, remaining: RemainingTensors, translation: Translation
) -> None:
    """Translate prefixes."""
    options, length = part.options, part.options["prefix_length"]
    translation.note_dropout(options["dropout"])
    tensors_by_kind = _tensors_by_kind(remaining, translation)
    with_prefix: list[Site] = []
    for kind, sites in _sites_by_kind(translation.anatomy, options).items():
        tensors = tensors_by_kind.pop(kind, None)
        tensors = tensors or tensors_by_kind.pop(kind.removesuffix("_prefix"), {})
        if _import_kind(kind, sites, tensors, options, translation):
            with_prefix += sites
    translation.problems += [f"{kind}: unexpected prefix" for kind in sorted(tensors_by_kind)]
    spec = {"length": length} | _positions(with_prefix, translation)
    if with_prefix and options["use_gating"]:
        _import_gates(options, remaining, translation)
        add_gated(spec, with_prefix, translation)
    elif with_prefix:
        spec["sites"] = sites_option(translation.anatomy, with_prefix)
        translation.methods.append({Prefix.name: spec})


def _import_kind(
    kind: str,
    sites: list[Site],
    tensors: Mapping[str, Tensor],
    options: Mapping[str, Any],
    translation: Translation,
) -> bool:
    """Add the prefixes of one kind; return False if there are problems."""
    if tensors.keys() != (_FLAT if options["flat"] else _NETWORK):
        names = ", ".join(sorted(tensors)) or "none"
        translation.problems.append(f"{kind}: has the tensors {names}")
        return False
    length, width = options["prefix_length"], sites[0].d_out
    values = _values(tensors, length, 2 * width * len(sites), options["non_linearity"])
    if values is None or any(site.d_out != width for site in sites):
        translation.problems.append(f"{kind}: shapes do not fit {len(sites)} layers of this model")
        return False
    inner = "prefix." if options["use_gating"] else ""
    pairs = values.view(length, len(sites), 2, width).unbind(1)
    for site, pair in zip(sites, pairs, strict=True):
        name = f"{site.id}.{Prefix.name}.{inner}prefix"
        translation.tensors[name] = pair.transpose(0, 1).contiguous()
    return True


def _import_gates(
    options: Mapping[str, Any], remaining: RemainingTensors, translation: Translation
) -> None:
    if not options["shared_gating"]:
        translation.problems.append(
            "shared_gating: false, separate gates for keys and values are not supported"
        )
    for path, name, tensor in remaining.take("prefix_gates"):
        site = attention_at(translation.anatomy, path.removesuffix(".prefix_tuning"))
        if site is None:
            translation.problems.append(f"{path}: unexpected gate")
        else:
            translation.tensors[f"{site.id}.{Prefix.name}.gate.{name}"] = tensor


def _positions(with_prefix: Iterable[Site], translation: Translation) -> dict[str, Any]:
    """Return the option `positions`; refuse relative positions with prefixes in some layers."""
    layers = Counter(site.stack for site in with_prefix if site.bias)
    for stack, count in layers.items():
        depth = translation.anatomy.depth(stack)
        if count < depth:
            translation.problems.append(
                f"leave_out: {count} of the {depth} layers of the {stack} have a prefix; adapters "
                "computes no bias of relative positions after the first layer that differs"
            )
    return {"positions": "keys"} if layers else {}


def _tensors_by_kind(
    remaining: RemainingTensors, translation: Translation
) -> dict[str, dict[str, Tensor]]:
    """Group the tensors by kind; the files repeat them for every layer."""
    groups: dict[str, dict[str, Tensor]] = {}
    for path, name, tensor in remaining.take("prefix_tunings"):
        kind, _, parameter = name.partition(".")
        first = groups.setdefault(kind, {}).setdefault(parameter, tensor)
        if not torch.equal(first, tensor):
            translation.problems.append(f"{path}: another copy of {name} differs")
    return groups


def _sites_by_kind(anatomy: Anatomy, options: Mapping[str, Any]) -> dict[str, list[Site]]:
    """Return the attentions of each kind of prefix, in layer order."""
    both = len(anatomy.stacks) == 2
    self_attentions, cross_attentions = (
        sites_with_roles(anatomy, [role], options["leave_out"]) for role in ("attn.kv", "cross.kv")
    )
    kinds = {
        "encoder_prefix": [s for s in self_attentions if both and s.stack == "encoder"],
        "self_prefix": [s for s in self_attentions if not both or s.stack == "decoder"],
        "cross_prefix": cross_attentions,
    }
    return {kind: sites for kind, sites in kinds.items() if sites and options.get(kind, True)}


def _values(tensors: Mapping[str, Tensor], length: int, width: int, name: str) -> Tensor | None:
    """Return the prefixes, length * width values; None if shapes do not fit.

    Checks the shapes of a network before computing with them.
    """
    if tensors.keys() == _FLAT:
        flat = tensors["control_trans"]
        return flat if flat.numel() == length * width else None
    table = tensors["wte.weight"]
    weights = [tensors[f"control_trans.{n}.weight"] for n in (0, 2)]
    biases = [tensors[f"control_trans.{n}.bias"] for n in (0, 2)]
    d_table, d_hidden = table.shape[-1:], biases[0].shape
    expected = [(length, *d_table), (*d_hidden, *d_table), (width, *d_hidden), (width,)]
    shapes = [tuple(t.shape) for t in (table, *weights, biases[1])]
    if shapes != expected or biases[0].dim() != 1:
        return None
    hidden = activation_module(name.lower())(F.linear(table, weights[0], biases[0]))
    return F.linear(hidden, weights[1], biases[1])


def add_gated(options: Mapping[str, Any], sites: Iterable[Site], translation: Translation) -> None:
    """Add a gated part to the translation's one unipelt."""
    sites = list(sites)
    in_decoder = [site.id for site in sites if site.stack == "decoder"]
    if in_decoder and translation.anatomy.backbone.generates:
        translation.problems.append(
            f"use_gating: {in_decoder[0]} and {len(in_decoder) - 1} more sites of a decoder are "
            "gated by the mean over the sequence, which includes later tokens and changes during "
            "generation; only models that do not generate, such as classifiers, are supported"
        )
    added = {"gate": "sequence", **options, "sites": sites_option(translation.anatomy, sites)}
    for number, method in enumerate(translation.methods):
        if unipelt := method.get(UniPELT.name):
            if duplicates := sorted(options.keys() & unipelt.keys()):
                translation.problems.append(
                    f"use_gating: several parts have {', '.join(duplicates)}"
                )
            merged = {**unipelt, **added, "sites": [*unipelt["sites"], *added["sites"]]}
            translation.methods[number] = {UniPELT.name: merged}
            return
    translation.methods.append({UniPELT.name: added})
