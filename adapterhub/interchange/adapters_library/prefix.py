"""Prefixes of `adapters`: one tensor or network for all layers of a kind.

flat:     control_trans, (length, layers, keys and values, d_kv) in one row
network:  control_trans.2(f(control_trans.0(wte))), of which the output is stored
gate:     prefix_gates at each attention, (1, d) and (1,)

With relative positions, a prefix counts as positions of keys but not of queries: our
`positions: keys`. `adapters` computes their bias in the first layer; a layer with another prefix
length, or without a prefix, then has no bias at all. That is not supported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterhub.anatomy.site_patterns import sites_option
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.interchange.adapters_library.files import MethodConfig
from adapterhub.interchange.adapters_library.gated import add_gated
from adapterhub.interchange.adapters_library.module_paths import (
    RemainingTensors,
    attention_at,
    sites_with_roles,
)
from adapterhub.interchange.translation import Translation
from adapterhub.methods._options import activation_module
from adapterhub.methods.prefix import Prefix

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
