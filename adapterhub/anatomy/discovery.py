"""Structural discovery: the row of an architecture that has none, read off its modules.

A layer is recognized by its attention: a module with three projections named as query, key and
value. The rest follows from names and sizes, d being the width of a layer:

    attention output    heads -> d, beside q, k and v or in the module around them
    feed-forward        up (and gate): d -> inner, down: inner -> d
    norms               by the sublayer they are in, else in their order
    keyvalue            where attention asks transformers for its attention function

Names alone are not trusted: sizes must fit too. A fused projection is not taken apart, for nothing
tells its layout. What cannot be read is an error that prints the row as far as it is known.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from adapterhub.anatomy.build import in_features, out_features
from adapterhub.anatomy.family_source import UNKNOWN, row_text
from adapterhub.anatomy.sites import CHILD, Family, Stack, join
from adapterhub.errors import BackboneError

_ENDING = re.compile(r"_(proj|projection|lin|linear|layer)$")
_NAMES = {
    "q": ("q", "query", "wq"),
    "k": ("k", "key", "wk"),
    "v": ("v", "value", "wv"),
    "o": ("o", "out", "output", "dense", "c", "wo"),
    "qkv": ("qkv", "query_key_value", "wqkv", "c_attn", "in"),
}
_CROSS = re.compile(r"cross|enc_?dec|encoder_att", re.IGNORECASE)
_HEAD_NORM = re.compile(r"^(q|k|v|query|key|value)_?[a-z]*norm", re.IGNORECASE)
_BELOW = re.compile(r"emb|^wte$|^wpe$|^shared$|^project_in$", re.IGNORECASE)
REQUIRED = ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.up", "ffn.down")


def discover(model: PreTrainedModel) -> Family:
    """The row of a model, by its structure.

    Raises:
        BackboneError: something that every row needs is not found; the error prints the row to
            write, with what is known of it.
    """
    base = cast(PreTrainedModel, model.base_model)
    stacks = [_stack(model, path, layers) for path, layers in _layer_lists(base)]
    row = Family(
        (model.config.model_type,),
        tuple(sorted(stacks, key=lambda stack: stack.name != "encoder")),
        tuple(_below(base, [stack.layers for stack in stacks])),
        constants=tuple(_constants(base)),
    )
    row = replace(row, positions_from_padding=_counts_from_padding(base, row))
    if missing := list(_missing(row)):
        raise BackboneError(
            f"no row for the architecture {model.config.model_type!r}, and its structure does not "
            "tell all of it",
            offenders=missing,
            expected="a Family row in adapterhub/anatomy/families/",
            hint=f"put this row there, with every ... filled in:\n{row_text(row, REQUIRED)}",
        )
    return row


def _missing(row: Family) -> Iterator[str]:
    names = [stack.name for stack in row.stacks]
    if not names or len(names) != len(set(names)):
        yield f"found {len(names)} lists of equal layers with attention, in {names or 'no module'}"
    for stack in row.stacks:
        required = [r for r in REQUIRED if "ffn" not in stack.sites or not r.startswith("ffn.")]
        for role in required:
            if role not in stack.sites and _whole(role) not in stack.sites:
                yield f"the path of {role} in a layer of {stack.layers}"
        for role in stack.fused:
            yield f"whether {role} of {stack.layers} is fused in blocks or per head"


def _whole(role: str) -> str:
    """The fused projection that holds a part."""
    sublayer, _, name = role.partition(".")
    return f"{sublayer}.qkv" if name in "qkv" else f"{sublayer}.gate_up"


def is_projection(module: nn.Module) -> bool:
    """Whether a module is a matrix with an input and an output size, as torch's `Linear` and its
    quantized kinds, with a weight or with packed codes, and GPT-2's `Conv1D`."""
    sized = hasattr(module, "in_features") or hasattr(module, "nx")
    return sized and getattr(module, "weight", module) is not None


def _role(name: str) -> str | None:
    stem = _ENDING.sub("", name.lower())
    return next((role for role, names in _NAMES.items() if stem in names), None)


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules but those of adapters."""
    return ((p, m) for p, m in module.named_modules() if CHILD not in p.split("."))


def _projections(module: nn.Module) -> dict[str, nn.Module]:
    return {path: m for path, m in _modules(module) if is_projection(m)}


def _attentions(layer: nn.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """Attention modules inside a layer, with the names of their projections by role."""
    for path, module in _modules(layer):
        named = [(_role(name), name) for name, m in module.named_children() if is_projection(m)]
        found = {role: name for role, name in named if role is not None}
        if {"q", "k", "v"} <= found.keys() or "qkv" in found:
            yield path, found


def _layer_lists(base: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Module lists whose elements are of one class and hold attention; of nested ones, the
    inner."""
    found = [
        (path, module)
        for path, module in _modules(base)
        if isinstance(module, nn.ModuleList)
        and len({type(layer) for layer in module}) == 1
        and any(True for _ in _attentions(module[0]))
    ]
    inner = [(p, m) for p, m in found if not any(q.startswith(f"{p}.") for q, _ in found)]
    # Of lists in a list (`groups.0.layers`, `groups.1.layers`) the first stands for all.
    specs = {re.sub(r"\.\d+\.", ".*.", path): module for path, module in reversed(inner)}
    return list(reversed(specs.items()))


def _stack(model: PreTrainedModel, path: str, layers: nn.ModuleList) -> Stack:
    sites = _merged([_sites(layer) for layer in layers])
    root = _root(model.base_model, path)
    inside = path.removeprefix(f"{root}.") if root else path
    pooled = hasattr(model.base_model.get_submodule(root), "pooler")
    body = inside.split(".")[0] if pooled and "." in inside else None
    name: Literal["encoder", "decoder"]
    if model.config.is_encoder_decoder:
        name = "decoder" if "cross.q" in sites else "encoder"
    else:
        kind = model.config.model_type
        masked = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        name = "decoder" if causal and not masked else "encoder"
    fused: Any = {role: UNKNOWN for role in sites if role.endswith("qkv")}
    return Stack(name, path, sites, root, body, fused, bias=_relative(layers[0], sites))


def _relative(layer: nn.Module, sites: dict[str, str]) -> str | None:
    """The table of relative positions of a self-attention that computes their bias."""
    path = sites.get("attn.kv", "")
    attention = layer.get_submodule(path)
    if not hasattr(attention, "compute_bias"):
        return None
    tables = [n for n, m in attention.named_children() if isinstance(m, nn.Embedding)]
    return join(path, tables[0]) if len(tables) == 1 else None


def _merged(layers: list[dict[str, str]]) -> dict[str, str]:
    """One map for layers that differ, as where some have experts: `a|b` takes what is there."""
    roles = dict.fromkeys(role for sites in layers for role in sites)
    found = {role: dict.fromkeys(s[role] for s in layers if role in s) for role in roles}
    return {role: "|".join(paths) for role, paths in found.items()}


def _root(base: nn.Module, path: str) -> str:
    """The nearest module around a list of layers whose forward takes tokens."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = base.get_submodule(".".join(parts[:end])) if "*" not in parts[:end] else None
        if module is not None and "input_ids" in inspect.signature(module.forward).parameters:
            return ".".join(parts[:end])
    return ""


def _sites(layer: nn.Module) -> dict[str, str]:
    sites: dict[str, str] = {}
    groups: dict[str, str] = {}
    for path, named in _attentions(layer):
        sublayer = "cross" if _CROSS.search(path) or "attn" in groups else "attn"
        if sublayer in groups:
            continue
        # q, k and v may be one level deeper than the output, as in BERT.
        groups[sublayer] = path.rpartition(".")[0] or path
        sites |= {f"{sublayer}.{r}": join(path, named[r]) for r in ("q", "k", "v") if r in named}
        if f"{sublayer}.q" not in sites:
            sites[f"{sublayer}.qkv"] = join(path, named["qkv"])
        if output := _attention_output(
            layer, path, named, groups[sublayer], sites[_first(sublayer, sites)]
        ):
            sites[f"{sublayer}.o"] = output
        if _on_interface(layer.get_submodule(path)):
            sites[f"{sublayer}.kv"] = path
    sites |= _feed_forward(layer, tuple(groups.values()), sites)
    return sites | _norms(layer, groups, sites)


def _first(sublayer: str, sites: dict[str, str]) -> str:
    return next(role for role in (f"{sublayer}.q", f"{sublayer}.qkv") if role in sites)


def _attention_output(
    layer: nn.Module, path: str, named: dict[str, str], group: str, query: str
) -> str | None:
    width = in_features(layer.get_submodule(query))
    around = _projections(layer.get_submodule(group))
    candidates = [join(path, named["o"])] if "o" in named else []
    candidates += [join(group, p) for p in around if not join(group, p).startswith(f"{path}.")]
    return next((c for c in candidates if out_features(layer.get_submodule(c)) == width), None)


def _on_interface(attention: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(attention).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _feed_forward(
    layer: nn.Module, groups: tuple[str, ...], sites: dict[str, str]
) -> dict[str, str]:
    query = next((sites[r] for r in ("attn.q", "attn.qkv") if r in sites), None)
    if query is None:
        return {}
    if experts := _expert_block(layer):
        return _whole_block(layer, experts)
    width = in_features(layer.get_submodule(query))
    attention = tuple(f"{group}." for group in groups)
    free = {p: m for p, m in _projections(layer).items() if not p.startswith(attention)}
    for path, module in reversed(free.items()):
        inner = in_features(module)
        before = {p: m for p, m in free.items() if p != path and in_features(m) == width}
        ups = [p for p, m in before.items() if out_features(m) == inner]
        fused = [p for p, m in before.items() if "gate_up" in p and out_features(m) == 2 * inner]
        if out_features(module) == width and (ups or fused):
            return {"ffn.down": path} | _ups(ups, fused)
    return {}


def _ups(ups: list[str], fused: list[str]) -> dict[str, str]:
    if fused:
        return {"ffn.gate_up": fused[0]}
    gates = [p for p in ups if "gate" in p or p.endswith("wi_0")]
    plain = [p for p in ups if p not in gates]
    if len(gates) > 1 or len(plain) != 1:
        return {}
    return {"ffn.gate": gates[0], "ffn.up": plain[0]} if gates else {"ffn.up": plain[0]}


def _expert_block(layer: nn.Module) -> str | None:
    children = layer.named_children()
    return next((p for p, m in children if hasattr(m, "experts")), None)


def _whole_block(layer: nn.Module, path: str) -> dict[str, str]:
    """A mixture of experts is a sublayer as a whole, if it gives one tensor."""
    signature = inspect.signature(layer.get_submodule(path).forward)
    return {"ffn": path} if signature.return_annotation is torch.Tensor else {}


def _norms(layer: nn.Module, groups: dict[str, str], sites: dict[str, str]) -> dict[str, str]:
    norms = [
        path
        for path, module in _modules(layer)
        if "norm" in type(module).__name__.lower() and not _HEAD_NORM.match(path.rpartition(".")[2])
    ]
    inside = dict(groups)
    around = sites.get("ffn.down", "").rpartition(".")[0]
    while around and not any(f"{g}.".startswith(f"{around}.") for g in groups.values()):
        inside["ffn"], around = around, around.rpartition(".")[0]
        if isinstance(layer.get_submodule(around), nn.ModuleList):
            break
    found = {
        f"{sublayer}.norm": path
        for path in norms
        for sublayer, group in inside.items()
        if path.startswith(f"{group}.")
    }
    free = [path for path in norms if path not in found.values() and "." not in path]
    sublayers = [s for s in (*groups, "ffn") if f"{s}.norm" not in found]
    kinds = ["norm"]
    if free and all(path.startswith("post") for path in free):
        kinds = ["postnorm"]
    elif len(free) == 2 * len(sublayers):
        kinds = ["norm", "postnorm"]
    roles = [f"{sublayer}.{kind}" for sublayer in sublayers for kind in kinds]
    return found | dict(zip(roles, free, strict=False))


def _below(base: PreTrainedModel, lists: list[str]) -> Iterator[str]:
    """The outermost modules beside the layers that embed."""
    taken: list[str] = []
    layers = tuple(path.split(".*")[0] + "." for path in lists)
    tokens = base.get_input_embeddings()
    for path, module in _modules(base):
        name = path.rpartition(".")[2]
        around = any(layer.startswith(f"{path}.") for layer in layers)
        embeds = module is tokens or _BELOW.search(name)
        if path.startswith((*layers, *taken)) or around or not embeds:
            continue
        if any(True for _ in module.parameters()):
            taken.append(f"{path}.")
            yield path


def _constants(base: nn.Module) -> Iterator[str]:
    for path, module in _modules(base):
        if "Sinusoidal" in type(module).__name__:
            yield from (join(path, name) for name, _ in module.named_parameters(recurse=False))


def _counts_from_padding(base: nn.Module, row: Family) -> bool:
    takes_positions = any(
        "position_ids" in inspect.signature(base.get_submodule(s.root).forward).parameters
        for s in row.stacks
    )
    name = "create_position_ids_from_input_ids"
    counters = [base.get_submodule(path) for path in row.below]
    return takes_positions and any(
        hasattr(m, name) or hasattr(sys.modules[type(m).__module__], name) for m in counters
    )
