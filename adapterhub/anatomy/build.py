"""Build the anatomy of a model: apply its family's row to its modules."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from adapterhub.anatomy.discovery import discover
from adapterhub.anatomy.families import FAMILIES
from adapterhub.anatomy.family import Family, Layout, Stack
from adapterhub.anatomy.projections import in_features, out_features
from adapterhub.anatomy.sites import (
    NORMS,
    SUBLAYERS,
    Anatomy,
    FeatureSlice,
    Kind,
    Site,
    Stream,
    join,
)
from adapterhub.errors import BackboneError

FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def anatomy_of(model: PreTrainedModel) -> Anatomy:
    """Return the anatomy of a model, from its family's row or, without one, from its structure.

    Raises:
        BackboneError: there is no row for this architecture and its structure is ambiguous; the
            error prints the row to write.
    """
    return build_anatomy(model, FAMILIES.get(model.config.model_type) or discover(model))


def build_anatomy(model: PreTrainedModel, family: Family) -> Anatomy:
    """Apply a family's row to a model.

    Raises:
        BackboneError: the row does not fit: the model has none of the modules it names.
    """
    base = model.base_model
    base_path = "" if base is model else next(n for n, m in model.named_modules() if m is base)
    sites: dict[str, Site] = {}
    layers: dict[str, tuple[str, ...]] = {}
    for stack in family.stacks:
        if paths := tuple(join(base_path, path) for path in layer_paths(base, stack.layers)):
            layers[stack.name] = paths
            for site in _stack_sites(model, base_path, stack, paths):
                sites[site.id] = site
    if not sites:
        raise BackboneError(
            f"the {model.config.model_type} row of families/ does not fit {type(model).__name__}",
            expected=f"a module list at {', '.join(s.layers for s in family.stacks)}",
        )
    return Anatomy(model, family, base_path, sites, layers)


def layer_paths(base: nn.Module, spec: str) -> list[str]:
    """List the paths of a stack's layers; empty if the model does not have the stack."""
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


def _first_existing(layer: nn.Module, spec: str) -> str | None:
    """Return the first of the `|`-separated paths that exists in the layer."""
    return next((path for path in spec.split("|") if _has(layer, path)), None)


def _has(layer: nn.Module, path: str) -> bool:
    return all(_get(layer, end) is not None for end in path.split(">"))


def _stack_sites(
    model: PreTrainedModel, base_path: str, stack: Stack, layers: tuple[str, ...]
) -> Iterator[Site]:
    root: Any = model.get_submodule(host := join(base_path, stack.root))
    if "input_ids" in inspect.signature(root.forward).parameters:
        width = root.get_input_embeddings().weight.shape[1]
        yield Site(f"{stack.name}.embed", stack.name, None, "embed", "embed", host, width, width)
    yield from _sites_of_layers(model, stack, layers)
    # Where layers share modules, a hook cannot tell which layer's output it receives.
    if ".*." not in stack.layers:
        width = model.config.hidden_size
        yield Site(f"{stack.name}.mix", stack.name, None, "mix", "mix", layers[-1], width, width)


def _sites_of_layers(
    model: PreTrainedModel, stack: Stack, layers: tuple[str, ...]
) -> Iterator[Site]:
    bias: str | None = None
    for number, prefix in enumerate(layers):
        layer = model.get_submodule(prefix)
        paths = {
            role: tuple(join(prefix, end) for end in path.split(">"))
            for role, spec in stack.sites.items()
            if (path := _first_existing(layer, spec))
        }
        if stack.bias and _has(layer, stack.bias):
            bias = join(prefix, stack.bias.rpartition(".")[0])
        for role, kind, fields in _layer_sites(model, paths, stack):
            if role == "attn.kv":
                fields["bias"] = bias
            site_id = f"{stack.name}.{number}.{role}"
            yield Site(site_id, stack.name, number, role, kind, **fields)


# The functions below pass `paths`: role -> the path of its module, or of the first and last module
# of a sublayer; and `linear`: role of a projection -> the fields of its site.
_Paths = Mapping[str, tuple[str, ...]]
_Fields = dict[str, Any]


def _layer_sites(
    model: PreTrainedModel, paths: _Paths, stack: Stack
) -> Iterator[tuple[str, Kind, _Fields]]:
    for role, fields in _norms(model, paths):
        yield role, "norm", fields
    linear = _projections(model, paths, stack)
    for role, fields in linear.items():
        yield role, "linear", fields
    for role in SUBLAYERS:
        if f"{role}.kv" in paths:
            yield f"{role}.kv", "keyvalue", _keyvalue(role, paths, linear)
        if sublayer := _sublayer(model, role, paths, linear):
            stream = _stream(model, stack.norms, role, paths, sublayer["input_host"])
            yield role, "sublayer", sublayer | {"stream": stream}


def _norms(model: PreTrainedModel, paths: _Paths) -> Iterator[tuple[str, _Fields]]:
    for role, (path, *_) in paths.items():
        if role.rpartition(".")[2] in NORMS:
            # Some norms have no parameters; an identity module may replace a norm.
            weight = getattr(model.get_submodule(path), "weight", None)
            if weight is not None:
                yield role, {"host": path, "d_in": weight.shape[0], "d_out": weight.shape[0]}


def _projections(model: PreTrainedModel, paths: _Paths, stack: Stack) -> dict[str, _Fields]:
    linear: dict[str, _Fields] = {}
    for role, (path, *_) in paths.items():
        name = role.rpartition(".")[2]
        if name in (*NORMS, "kv") or role in SUBLAYERS:
            continue
        module = model.get_submodule(path)
        d_out = out_features(module)
        linear[role] = {"host": path, "d_in": in_features(module), "d_out": d_out}
        if name in FUSED:
            layout = stack.fused.get(role, "blocks")
            for part_role, part in fused_parts(model, role, module, layout):
                size = d_out // part.period * (part.stop - part.start)
                linear[part_role] = linear[role] | {"d_out": size, "part": part}
    return linear


def fused_parts(
    model: PreTrainedModel, role: str, module: nn.Module, layout: Layout
) -> Iterator[tuple[str, FeatureSlice]]:
    """Yield the roles and features of a fused projection's parts.

    `attn.qkv` consists of attn.q, attn.k and attn.v, `ffn.gate_up` of ffn.gate and ffn.up.

    Args:
        model: the model; its configuration has the numbers of heads.
        role: the role of the fused projection.
        module: the fused projection.
        layout: how its output holds the parts, see `Stack.fused`.
    """
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


def _keyvalue(role: str, paths: _Paths, linear: Mapping[str, _Fields]) -> _Fields:
    first = _first_projection(role, linear)
    return {
        "host": paths[f"{role}.kv"][0],
        "d_in": first["d_in"],
        "d_out": linear[f"{role}.k"]["d_out"],
        "input_host": first["host"],
    }


def _sublayer(
    model: PreTrainedModel, role: str, paths: _Paths, linear: Mapping[str, _Fields]
) -> _Fields | None:
    """Return a sublayer's fields, from its own path or from its first and last projection."""
    if role in paths:
        first_path, host = paths[role][0], paths[role][-1]
        width = model.config.get_text_config().hidden_size
        input_host = first_path if first_path != host else None
        return {"host": host, "input_host": input_host, "d_in": width, "d_out": width}
    first = _first_projection(role, linear)
    last = next((linear[r] for r in (f"{role}.o", f"{role}.down") if r in linear), None)
    if not first or last is None:
        return None
    sizes = {"d_in": first["d_in"], "d_out": last["d_out"]}
    return {"host": last["host"], "input_host": first["host"], **sizes}


def _first_projection(role: str, linear: Mapping[str, _Fields]) -> _Fields:
    """Return the projection whose input is the sublayer's x; {} if there is none."""
    roles = (f"{role}.{name}" for name in ("q", "qkv", "up", "gate_up"))
    return next((linear[r] for r in roles if r in linear), {})


def _stream(
    model: PreTrainedModel, norms: str | None, role: str, paths: _Paths, input_host: str | None
) -> Stream | None:
    """Return how a sublayer is connected to the residual stream; None if the row has no norms."""
    if norms is None:
        return None
    norm, postnorm = (paths.get(f"{role}.{name}", (None,))[0] for name in NORMS)
    pre = norms == "pre" or (norms != "post" and getattr(model.config, norms))
    if norm is None and (postnorm is None or not pre):
        return None  # one norm serves two sublayers
    return Stream(norm or input_host, None, postnorm) if pre else Stream(input_host, norm, None)
