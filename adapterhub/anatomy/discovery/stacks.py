"""A stack of layers: its name, its root, and the sites that its layers share."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from adapterhub.anatomy.discovery.attentions import attention_modules
from adapterhub.anatomy.discovery.fused_layout import fused_layout
from adapterhub.anatomy.discovery.layer_sites import sites_of_layer
from adapterhub.anatomy.discovery.norm_roles import norm_size
from adapterhub.anatomy.family import WHOLE, Layout, Stack
from adapterhub.anatomy.layer_paths import first_existing
from adapterhub.anatomy.projections import (
    in_features,
    out_features,
    plain_projections,
    usual_size,
)
from adapterhub.anatomy.sites import join


def discovered_stack(
    model: PreTrainedModel, path: str, layers: list[nn.Module], *, alone: bool
) -> Stack:
    """Describe a stack of layers.

    `path` is that of its module list in the base model, with `.*.` where there are several;
    `alone`: the model has no other stack.
    """
    usual = usual_size(layers)
    found = [_sites(layer, usual) for layer in layers]
    sites, own = _merged(layers, found)
    root = _root(model.base_model, path) or ("" if alone else _tower(path))
    inside = path.removeprefix(f"{root}.") if root else path
    pooled = hasattr(model.base_model.get_submodule(root), "pooler")
    body = inside.split(".")[0] if pooled and "." in inside else None
    fused = _layouts(layers, found)
    bias = next(filter(None, map(_relative_bias, layers, found)), None)
    name = _stack_name(model, layers, sites)
    return Stack(name, path, sites, root, body, fused, bias=bias, own=own)


def _layouts(layers: list[nn.Module], found: list[dict[str, str]]) -> dict[str, Layout]:
    """Map the roles of fused projections to their layout in all layers that have one."""
    layouts: dict[str, set[Layout]] = {}
    for layer, sites in zip(layers, found, strict=True):
        for role in ("attn.qkv", "cross.qkv"):
            if path := sites.get(role):
                around, _, name = path.rpartition(".")
                known = f"{role[:-4]}.o" in sites  # its input has the size of the queries
                layout = fused_layout(layer.get_submodule(around), name) if known else WHOLE
                layouts.setdefault(role, set()).add(layout)
        if "gate_up" not in sites.get("ffn.gate_up", "gate_up"):  # by its size, in any order
            layouts["ffn.gate_up"] = {WHOLE}
    return {role: all_.pop() if len(all_) == 1 else WHOLE for role, all_ in layouts.items()}


def _sites(layer: nn.Module, usual: int) -> dict[str, str]:
    """Map the roles in a layer to paths, by the first of its possible sizes that shows an output.

    Layers of one stack may differ in size, as in vision encoders whose later stages have more
    features, and one may change it, as where such a stage starts. Without attention, a size that a
    norm of the layer has comes first: the size of most layers may be the inner one of this network.

    `usual` is the size in features of most layers of the stack.
    """
    sizes = dict.fromkeys(_sizes_of_attention(layer))
    shows = {"attn.o"} if sizes else {"ffn", "ffn.down", "mixer"}
    sizes = sizes or dict.fromkeys(_sizes_of_norms_and_projections(layer, usual))
    found = [sites_of_layer(layer, size) for size in sizes]
    return next((sites for sites in found if shows & sites.keys()), found[0])


def _sizes_of_attention(layer: nn.Module) -> Iterator[int]:
    """Yield the input size and the output size of the first attention in a layer."""
    for path, projections in attention_modules(layer):
        query = next(projections[r] for r in ("q", "q_a", "qkv", "kv_a") if r in projections)
        yield in_features(layer.get_submodule(join(path, query)))
        if "o" in projections:
            yield out_features(layer.get_submodule(join(path, projections["o"])))
        return


def _sizes_of_norms_and_projections(layer: nn.Module, usual: int) -> list[int]:
    """List the sizes that a layer without attention may have, likely ones first."""
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
    """Return whether attention is causal: as it declares, else by transformers' lists of models."""
    attentions = (m.get_submodule(path) for m in layers for path, _ in attention_modules(m))
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
    return {role: path for role, path in paths.items() if path is not None}


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
