"""Structural discovery: derive the row of an architecture without one from its modules.

A layer is recognized by its attention: a module with three projections named as query, key and
value. The rest follows from names and sizes, with d the width of a layer:

    attention output    heads -> d, in the same module as q, k and v or in its parent
    feed-forward        up (and gate): d -> inner, down: inner -> d
    norms               by the sublayer that contains them, the others by their order
    keyvalue            where attention uses transformers' attention interface

A name alone is not enough: the sizes must fit too. A fused projection is not split, because its
structure does not show its layout. If anything is ambiguous, an error prints the row with the
unknown parts left open.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from adapterhub.anatomy.family import Family, Stack
from adapterhub.anatomy.family_source import UNKNOWN, row_text
from adapterhub.anatomy.projections import in_features, is_projection, out_features
from adapterhub.anatomy.sites import CHILD, join
from adapterhub.errors import BackboneError

_SUFFIX = re.compile(r"_(proj|projection|lin|linear|layer)$")
_NAMES = {
    "q": ("q", "query", "wq"),
    "k": ("k", "key", "wk"),
    "v": ("v", "value", "wv"),
    "o": ("o", "out", "output", "dense", "c", "wo"),
    "qkv": ("qkv", "query_key_value", "wqkv", "c_attn", "in"),
}
_CROSS = re.compile(r"cross|enc_?dec|encoder_att", re.IGNORECASE)
_HEAD_NORM = re.compile(r"^(q|k|v|query|key|value)_?[a-z]*norm", re.IGNORECASE)
_EMBEDDING = re.compile(r"emb|^wte$|^wpe$|^shared$|^project_in$", re.IGNORECASE)
REQUIRED = ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.up", "ffn.down")


def discover(model: PreTrainedModel) -> Family:
    """Derive the row of a model from its structure.

    Raises:
        BackboneError: a required part of the row was not found; the error prints the row to write,
            as far as it is known.
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
            f"there is no row for the architecture {model.config.model_type!r}, and its structure "
            "is not enough to write one",
            offenders=missing,
            expected="a Family row in adapterhub/anatomy/families/",
            hint=f"add this row there, with every ... filled in:\n{row_text(row, REQUIRED)}",
        )
    return row


def _missing(row: Family) -> Iterator[str]:
    names = [stack.name for stack in row.stacks]
    if not names or len(names) != len(set(names)):
        yield f"found {len(names)} lists of equal layers with attention, in {names or 'no module'}"
    for stack in row.stacks:
        required = [r for r in REQUIRED if "ffn" not in stack.sites or not r.startswith("ffn.")]
        for role in required:
            if role not in stack.sites and _fused_role(role) not in stack.sites:
                yield f"the path of {role} in a layer of {stack.layers}"
        for role in stack.fused:
            yield f"whether {role} of {stack.layers} is fused in blocks or per head"


def _fused_role(role: str) -> str:
    """Return the role of the fused projection that may contain a part."""
    sublayer, _, name = role.partition(".")
    return f"{sublayer}.qkv" if name in "qkv" else f"{sublayer}.gate_up"


def _role(name: str) -> str | None:
    stem = _SUFFIX.sub("", name.lower())
    return next((role for role, names in _NAMES.items() if stem in names), None)


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules except those of adapters."""
    return ((p, m) for p, m in module.named_modules() if CHILD not in p.split("."))


def _projections(module: nn.Module) -> dict[str, nn.Module]:
    return {path: m for path, m in _modules(module) if is_projection(m)}


def _attentions(layer: nn.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the attention modules inside a layer, with the names of their projections by role."""
    for path, module in _modules(layer):
        named = [(_role(name), name) for name, m in module.named_children() if is_projection(m)]
        projections = {role: name for role, name in named if role is not None}
        if {"q", "k", "v"} <= projections.keys() or "qkv" in projections:
            yield path, projections


def _layer_lists(base: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """List the module lists whose elements have one class and contain attention.

    Of nested lists only the innermost; lists in a list (`groups.0.layers`, `groups.1.layers`) are
    one entry (`groups.*.layers`) with the modules of the first.
    """
    lists = [
        (path, module)
        for path, module in _modules(base)
        if isinstance(module, nn.ModuleList)
        and len({type(layer) for layer in module}) == 1
        and any(True for _ in _attentions(module[0]))
    ]
    inner = [(p, m) for p, m in lists if not any(q.startswith(f"{p}.") for q, _ in lists)]
    specs = {re.sub(r"\.\d+\.", ".*.", path): module for path, module in reversed(inner)}
    return list(reversed(specs.items()))


def _stack(model: PreTrainedModel, path: str, layers: nn.ModuleList) -> Stack:
    sites = _merged([_sites(layer) for layer in layers])
    root = _root(model.base_model, path)
    inside = path.removeprefix(f"{root}.") if root else path
    pooled = hasattr(model.base_model.get_submodule(root), "pooler")
    body = inside.split(".")[0] if pooled and "." in inside else None
    fused: Any = {role: UNKNOWN for role in sites if role.endswith("qkv")}
    bias = _relative_bias(layers[0], sites)
    return Stack(_stack_name(model, layers, sites), path, sites, root, body, fused, bias=bias)


def _stack_name(
    model: PreTrainedModel, layers: Iterable[nn.Module], sites: dict[str, str]
) -> Literal["encoder", "decoder"]:
    if model.config.is_encoder_decoder:
        return "decoder" if "cross.q" in sites else "encoder"
    return "decoder" if _is_causal(model, layers) else "encoder"


def _is_causal(model: PreTrainedModel, layers: Iterable[nn.Module]) -> bool:
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


def _merged(layers: list[dict[str, str]]) -> dict[str, str]:
    """Merge the sites of layers that differ, as where only some have experts, into `a|b` paths."""
    roles = dict.fromkeys(role for sites in layers for role in sites)
    paths = {role: dict.fromkeys(s[role] for s in layers if role in s) for role in roles}
    return {role: "|".join(alternatives) for role, alternatives in paths.items()}


def _root(base: nn.Module, path: str) -> str:
    """Return the nearest module around a list of layers whose forward takes token ids."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = base.get_submodule(".".join(parts[:end])) if "*" not in parts[:end] else None
        if module is not None and "input_ids" in inspect.signature(module.forward).parameters:
            return ".".join(parts[:end])
    return ""


def _sites(layer: nn.Module) -> dict[str, str]:
    sites: dict[str, str] = {}
    groups: dict[str, str] = {}  # sublayer -> the module that contains its attention and output
    for path, projections in _attentions(layer):
        sublayer = "cross" if _CROSS.search(path) or "attn" in groups else "attn"
        if sublayer not in groups:
            # q, k and v may be one level deeper than the output, as in BERT.
            groups[sublayer] = path.rpartition(".")[0] or path
            sites |= _attention_sites(layer, sublayer, path, projections, groups[sublayer])
    sites |= _feed_forward(layer, tuple(groups.values()), sites)
    return sites | _norms(layer, groups, sites)


def _attention_sites(
    layer: nn.Module, sublayer: str, path: str, projections: dict[str, str], group: str
) -> dict[str, str]:
    separate = [name for name in ("q", "k", "v") if name in projections]
    names = separate if "q" in projections else [*separate, "qkv"]
    sites = {f"{sublayer}.{name}": join(path, projections[name]) for name in names}
    query = projections["q" if "q" in projections else "qkv"]
    width = in_features(layer.get_submodule(join(path, query)))
    if output := _attention_output(layer, path, projections.get("o"), group, width):
        sites[f"{sublayer}.o"] = output
    if _on_interface(layer.get_submodule(path)):
        sites[f"{sublayer}.kv"] = path
    return sites


def _attention_output(
    layer: nn.Module, path: str, name: str | None, group: str, width: int
) -> str | None:
    """Return the output projection: the child `name`, or one beside the attention at `path`."""
    candidates = [join(path, name)] if name else []
    around = (join(group, p) for p in _projections(layer.get_submodule(group)))
    candidates += [p for p in around if not p.startswith(f"{path}.")]
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
    candidates = {p: m for p, m in _projections(layer).items() if not p.startswith(attention)}
    for down, module in reversed(candidates.items()):
        if out_features(module) != width:
            continue
        inner = in_features(module)
        outputs = {
            path: out_features(m)
            for path, m in candidates.items()
            if path != down and in_features(m) == width
        }
        ups = [path for path, size in outputs.items() if size == inner]
        fused = [path for path, size in outputs.items() if "gate_up" in path and size == 2 * inner]
        if ups or fused:
            return {"ffn.down": down} | _ups(ups, fused)
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
    """Return a mixture of experts as one sublayer, if its output is one tensor."""
    signature = inspect.signature(layer.get_submodule(path).forward)
    return {"ffn": path} if signature.return_annotation is torch.Tensor else {}


def _norms(layer: nn.Module, groups: dict[str, str], sites: dict[str, str]) -> dict[str, str]:
    paths = [
        path
        for path, module in _modules(layer)
        if "norm" in type(module).__name__.lower() and not _HEAD_NORM.match(path.rpartition(".")[2])
    ]
    contained = _contained_norms(paths, groups | _feed_forward_group(layer, groups, sites))
    others = [path for path in paths if path not in contained.values() and "." not in path]
    return contained | _ordered_norms(
        others, [s for s in (*groups, "ffn") if f"{s}.norm" not in contained]
    )


def _contained_norms(paths: list[str], groups: dict[str, str]) -> dict[str, str]:
    """Assign each norm inside a sublayer's module to that sublayer."""
    return {
        f"{sublayer}.norm": path
        for path in paths
        for sublayer, group in groups.items()
        if path.startswith(f"{group}.")
    }


def _ordered_norms(paths: list[str], sublayers: list[str]) -> dict[str, str]:
    """Assign a layer's own norms to sublayers by order: one each, or a norm and a postnorm each.

    All are postnorms if all names begin with "post".
    """
    kinds = ["norm"]
    if paths and all(path.startswith("post") for path in paths):
        kinds = ["postnorm"]
    elif len(paths) == 2 * len(sublayers):
        kinds = ["norm", "postnorm"]
    roles = [f"{sublayer}.{kind}" for sublayer in sublayers for kind in kinds]
    return dict(zip(roles, paths, strict=False))


def _feed_forward_group(
    layer: nn.Module, groups: dict[str, str], sites: dict[str, str]
) -> dict[str, str]:
    """Return the outermost module around ffn.down that does not contain attention."""
    group = ""
    parent = sites.get("ffn.down", "").rpartition(".")[0]
    while parent and not any(f"{g}.".startswith(f"{parent}.") for g in groups.values()):
        group, parent = parent, parent.rpartition(".")[0]
        if isinstance(layer.get_submodule(parent), nn.ModuleList):
            break
    return {"ffn": group} if group else {}


def _below(base: PreTrainedModel, lists: list[str]) -> Iterator[str]:
    """Yield the outermost embedding modules outside the layers."""
    yielded: list[str] = []
    layers = tuple(path.split(".*")[0] + "." for path in lists)
    tokens = base.get_input_embeddings()
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
