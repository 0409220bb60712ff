"""Derive the row of an architecture, with each stack of layers, from a model's modules."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from adapterhub.anatomy.backbone import first_existing, join, own_modules, token_table
from adapterhub.anatomy.discovery.layer_sites import norm_size, sites_of_layer
from adapterhub.anatomy.discovery.roles import attention_modules, fused_layout
from adapterhub.anatomy.family import WHOLE, Family, Layout, Stack
from adapterhub.anatomy.projections import (
    in_features,
    is_projection,
    out_features,
    plain_projections,
    usual_size,
)

_EMBEDDING = re.compile(r"emb|^wte$|^wpe$|^shared$|^project_in$", re.IGNORECASE)
# The input of a stack, by the words of its path; the first match counts.
_READS = {
    "vision": r"vision|visual|image|vit\b|patch",
    "audio": r"audio|speech|acoustic|sound|wav",
    "language": r"language|text|llm",
}
_OF_A_STAGE = re.compile(r"\.\d+\.(layers?|(\w+_)?blocks)$")
_MERGERS = re.compile(r"merger|projector", re.IGNORECASE)


def discover(model: PreTrainedModel) -> Family:
    """Derive the row of a model from its structure, without stacks if it has no layers."""
    base = cast(PreTrainedModel, model.base_model)
    lists = layer_lists(base)
    alone = len(lists) == 1
    stacks = [discovered_stack(model, path, layers, alone=alone) for path, layers in lists]
    stacks = named(stacks, by_input=not model.config.is_encoder_decoder)
    row = Family(
        (model.config.model_type,),
        tuple(sorted(stacks, key=lambda stack: stack.name in ("decoder", "language"))),
        tuple(_below(base, [stack.layers for stack in stacks])),
        constants=tuple(_constants(base)),
    )
    return replace(row, positions_from_padding=_counts_from_padding(base, row))


def _below(base: PreTrainedModel, lists: list[str]) -> Iterator[str]:
    """Yield the outermost embedding modules outside the layers."""
    yielded: list[str] = []
    layers = tuple(path.split(".*")[0] + "." for path in lists)
    tokens = token_table(base)
    for path, module in own_modules(base):
        name = path.rpartition(".")[2]
        around = any(layer.startswith(f"{path}.") for layer in layers)
        embeds = module is tokens or _EMBEDDING.search(name)
        if path.startswith((*layers, *yielded)) or around or not embeds:
            continue
        if any(True for _ in module.parameters()):
            yielded.append(f"{path}.")
            yield path


def _constants(base: nn.Module) -> Iterator[str]:
    for path, module in own_modules(base):
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


def named(stacks: Sequence[Stack], by_input: bool) -> list[Stack]:
    """Return stacks with unique names.

    A single stack keeps its name, as do the encoder and decoder of one model. Other stacks are
    named after their input, from the words of their path. A stack whose path does not show the
    input keeps its name. Names that are still equal are numbered: `vision`, `vision2`.

    `by_input`: an encoder and a decoder read different kinds of input, such as images and text.
    """
    names = [stack.name for stack in stacks]
    if len(stacks) > 1 and (by_input or len(set(names)) < len(names)):
        names = [_read(stack) or stack.name for stack in stacks]
    seen: Counter[str] = Counter()
    unique = []
    for stack, name in zip(stacks, names, strict=True):
        seen[name] += 1
        unique.append(replace(stack, name=name + (str(seen[name]) if seen[name] > 1 else "")))
    return unique


def _read(stack: Stack) -> str | None:
    return next((name for name, words in _READS.items() if re.search(words, stack.layers)), None)


def layer_lists(base: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """List the module lists of layers: lists with attention, and lists separate from them.

    Of nested lists, keep the innermost if its layers have one class and attention, or if the outer
    list holds stages; otherwise keep the outermost. Lists in a list (`groups.0.layers`,
    `groups.1.layers`) are one entry (`groups.*.layers`) with all modules.
    """
    lists = {p: list(m) for p, m in own_modules(base) if isinstance(m, nn.ModuleList)}
    every = {p: m for p, m in lists.items() if m and None not in m}
    sequences = {p: list(m) for p, m in own_modules(base) if isinstance(m, nn.Sequential)}
    every |= {p: m for p, m in sequences.items() if _all_attend(m)}
    alike = {p: m for p, m in every.items() if len(set(map(type, m))) == 1 and _attend(m)}
    chosen = {p: m for p, m in alike.items() if not any(o.startswith(f"{p}.") for o in alike)}
    staged = _staged(every)
    for path, layers in every.items():
        apart = not any(_nested(path, other) for other in chosen) and path not in staged.values()
        several = len(layers) > 1 or path in staged
        if apart and (_attend(layers) or (several and all(map(_is_layer, layers)))):
            chosen[path] = layers
    chosen = {path: m for path, m in chosen.items() if not _belongs_to_layers(path, m, chosen)}
    if not chosen:  # for example only convolutions: layers without projections
        outer = {p: m for p, m in every.items() if len(m) > 1 and all(map(_has_parameters, m))}
        chosen = {p: m for p, m in outer.items() if not any(p.startswith(f"{o}.") for o in outer)}
    specs: dict[str, list[nn.Module]] = {}
    for path in sorted(chosen, key=list(every).index):
        specs.setdefault(re.sub(r"\.\d+\.", ".*.", path), []).extend(chosen[path])
    return list(specs.items())


def _staged(lists: Mapping[str, list[nn.Module]]) -> dict[str, str]:
    """Map the lists of layers in stages to the list of stages, as in ConvNeXt."""
    inner = {p: p.rsplit(".", 2)[0] for p, m in lists.items() if _OF_A_STAGE.search(p)}
    inner = {p: o for p, o in inner.items() if o in lists and _alike_layers(lists[p])}
    counts = Counter(inner.values())
    return {p: outer for p, outer in inner.items() if counts[outer] == len(lists[outer])}


def _alike_layers(modules: list[nn.Module]) -> bool:
    return len(set(map(type, modules))) == 1 and all(map(_is_layer, modules))


def _all_attend(modules: list[nn.Module]) -> bool:
    """Return whether a `Sequential`, which may hold anything, holds layers of one class."""
    one_class = len(set(map(type, modules))) == 1
    return one_class and all(any(attention_modules(layer)) for layer in modules)


def _attend(layers: Iterable[nn.Module]) -> bool:
    return any(any(attention_modules(layer)) for layer in layers)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _belongs_to_layers(
    path: str, modules: list[nn.Module], lists: Mapping[str, list[nn.Module]]
) -> bool:
    """Return whether a list belongs to layers next to it: one merger for some of the layers."""
    if _MERGERS.search(path) and not _attend(modules) and any(map(_attend, lists.values())):
        return True
    parent = path.rpartition(".")[0]
    beside = [layers for other, layers in lists.items() if other.rpartition(".")[0] == parent]
    return not _attend(modules) and any(_attend(m) and len(m) > len(modules) for m in beside)


def _nested(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module may be a layer: it has projections and is not a projection."""
    return not is_projection(module) and bool(plain_projections(module))


def discovered_stack(
    model: PreTrainedModel, path: str, layers: list[nn.Module], *, alone: bool
) -> Stack:
    """Describe a stack of layers.

    `path` is the path of its module list in the base model, with `.*.` for several lists; `alone`
    means that the model has no other stack.
    """
    usual = usual_size(layers)
    of_layers = [_sites(layer, usual) for layer in layers]
    sites, own = _merged(layers, of_layers)
    root = _root(model.base_model, path) or ("" if alone else _tower(path))
    inside = path.removeprefix(f"{root}.") if root else path
    pooled = hasattr(model.base_model.get_submodule(root), "pooler")
    body = inside.split(".")[0] if pooled and "." in inside else None
    fused = _layouts(layers, of_layers)
    bias = next(filter(None, map(_relative_bias, layers, of_layers)), None)
    name = _stack_name(model, layers, sites)
    return Stack(name, path, sites, root, body, fused, bias=bias, own=own)


def _layouts(layers: list[nn.Module], of_layers: list[dict[str, str]]) -> dict[str, Layout]:
    """Map the roles of fused projections to their layout in all layers that have one."""
    layouts: dict[str, set[Layout]] = {}
    for layer, sites in zip(layers, of_layers, strict=True):
        for role in ("attn.qkv", "cross.qkv"):
            if path := sites.get(role):
                around, _, name = path.rpartition(".")
                known = f"{role[:-4]}.o" in sites  # its input is as large as the queries
                layout = fused_layout(layer.get_submodule(around), name) if known else WHOLE
                layouts.setdefault(role, set()).add(layout)
        if "gate_up" not in sites.get("ffn.gate_up", "gate_up"):  # by size: order unknown
            layouts["ffn.gate_up"] = {WHOLE}
    return {role: all_.pop() if len(all_) == 1 else WHOLE for role, all_ in layouts.items()}


def _sites(layer: nn.Module, usual: int) -> dict[str, str]:
    """Map the roles in a layer to paths, with the first possible size that gives an output.

    Layers of one stack may differ in size: later stages of vision encoders have more features. A
    layer may also change the size, as at the start of such a stage. Without attention, the sizes of
    the layer's norms come first: the size of most layers may be this network's inner size.

    `usual` is the number of features of most layers of the stack.
    """
    sizes = dict.fromkeys(_sizes_of_attention(layer))
    shows = {"attn.o"} if sizes else {"ffn", "ffn.down", "mixer"}
    sizes = sizes or dict.fromkeys(_sizes_of_norms_and_projections(layer, usual))
    by_size = [sites_of_layer(layer, size) for size in sizes]
    return next((sites for sites in by_size if shows & sites.keys()), by_size[0])


def _sizes_of_attention(layer: nn.Module) -> Iterator[int]:
    """Yield the input size and the output size of the first attention in a layer."""
    for path, projections in attention_modules(layer):
        query = next(projections[r] for r in ("q", "q_a", "qkv", "kv_a") if r in projections)
        yield in_features(layer.get_submodule(join(path, query)))
        if "o" in projections:
            yield out_features(layer.get_submodule(join(path, projections["o"])))
        return


def _sizes_of_norms_and_projections(layer: nn.Module, usual: int) -> list[int]:
    """List the possible sizes of a layer without attention, most likely first."""
    normed = {size for size in map(norm_size, layer.modules()) if size}
    sizes = (usual, *sorted(map(in_features, _projections(layer))))
    return sorted(sizes, key=lambda size: size not in normed)


def _projections(layer: nn.Module) -> Iterable[nn.Module]:
    return plain_projections(layer).values()


def _stack_name(
    model: PreTrainedModel, layers: list[nn.Module], sites: dict[str, str]
) -> Literal["encoder", "decoder"]:
    if model.config.is_encoder_decoder:
        return "decoder" if "cross.q" in sites else "encoder"
    return "decoder" if _is_causal(model, layers) else "encoder"


def _is_causal(model: PreTrainedModel, layers: list[nn.Module]) -> bool:
    """Return whether attention is causal, as declared or else by transformers' lists of models."""
    attentions = (m.get_submodule(path) for m in layers for path, _ in attention_modules(m))
    for attention in attentions:
        if isinstance(causal := getattr(attention, "is_causal", None), bool):
            return causal
    model_type = model.config.model_type
    masked = model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not masked


def _relative_bias(layer: nn.Module, sites: dict[str, str]) -> str | None:
    """Return the path of the table of relative positions in self-attention, or None."""
    path = sites.get("attn.kv", "")
    attention = layer.get_submodule(path)
    if not hasattr(attention, "compute_bias"):
        return None
    tables = [n for n, m in attention.named_children() if isinstance(m, nn.Embedding)]
    return join(path, tables[0]) if len(tables) == 1 else None


def _merged(
    layers: list[nn.Module], of_layers: list[dict[str, str]]
) -> tuple[dict[str, str], dict[int, dict[str, str]]]:
    """Merge the sites of different layers, such as layers with and without experts, as `a|b` paths.

    If a path has a role in only some of the layers that contain it, the sites of layers that differ
    from the most common layer are returned separately, by number.
    """
    roles = dict.fromkeys(role for sites in of_layers for role in sites)
    paths = {role: dict.fromkeys(s[role] for s in of_layers if role in s) for role in roles}
    merged = {role: "|".join(alternatives) for role, alternatives in paths.items()}
    if all(
        _existing(layer, merged) == sites for layer, sites in zip(layers, of_layers, strict=True)
    ):
        return merged, {}
    common = max(of_layers, key=of_layers.count)
    return common, {n: sites for n, sites in enumerate(of_layers) if sites != common}


def _existing(layer: nn.Module, specs: Mapping[str, str]) -> dict[str, str]:
    paths = {role: first_existing(layer, spec) for role, spec in specs.items()}
    return {role: path for role, path in paths.items() if path is not None}


def _tower(path: str) -> str:
    """Return the outermost module around a list of layers; "" if it is the model."""
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
