"""Structural discovery: derive the row of an architecture without one from its modules.

Layers are the elements of a module list in which some have attention: a module with projections
named as query, key and value, or as those of latent attention. Lists apart from these are stacks
too, if all their elements have projections. The rest follows from names and sizes, with d the width
of a layer:

    attention output    heads -> d, in the same module as q, k and v or in its parent
    feed-forward        up (and gate): d -> inner, down: inner -> d
    norms               by the sublayer that contains them, the others by their order
    keyvalue            where attention uses transformers' attention interface

A name alone is not enough: the sizes must fit too. A fused projection is not split, because its
structure does not show its layout. Of two networks the larger one is the feed-forward, and of two
attentions the first is `attn`; other projections keep their names (further_sites.py). What is not
found is no site, and methods say so: see `select_sites`.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from adapterhub.anatomy.family import WHOLE, Family, Stack
from adapterhub.anatomy.forward_source import returns_tuple
from adapterhub.anatomy.further_sites import MIXER, further_sites, kind_of, mixer_of, own_name
from adapterhub.anatomy.layer_paths import first_existing
from adapterhub.anatomy.norm_roles import norm_roles
from adapterhub.anatomy.projections import in_features, is_projection, out_features, usual_size
from adapterhub.anatomy.sites import CHILD, join
from adapterhub.anatomy.stack_names import named
from adapterhub.anatomy.tokens import token_table

_SUFFIX = re.compile(r"_(proj|projection|lin|linear|layer)$")
_NAMES = {
    "q": ("q", "query", "wq"),
    "k": ("k", "key", "wk"),
    "v": ("v", "value", "wv"),
    "o": ("o", "out", "output", "dense", "c", "wo", "proj", "projection"),
    "qkv": ("qkv", "query_key_value", "wqkv", "c_attn", "in"),
    # Latent attention: keys and values, often queries too, through a small bottleneck.
    "q_a": ("q_a",),
    "q_b": ("q_b",),
    "kv_a": ("kv_a", "kv_a_proj_with_mqa"),
    "kv_b": ("kv_b",),
}
# Attention without a softmax, which has states instead of keys and values.
_RECURRENT = re.compile(r"linear_?att|delta|lightning|mamba|rwkv|gla", re.IGNORECASE)
_CROSS = re.compile(r"cross|enc_?dec|encoder_att", re.IGNORECASE)
_EMBEDDING = re.compile(r"emb|^wte$|^wpe$|^shared$|^project_in$", re.IGNORECASE)
_SEPARATE = ("q", "k", "v", "q_a", "q_b", "kv_a", "kv_b")


def discover(model: PreTrainedModel) -> Family:
    """Derive the row of a model from its structure; it has no stacks if there are no layers."""
    base = cast(PreTrainedModel, model.base_model)
    lists = _layer_lists(base)
    stacks = [_stack(model, path, layers, alone=len(lists) == 1) for path, layers in lists]
    stacks = named(stacks, by_input=not model.config.is_encoder_decoder)
    row = Family(
        (model.config.model_type,),
        tuple(sorted(stacks, key=lambda stack: stack.name in ("decoder", "language"))),
        tuple(_below(base, [stack.layers for stack in stacks])),
        constants=tuple(_constants(base)),
    )
    return replace(row, positions_from_padding=_counts_from_padding(base, row))


def _role(name: str) -> str | None:
    stem = _SUFFIX.sub("", name.lower())
    return next((role for role, names in _NAMES.items() if stem in names), None)


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules except those of adapters."""
    return ((p, m) for p, m in module.named_modules() if CHILD not in p.split("."))


def _projections(module: nn.Module) -> dict[str, nn.Module]:
    return {p: m for p, m in _modules(module) if is_projection(m) and not returns_tuple(m)}


def _attentions(layer: nn.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the attention modules inside a layer, with the names of their projections by role."""
    for path, module in _modules(layer):
        children = {n: m for n, m in module.named_children() if is_projection(m)}
        projections = {role: name for name in children if (role := _role(name)) is not None}
        by_role = {role: children[name] for role, name in projections.items()}
        if any(map(returns_tuple, by_role.values())):
            continue
        # A layer may use the keys and values of an earlier one.
        shares = {"q", "o"} == projections.keys() == set(map(_role, children))
        whole = shares or {"q", "k", "v"} <= projections.keys()
        latent = {"kv_a", "kv_b"} <= projections.keys()
        if not latent and _RECURRENT.search(own_name(module, layer)):
            continue
        mixes = MIXER.search(f"{path.rpartition('.')[2]} {own_name(module, layer)}")
        if whole or latent or (not mixes and _is_fused(by_role)):
            yield path, projections


def _is_fused(projections: Mapping[str, nn.Module]) -> bool:
    """Return whether a projection has the size of q, k and v together, as far as that is known."""
    if "qkv" not in projections:
        return False
    if "o" not in projections:
        return True
    queries = in_features(projections["o"])
    keys, odd = divmod(out_features(projections["qkv"]) - queries, 2)
    return not odd and keys > 0 and queries % keys == 0


def _layer_lists(base: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """List the module lists of layers: those with attention, and those apart from them.

    Of nested lists whose layers have one class and attention only the innermost, of others the
    outermost; lists in a list (`groups.0.layers`, `groups.1.layers`) are one entry
    (`groups.*.layers`) with all modules.
    """
    every = {p: list(m) for p, m in _modules(base) if isinstance(m, nn.ModuleList) and len(m)}
    alike = {p: m for p, m in every.items() if len(set(map(type, m))) == 1 and _attend(m)}
    chosen = {p: m for p, m in alike.items() if not any(o.startswith(f"{p}.") for o in alike)}
    for path, layers in every.items():
        apart = not any(_nested(path, other) for other in chosen)
        if apart and (_attend(layers) or (len(layers) > 1 and all(map(_is_layer, layers)))):
            chosen[path] = layers
    if not chosen:  # of convolutions alone, say: they have layers, if no projections
        outer = {p: m for p, m in every.items() if len(m) > 1 and all(map(_has_parameters, m))}
        chosen = {p: m for p, m in outer.items() if not any(p.startswith(f"{o}.") for o in outer)}
    specs: dict[str, list[nn.Module]] = {}
    for path in sorted(chosen, key=list(every).index):
        specs.setdefault(re.sub(r"\.\d+\.", ".*.", path), []).extend(chosen[path])
    return list(specs.items())


def _attend(layers: Iterable[nn.Module]) -> bool:
    return any(any(_attentions(layer)) for layer in layers)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _nested(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module may be a layer: it has projections, and is none itself."""
    return not is_projection(module) and bool(_projections(module))


def _stack(model: PreTrainedModel, path: str, layers: list[nn.Module], *, alone: bool) -> Stack:
    width = _width(layers)
    found = [_sites(layer, width) for layer in layers]
    sites, own = _merged(layers, found)
    root = _root(model.base_model, path) or ("" if alone else _tower(path))
    inside = path.removeprefix(f"{root}.") if root else path
    pooled = hasattr(model.base_model.get_submodule(root), "pooler")
    body = inside.split(".")[0] if pooled and "." in inside else None
    fused: Any = {role: WHOLE for each in found for role in each if role.endswith(".qkv")}
    bias = next(filter(None, map(_relative_bias, layers, found)), None)
    name = _stack_name(model, layers, sites)
    return Stack(name, path, sites, root, body, fused, bias=bias, own=own)


def _width(layers: Iterable[nn.Module]) -> int:
    """Return the size of layers in features: the input size of the first attention."""
    for layer in layers:
        for path, projections in _attentions(layer):
            query = next(projections[r] for r in ("q", "q_a", "qkv", "kv_a") if r in projections)
            return in_features(layer.get_submodule(join(path, query)))
    return usual_size(layers)


def _stack_name(
    model: PreTrainedModel, layers: list[nn.Module], sites: dict[str, str]
) -> Literal["encoder", "decoder"]:
    if model.config.is_encoder_decoder:
        return "decoder" if "cross.q" in sites else "encoder"
    return "decoder" if _is_causal(model, layers) else "encoder"


def _is_causal(model: PreTrainedModel, layers: list[nn.Module]) -> bool:
    """Return whether attention is causal: as it declares, else by transformers' lists of models."""
    attentions = (m.get_submodule(path) for m in layers for path, _ in _attentions(m))
    for attention in attentions:
        if isinstance(causal := getattr(attention, "is_causal", None), bool):
            return causal
    model_type = model.config.model_type
    masked = model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not masked


def _relative_bias(layer: nn.Module, sites: dict[str, str]) -> str | None:
    """Return the path of the table of relative positions in self-attention, if it has one."""
    path = sites.get("attn.kv", "")
    attention = layer.get_submodule(path)
    if not hasattr(attention, "compute_bias"):
        return None
    tables = [n for n, m in attention.named_children() if isinstance(m, nn.Embedding)]
    return join(path, tables[0]) if len(tables) == 1 else None


def _merged(
    layers: list[nn.Module], found: list[dict[str, str]]
) -> tuple[dict[str, str], dict[int, dict[str, str]]]:
    """Merge the sites of layers that differ, as where only some have experts, into `a|b` paths.

    Where a path has a role in some of the layers that have it only, those that differ from the
    most common layer are returned apart, by number.
    """
    roles = dict.fromkeys(role for sites in found for role in sites)
    paths = {role: dict.fromkeys(s[role] for s in found if role in s) for role in roles}
    merged = {role: "|".join(alternatives) for role, alternatives in paths.items()}
    if all(_existing(layer, merged) == sites for layer, sites in zip(layers, found, strict=True)):
        return merged, {}
    common = max(found, key=found.count)
    return common, {n: sites for n, sites in enumerate(found) if sites != common}


def _existing(layer: nn.Module, specs: Mapping[str, str]) -> dict[str, str]:
    paths = {role: first_existing(layer, spec) for role, spec in specs.items()}
    return {role: path for role, path in paths.items() if path}


def _tower(path: str) -> str:
    """Return the outermost module around a list of layers; "" if that is the model."""
    first, _, rest = path.partition(".")
    return first if rest and not rest.startswith("*") else ""


def _root(base: nn.Module, path: str) -> str:
    """Return the nearest module around a list of layers whose forward takes token ids."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = base.get_submodule(".".join(parts[:end])) if "*" not in parts[:end] else None
        if module is not None and "input_ids" in inspect.signature(module.forward).parameters:
            return ".".join(parts[:end])
    return ""


def _sites(layer: nn.Module, width: int) -> dict[str, str]:
    sublayers = _sublayers(layer)
    sites: dict[str, str] = {}
    for sublayer, attentions in sublayers.items():
        path, projections = next(iter(attentions.items()))
        sites |= _attention_sites(layer, sublayer, path, projections, width)
    groups = {sublayer: _group(next(iter(paths))) for sublayer, paths in sublayers.items()}
    networks = _networks(layer, _groups(sublayers), width)
    if networks:
        largest = max(networks, key=lambda network: _inner_size(layer, network))
        sites.update(largest)
    sites |= further_sites(layer, _projections(layer), sites)
    if mixer := mixer_of(layer, sites):
        sites["mixer"] = mixer
        groups |= {} if groups else {"mixer": mixer}
    return sites | _norms(layer, width, groups, sites)


def _inner_size(layer: nn.Module, network: Mapping[str, str]) -> float:
    """Return the size of a network between its projections; a mixture of experts is the largest."""
    down = network.get("ffn.down")
    return in_features(layer.get_submodule(down)) if down else math.inf


def _sublayers(layer: nn.Module) -> dict[str, dict[str, dict[str, str]]]:
    """Map attn and cross to their attention modules, and these to their projections by role."""
    sublayers: dict[str, dict[str, dict[str, str]]] = {}
    for path, projections in _attentions(layer):
        sublayer = "cross" if _CROSS.search(path) else "attn"
        sublayers.setdefault(sublayer, {})[path] = projections
    return sublayers


def _group(attention: str) -> str:
    # q, k and v may be one level deeper than the output, as in BERT.
    return attention.rpartition(".")[0] or attention


def _groups(sublayers: Mapping[str, Iterable[str]]) -> list[str]:
    return [_group(path) for paths in sublayers.values() for path in paths]


def _norms(
    layer: nn.Module, width: int, groups: dict[str, str], sites: dict[str, str]
) -> dict[str, str]:
    if not groups:
        return {}
    ends = {sublayer: _ends(sublayer, sites) for sublayer in (*groups, "ffn")}
    ends["ffn"] = ends["ffn"] or [path for path in _expert_blocks(layer) if path]
    return norm_roles(layer, width, groups | _feed_forward_group(layer, groups, sites), ends)


def _ends(sublayer: str, sites: dict[str, str]) -> list[str]:
    """Return the paths of a sublayer's first and last projection, or of its module."""
    if sublayer in sites:
        return [sites[sublayer]]
    roles = (f"{sublayer}.{name}" for name in ("q", "qkv", "up", "gate_up", "o", "down"))
    return [sites[role] for role in roles if role in sites]


def _attention_sites(
    layer: nn.Module, sublayer: str, path: str, projections: dict[str, str], width: int
) -> dict[str, str]:
    separate = [name for name in _SEPARATE if name in projections]
    names = separate if {"q", "kv_a"} & projections.keys() else [*separate, "qkv"]
    sites = {f"{sublayer}.{name}": join(path, projections[name]) for name in names}
    if output := _attention_output(layer, path, projections.get("o"), width):
        sites[f"{sublayer}.o"] = output
    if _on_interface(layer.get_submodule(path)):
        sites[f"{sublayer}.kv"] = path
    return sites


def _attention_output(layer: nn.Module, path: str, name: str | None, width: int) -> str | None:
    """Return the output projection: the child `name`, or one beside the attention at `path`."""
    candidates = [join(path, name)] if name else []
    group = _group(path)
    around = (join(group, p) for p in _projections(layer.get_submodule(group)))
    candidates += [p for p in around if not p.startswith(f"{path}.")]
    return next((c for c in candidates if out_features(layer.get_submodule(c)) == width), None)


def _on_interface(attention: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(attention).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _networks(layer: nn.Module, groups: list[str], width: int) -> list[dict[str, str]]:
    """List the sites of each feed-forward network of a layer; {} for one without sites."""
    attention = tuple(f"{group}." for group in groups)
    blocks = [path for path in _expert_blocks(layer) if not f"{path}.".startswith(attention)]
    apart = (*attention, *(f"{path}." for path in blocks if path))
    candidates = {
        path: module
        for path, module in _projections(layer).items()
        if not path.startswith(apart) and kind_of(layer, path) not in ("attn", "mixer")
    }
    networks = [_whole_block(layer, path) for path in blocks]
    while network := _last_network(candidates, width):
        networks.append(network)
        candidates = {p: m for p, m in candidates.items() if p not in network.values()}
        candidates = {p: m for p, m in candidates.items() if in_features(m) != out_features(m)}
    return networks


def _last_network(candidates: dict[str, nn.Module], width: int) -> dict[str, str]:
    for down, module in reversed(candidates.items()):
        if out_features(module) != width:
            continue
        inner = in_features(module)
        outputs = {
            path: out_features(m)
            for path, m in candidates.items()
            if path != down and in_features(m) == width
        }
        beside = {
            p: n for p, n in outputs.items() if p.rpartition(".")[0] == down.rpartition(".")[0]
        }
        outputs = beside if {inner, 2 * inner} & {*beside.values()} else outputs
        ups = [path for path, size in outputs.items() if size == inner]
        fused = [path for path, size in outputs.items() if size == 2 * inner]
        if ups or fused:
            return {"ffn.down": down} | _ups(ups, [p for p in fused if "gate_up" in p])
    return {}


def _ups(ups: list[str], fused: list[str]) -> dict[str, str]:
    if fused:
        return {"ffn.gate_up": fused[0]}
    gates = [p for p in ups if "gate" in p or p.endswith(("wi_0", "w1"))] if len(ups) > 1 else []
    plain = [p for p in ups if p not in gates]
    if len(gates) > 1 or len(plain) != 1:
        return {}
    return {"ffn.gate": gates[0], "ffn.up": plain[0]} if gates else {"ffn.up": plain[0]}


def _expert_blocks(layer: nn.Module) -> list[str]:
    """List the outermost modules with experts."""
    paths = [p for p, m in _modules(layer) if isinstance(getattr(m, "experts", None), nn.Module)]
    return [p for p in paths if not any(p.startswith(f"{q}.") for q in paths)]


def _whole_block(layer: nn.Module, path: str) -> dict[str, str]:
    """Return a mixture of experts as one sublayer, if its output is one tensor."""
    return {"ffn": path} if path and not returns_tuple(layer.get_submodule(path)) else {}


def _feed_forward_group(
    layer: nn.Module, groups: dict[str, str], sites: dict[str, str]
) -> dict[str, str]:
    """Return the outermost module around ffn.down that does not contain attention."""
    group = ""
    parent = sites.get("ffn.down", sites.get("ffn", "")).rpartition(".")[0]
    while parent and not any(f"{g}.".startswith(f"{parent}.") for g in groups.values()):
        group, parent = parent, parent.rpartition(".")[0]
        if isinstance(layer.get_submodule(parent), nn.ModuleList):
            break
    return {"ffn": group} if group else {}


def _below(base: PreTrainedModel, lists: list[str]) -> Iterator[str]:
    """Yield the outermost embedding modules outside the layers."""
    yielded: list[str] = []
    layers = tuple(path.split(".*")[0] + "." for path in lists)
    tokens = token_table(base)
    for path, module in _modules(base):
        name = path.rpartition(".")[2]
        around = any(layer.startswith(f"{path}.") for layer in layers)
        embeds = module is tokens or _EMBEDDING.search(name)
        if path.startswith((*layers, *yielded)) or around or not embeds:
            continue
        if any(True for _ in module.parameters()):
            yielded.append(f"{path}.")
            yield path


def _constants(base: nn.Module) -> Iterator[str]:
    for path, module in _modules(base):
        if "Sinusoidal" in type(module).__name__:
            yield from (join(path, name) for name, _ in module.named_parameters(recurse=False))


def _counts_from_padding(base: nn.Module, row: Family) -> bool:
    accepts_positions = any(
        "position_ids" in inspect.signature(base.get_submodule(s.root).forward).parameters
        for s in row.stacks
    )
    name = "create_position_ids_from_input_ids"
    counters = [base.get_submodule(path) for path in row.below]
    return accepts_positions and any(
        hasattr(m, name) or hasattr(sys.modules[type(m).__module__], name) for m in counters
    )
