"""Lay a family's row over a model: the sites of its anatomy, with their hosts and sizes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from adapterhub.anatomy.sites import (
    NORMS,
    SUBLAYERS,
    Anatomy,
    Family,
    FeatureSlice,
    Kind,
    Layout,
    Site,
    Stack,
    Stream,
    join,
)
from adapterhub.errors import BackboneError

FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def in_features(module: nn.Module) -> int:
    """The size of a projection's input: `Linear`, its quantized kinds, and GPT-2's `Conv1D`."""
    size = getattr(module, "in_features", None) or getattr(module, "nx", None)
    return int(size) if size else module.get_parameter("weight").shape[0]


def out_features(module: nn.Module) -> int:
    """The size of a projection's output."""
    size = getattr(module, "out_features", None) or getattr(module, "nf", None)
    return int(size) if size else module.get_parameter("weight").shape[-1]


def build_anatomy(model: PreTrainedModel, family: Family) -> Anatomy:
    """Lay a family's row over a model.

    Raises:
        BackboneError: the row does not fit: it names modules that the model does not have.
    """
    base = model.base_model
    base_path = "" if base is model else next(n for n, m in model.named_modules() if m is base)
    sites: dict[str, Site] = {}
    layers: dict[str, tuple[str, ...]] = {}
    for stack in family.stacks:
        if paths := tuple(join(base_path, path) for path in layer_paths(base, stack.layers)):
            layers[stack.name] = paths
            embed = _embed_sites(model, base_path, stack)
            inner = _stack_sites(model, stack, paths)
            sites |= {s.id: s for s in (*embed, *inner, *_mix_sites(model, stack, paths))}
    if not sites:
        raise BackboneError(
            f"the {model.config.model_type} row of families/ does not fit {type(model).__name__}",
            expected=f"a module list at {', '.join(s.layers for s in family.stacks)}",
        )
    return Anatomy(model, family, base_path, sites, layers)


def layer_paths(base: nn.Module, spec: str) -> list[str]:
    """The paths of a stack's layers; [] where the model lacks the stack."""
    paths = [""]
    for name in spec.split(".*."):
        lists = [join(path, name) for path in paths]
        paths = [f"{path}.{number}" for path in lists for number in range(_length(base, path))]
    return paths


def _length(base: nn.Module, path: str) -> int:
    module = _get(base, path)
    return len(module) if isinstance(module, nn.ModuleList) else 0


def _get(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _present(layer: nn.Module, spec: str) -> str | None:
    """The first of the `|`-separated paths that the layer has."""
    return next((path for path in spec.split("|") if _has(layer, path)), None)


def _has(layer: nn.Module, path: str) -> bool:
    return all(_get(layer, end) is not None for end in path.split(">"))


def _embed_sites(model: PreTrainedModel, base_path: str, stack: Stack) -> Iterator[Site]:
    host = join(base_path, stack.root)
    root: Any = model.get_submodule(host)
    if "input_ids" in inspect.signature(root.forward).parameters:
        width = root.get_input_embeddings().weight.shape[1]
        yield Site(f"{stack.name}.embed", stack.name, None, "embed", "embed", host, width, width)


def _mix_sites(model: PreTrainedModel, stack: Stack, layers: tuple[str, ...]) -> Iterator[Site]:
    # Where layers share modules, a hook does not know whose output it sees.
    if ".*." not in stack.layers:
        width = model.config.hidden_size
        name = f"{stack.name}.mix"
        yield Site(name, stack.name, None, "mix", "mix", layers[-1], width, width)


def _stack_sites(model: PreTrainedModel, stack: Stack, layers: tuple[str, ...]) -> Iterator[Site]:
    bias: str | None = None
    for number, prefix in enumerate(layers):
        layer = model.get_submodule(prefix)
        paths = {
            role: tuple(join(prefix, end) for end in path.split(">"))
            for role, spec in stack.sites.items()
            if (path := _present(layer, spec))
        }
        if stack.bias and _has(layer, stack.bias):
            bias = join(prefix, stack.bias.rpartition(".")[0])
        for role, kind, fields in _layer_sites(model, paths, stack):
            if role == "attn.kv":
                fields["bias"] = bias
            site_id = f"{stack.name}.{number}.{role}"
            yield Site(site_id, stack.name, number, role, kind, **fields)


def _layer_sites(
    model: PreTrainedModel, paths: Mapping[str, tuple[str, ...]], stack: Stack
) -> Iterator[tuple[str, Kind, dict[str, Any]]]:
    linear: dict[str, dict[str, Any]] = {}
    for role, path in paths.items():
        module = model.get_submodule(path[0])
        name = role.rpartition(".")[2]
        if name in NORMS:
            # Some norms have no parameters, and some stand in for none at all.
            if (weight := getattr(module, "weight", None)) is not None:
                width = weight.shape[0]
                yield role, "norm", {"host": path[0], "d_in": width, "d_out": width}
        elif name != "kv" and role not in SUBLAYERS:
            sizes = {"d_in": in_features(module), "d_out": out_features(module)}
            linear[role] = {"host": path[0], **sizes}
        if name in FUSED:
            for part_role, part in fused_parts(
                model, role, module, stack.fused.get(role, "blocks")
            ):
                size = out_features(module) // part.period * (part.stop - part.start)
                linear[part_role] = linear[role] | {"d_out": size, "part": part}
    for role, fields in linear.items():
        yield role, "linear", fields
    for role in SUBLAYERS:
        if f"{role}.kv" in paths:
            first, width = _entry(role, linear), linear[f"{role}.k"]["d_out"]
            sizes = {"d_in": first["d_in"], "d_out": width, "tap": first["host"]}
            yield f"{role}.kv", "keyvalue", {"host": paths[f"{role}.kv"][0], **sizes}
        if sublayer := _sublayer(model, role, paths, linear):
            stream = _stream(model, stack.norms, role, paths, sublayer["tap"])
            yield role, "sublayer", sublayer | {"stream": stream}


def fused_parts(
    model: PreTrainedModel, role: str, module: nn.Module, layout: Layout
) -> Iterator[tuple[str, FeatureSlice]]:
    """The parts of a fused projection: of `attn.qkv` attn.q, attn.k and attn.v, of `ffn.gate_up`
    ffn.gate and ffn.up."""
    sublayer, _, name = role.rpartition(".")
    groups, sizes = 1, [out_features(module) // 2] * 2
    if name == "qkv":
        heads = model.config.num_attention_heads
        groups = getattr(model.config, "num_key_value_heads", None) or heads
        head_dim = out_features(module) // (heads + 2 * groups)
        sizes = [count * head_dim for count in (heads, groups, groups)]
    if layout == "blocks":
        groups = 1
    start = 0
    for part, size in zip(FUSED[name], sizes, strict=True):
        stop = start + size // groups
        yield f"{sublayer}.{part}", FeatureSlice(start, stop, sum(sizes) // groups)
        start = stop


def _sublayer(
    model: PreTrainedModel,
    role: str,
    paths: Mapping[str, tuple[str, ...]],
    linear: Mapping[str, dict[str, Any]],
) -> dict[str, Any] | None:
    """A sublayer's own path, or from the input of its first projection to the output of its last
    one."""
    if role in paths:
        entry, host = paths[role][0], paths[role][-1]
        width = model.config.get_text_config().hidden_size
        sizes = {"d_in": width, "d_out": width}
        return {"host": host, "tap": entry if entry != host else None, **sizes}
    first = _entry(role, linear)
    last = next((linear[r] for r in (f"{role}.o", f"{role}.down") if r in linear), None)
    if not first or last is None:
        return None
    sizes = {"d_in": first["d_in"], "d_out": last["d_out"]}
    return {"host": last["host"], "tap": first["host"], **sizes}


def _stream(
    model: PreTrainedModel,
    norms: str | None,
    role: str,
    paths: Mapping[str, tuple[str, ...]],
    tap: str | None,
) -> Stream | None:
    """How a sublayer meets the residual stream; None where the row does not tell."""
    if norms is None:
        return None
    norm, postnorm = (paths.get(f"{role}.{name}", (None,))[0] for name in NORMS)
    pre = norms == "pre" or (norms != "post" and getattr(model.config, norms))
    if norm is None and (postnorm is None or not pre):
        return None  # one norm serves two sublayers
    return Stream(norm or tap, None, postnorm) if pre else Stream(tap, norm, None)


def _entry(role: str, linear: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The first projection of a sublayer: its input is the sublayer's x; {} where it has none."""
    entries = (f"{role}.{name}" for name in ("q", "qkv", "up", "gate_up"))
    return next((linear[r] for r in entries if r in linear), {})
