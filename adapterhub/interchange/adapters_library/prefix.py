"""Prefixes of `adapters`: one tensor or one network holds those of all layers of a kind.

flat:     control_trans, (length, layers, keys and values, d_kv) in one row
network:  control_trans.2(f(control_trans.0(wte))), of which the values are kept
gate:     prefix_gates at each attention, (1, d) and (1,)

Where positions are relative it counts a prefix as positions of keys, and not of queries, which is
our `positions: keys`. It computes their bias in the first layer, and where another layer has a
prefix of another length, or none, it goes on without any bias: that is not expressible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.interchange.adapters_library.files import MethodConfig
from adapterhub.interchange.adapters_library.gated import add_gated
from adapterhub.interchange.adapters_library.places import (
    Held,
    attention_at,
    note_dropout,
    same,
    wanted_sites,
)
from adapterhub.interchange.specs import sites_option
from adapterhub.interchange.translation import Translation
from adapterhub.methods._options import activation_module
from adapterhub.methods.prefix import Prefix

_FLAT = {"control_trans"}
_NETWORK = {"wte.weight", *(f"control_trans.{n}.{p}" for n in (0, 2) for p in ("weight", "bias"))}


def import_adapters_prefix(part: MethodConfig, held: Held, draft: Translation) -> None:
    """Translate the prefixes of a checkpoint."""
    options, length = part.options, part.options["prefix_length"]
    inner = "prefix." if options["use_gating"] else ""
    note_dropout(options, draft)
    groups = _groups(held, draft)
    chosen: list[Site] = []
    for kind, sites in _kinds(draft.anatomy, options).items():
        tensors = groups.pop(kind, None) or groups.pop(kind.removesuffix("_prefix"), {})
        if tensors.keys() != (_FLAT if options["flat"] else _NETWORK):
            draft.problems.append(f"{kind}: has the tensors {', '.join(sorted(tensors)) or 'none'}")
            continue
        width = sites[0].d_out
        values = _values(tensors, length, 2 * width * len(sites), options["non_linearity"])
        if values is None or any(site.d_out != width for site in sites):
            draft.problems.append(f"{kind}: shapes that are not those of {len(sites)} layers here")
            continue
        pairs = values.view(length, len(sites), 2, width).unbind(1)
        for site, pair in zip(sites, pairs, strict=True):
            name = f"{site.id}.{Prefix.name}.{inner}prefix"
            draft.tensors[name] = pair.transpose(0, 1).contiguous()
        chosen += sites
    draft.problems += [f"{kind}: has no place here" for kind in sorted(groups)]
    spec = {"length": length} | _positions(chosen, draft)
    if chosen and options["use_gating"]:
        _import_gates(options, held, draft)
        add_gated(spec, chosen, draft)
    elif chosen:
        draft.methods.append({Prefix.name: spec | {"sites": sites_option(draft.anatomy, chosen)}})


def _import_gates(options: Mapping[str, object], held: Held, draft: Translation) -> None:
    if not options["shared_gating"]:
        draft.problems.append("shared_gating: false, keys and values cannot have a gate each")
    for path, name, tensor in held.take("prefix_gates"):
        site = attention_at(draft.anatomy, path.removesuffix(".prefix_tuning"))
        if site is None:
            draft.problems.append(f"{path}: has no place here")
        else:
            draft.tensors[f"{site.id}.{Prefix.name}.gate.{name}"] = tensor


def _positions(chosen: Iterable[Site], draft: Translation) -> dict[str, Any]:
    """The option for what counts positions behind the prefixes at these sites."""
    have = Counter(site.stack for site in chosen if site.bias)
    draft.problems += [
        f"leave_out: {count} of the {draft.anatomy.depth(stack)} layers of the {stack} have a "
        "prefix, and adapters computes no bias of relative positions behind the first that differs"
        for stack, count in have.items()
        if count < draft.anatomy.depth(stack)
    ]
    return {"positions": "keys"} if have else {}


def _groups(held: Held, draft: Translation) -> dict[str, dict[str, Tensor]]:
    """The tensors by kind; the files repeat them under the name of every layer."""
    groups: dict[str, dict[str, Tensor]] = {}
    for path, name, tensor in held.take("prefix_tunings"):
        kind, _, parameter = name.partition(".")
        known = groups.setdefault(kind, {}).setdefault(parameter, tensor)
        if not same(known, tensor):
            draft.problems.append(f"{path}: another copy of {name} differs")
    return groups


def _kinds(anatomy: Anatomy, options: Mapping[str, object]) -> dict[str, list[Site]]:
    """The attentions of each kind of prefix, in the order of their layers."""
    left_out = options["leave_out"]
    assert isinstance(left_out, (list, tuple))
    both = len(anatomy.stacks) == 2
    sites = {role: wanted_sites(anatomy, [f"{role}.kv"], left_out) for role in ("attn", "cross")}
    kinds = {
        "encoder_prefix": [s for s in sites["attn"] if both and s.stack == "encoder"],
        "self_prefix": [s for s in sites["attn"] if not both or s.stack == "decoder"],
        "cross_prefix": sites["cross"],
    }
    return {kind: found for kind, found in kinds.items() if found and options.get(kind, True)}


def _values(tensors: Mapping[str, Tensor], length: int, width: int, name: str) -> Tensor | None:
    """The prefixes, length width numbers; None where the shapes do not fit, before they are
    multiplied."""
    if tensors.keys() == _FLAT:
        flat = tensors["control_trans"]
        return flat if flat.numel() == length * width else None
    table = tensors["wte.weight"]
    weights = [tensors[f"control_trans.{n}.weight"] for n in (0, 2)]
    biases = [tensors[f"control_trans.{n}.bias"] for n in (0, 2)]
    inner = (table.shape[-1:], biases[0].shape)
    shapes = [(length, *inner[0]), (*inner[1], *inner[0]), (width, *inner[1]), (width,)]
    if [tuple(t.shape) for t in (table, *weights, biases[1])] != shapes or biases[0].dim() != 1:
        return None
    hidden = activation_module(name.lower())(F.linear(table, weights[0], biases[0]))
    return F.linear(hidden, weights[1], biases[1])
