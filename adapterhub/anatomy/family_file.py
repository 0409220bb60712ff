"""User-defined rows, for all models of a type in this process or for one model.

A row as plain data is read strictly from YAML or a mapping, and written as YAML or Python source:

    model_types: [persimmon]
    stacks:
    - name: decoder
      layers: layers
      sites: {attn.qkv: self_attn.query_key_value, attn.o: self_attn.dense, ...}
      fused: {attn.qkv: heads}
      norms: pre
    below: [embed_tokens]

The fields are the attributes of `Family` and `Stack`. Fields with default values are omitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from adapterhub.anatomy.backbone import (
    Backbone,
    has_path,
    layer_paths,
)
from adapterhub.anatomy.families import FAMILIES
from adapterhub.anatomy.family import Family, Stack
from adapterhub.anatomy.sites import (
    ROLES,
)
from adapterhub.config.options import from_dict, to_dict
from adapterhub.config.yaml import dump_yaml, load_yaml
from adapterhub.errors import BackboneError, ConfigError, did_you_mean

# Projections outside the known roles: `mixer.in_proj`, `moe.gate`.
_OPEN = ("attn", "cross", "ffn", "mixer", "moe", "other")


_FUSED = ("qkv", "gate_up")


FamilySource = Family | Mapping[str, Any] | str | Path


def register_family(family: FamilySource, *, replace: bool = False) -> Family:
    """Register a row for the model types it names.

    The row applies to models that are loaded later or that do not have adapters yet.

    Args:
        family: a `Family`, a mapping of its fields, or a YAML file.
        replace: replace existing rows for these types.

    Raises:
        ConfigError: the row is not valid, or one of its types already has another row.
    """
    row = read_family(family)
    taken = [t for t in row.model_types if FAMILIES.get(t, row) != row]
    if taken and not replace:
        raise ConfigError(
            f"there is a row for {', '.join(taken)} already",
            hint="register_family(..., replace=True), or load_backbone(..., family=...) for one "
            "model",
        )
    FAMILIES.update(dict.fromkeys(row.model_types, row))
    return row


def use_family(model: PreTrainedModel, family: FamilySource) -> None:
    """Use a row for one model, which must not have adapters yet.

    Raises:
        ConfigError: the row is not valid.
        BackboneError: the row is for another model type, or names modules that the model lacks.
    """
    row = read_family(family)
    model_type = model.config.model_type
    if model_type not in row.model_types:
        raise BackboneError(
            f"the row is for {', '.join(row.model_types)}, the model is of type {model_type}",
            hint=f"model_types: [{model_type}]",
        )
    if missing := list(_missing(model.base_model, row)):
        raise BackboneError(
            f"the row of {model_type} names modules that {type(model).__name__} lacks",
            offenders=missing,
            hint="adapterhub inspect MODEL --draft-family writes the row of what was found",
        )
    Backbone.of(model).family = row


def _missing(base: nn.Module, row: Family) -> Iterator[str]:
    """Yield the modules that a row names and all layers of a model lack."""
    paths = [path for path, _ in base.named_modules()]
    for stack in row.stacks:
        layers = [base.get_submodule(path) for path in layer_paths(base, stack.layers)]
        if not layers:
            lists = [p for p, m in base.named_modules() if isinstance(m, nn.ModuleList)]
            near = did_you_mean(stack.layers, lists)
            yield f"{stack.name}: no module list {stack.layers!r}{near}"
        else:
            yield from _missing_in(layers, stack)
        if stack.root and stack.root not in paths:
            yield f"{stack.name}: root {stack.root!r}{did_you_mean(stack.root, paths)}"
    yield from (f"below: {p!r}{did_you_mean(p, paths)}" for p in row.below if p not in paths)


def _missing_in(layers: list[nn.Module], stack: Stack) -> Iterator[str]:
    inside = list({path: None for layer in layers for path, _ in layer.named_modules()})
    for number, sites in ((None, stack.sites), *stack.own.items()):
        for role, spec in sites.items():
            for path in spec.split("|"):
                if not any(has_path(layer, path) for layer in layers):
                    key = role if number is None else f"own.{number}.{role}"
                    yield f"{stack.name}.{key}: {path!r}{did_you_mean(path, inside)}"


def read_family(source: FamilySource) -> Family:
    """Read a row from a YAML file or a mapping, and check it.

    Raises:
        ConfigError: the file cannot be read, or the row has unknown or missing fields, values of a
            wrong type, unknown roles, or fused projections that are not sites. One error lists all
            problems.
    """
    if isinstance(source, Family):
        row = source
    else:
        data = dict(source) if isinstance(source, Mapping) else load_yaml(source)
        row = from_dict(Family, _with_text_keys(data), suggest=_nearest_field)
        row = replace(row, stacks=tuple(map(_with_numbers, row.stacks)))
    if problems := list(_problems(row)):
        raise ConfigError(
            f"the row of {', '.join(row.model_types) or 'no model type'} is not valid",
            offenders=problems,
            hint="adapterhub inspect MODEL --draft-family writes one to start from",
        )
    return row


def family_data(row: Family) -> dict[str, Any]:
    """Return a row as plain data, without fields that have default values."""
    data = _changed(row)
    data["stacks"] = [_changed(stack) for stack in row.stacks]
    return data


def family_yaml(row: Family) -> str:
    """Format a row as YAML, for `read_family`."""
    return dump_yaml(family_data(row))


def _changed(row: Family | Stack) -> dict[str, Any]:
    data = to_dict(row)
    for field in fields_of(row):
        factory = field.default_factory
        default = field.default if factory is MISSING else factory()
        if getattr(row, field.name) == default:
            del data[field.name]
    return data


def _with_text_keys(data: dict[str, Any]) -> dict[str, Any]:
    """Convert layer numbers to strings: YAML allows number keys, JSON does not."""
    stacks = data.get("stacks")
    if not isinstance(stacks, list | tuple):
        return data
    return data | {"stacks": [_with_text_numbers(stack) for stack in stacks]}


def _with_text_numbers(stack: object) -> object:
    own = stack.get("own") if isinstance(stack, Mapping) else None
    if not isinstance(stack, Mapping) or not isinstance(own, Mapping):
        return stack
    return {**stack, "own": {str(number): sites for number, sites in own.items()}}


def _with_numbers(stack: Stack) -> Stack:
    own = {int(n) if str(n).isdigit() else n: sites for n, sites in stack.own.items()}
    return replace(stack, own=own)


def _nearest_field(path: str) -> str:
    name = path.rpartition(".")[2]
    return did_you_mean(name, [field.name for cls in (Family, Stack) for field in fields_of(cls)])


def _problems(row: Family) -> Iterator[str]:
    if not row.model_types:
        yield "model_types is empty, expected config.model_type of a model"
    if not row.stacks:
        yield "stacks is empty, expected one stack of layers or two"
    names = [stack.name for stack in row.stacks]
    twice = sorted({name for name in names if names.count(name) > 1})
    yield from (f"two stacks are named {name!r}" for name in twice)
    for stack in row.stacks:
        yield from (f"{stack.name}: {problem}" for problem in _stack_problems(stack))


def _stack_problems(stack: Stack) -> Iterator[str]:
    wrong = [number for number in stack.own if not isinstance(number, int)]
    yield from (f"own.{number} is not the number of a layer" for number in wrong)
    roles = {role for sites in (stack.sites, *stack.own.values()) for role in sites}
    for role in sorted(roles):
        if role not in ROLES and (role.partition(".")[0] not in _OPEN or "." not in role):
            yield f"{role!r} is not a role of a site{did_you_mean(role, ROLES)}"
    for role in stack.fused:
        if role not in roles:
            yield f"fused.{role} is not in sites{did_you_mean(role, roles)}"
        elif role.rpartition(".")[2] not in _FUSED:
            yield f"fused.{role}: only {' and '.join(_FUSED)} have parts"


def row_text(row: Family) -> str:
    """Format a row as Python source."""
    lines = ["Family("]
    lines.append(f"    {_quoted(row.model_types)},")
    lines.append("    stacks=(")
    for stack in row.stacks:
        lines += [f"        {line}" for line in _stack_lines(stack)]
    lines.append("    ),")
    lines.append(f"    below={_quoted(row.below)},")
    if row.positions_from_padding:
        lines.append("    positions_from_padding=True,")
    if row.constants:
        lines.append(f"    constants={_quoted(row.constants)},")
    if row.batch_dim:
        lines.append(f"    batch_dim={row.batch_dim},")
    if row.positions_follow_mask:
        lines.append("    positions_follow_mask=True,")
    if row.query_stream:
        lines.append(f"    query_stream={_quoted(row.query_stream)},")
    return "\n".join([*lines, ")"])


def _stack_lines(stack: Stack) -> list[str]:
    lines = ["Stack(", f"    {_quoted(stack.name)},", f"    {_quoted(stack.layers)},"]
    lines += [f"    {line}" for line in _site_lines(stack.sites, "{", "},")]
    if stack.root:
        lines.append(f"    root={_quoted(stack.root)},")
    if stack.body:
        lines.append(f"    body={_quoted(stack.body)},")
    if stack.norms:
        lines.append(f"    norms={_quoted(stack.norms)},")
    if stack.bias:
        lines.append(f"    bias={_quoted(stack.bias)},")
    if stack.fused:
        layouts = ", ".join(f"{_quoted(role)}: {_quoted(v)}" for role, v in stack.fused.items())
        lines.append(f"    fused={{{layouts}}},")
    if stack.own:
        lines.append("    own={")
        for number, sites in stack.own.items():
            lines += [f"        {line}" for line in _site_lines(sites, f"{number}: {{", "},")]
        lines.append("    },")
    return [*lines, "),"]


def _site_lines(sites: Mapping[str, str], start: str, end: str) -> list[str]:
    return [
        start,
        *(f"    {_quoted(role)}: {_quoted(path)}," for role, path in sorted(sites.items())),
        end,
    ]


def _quoted(value: str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        inside = ", ".join(map(_quoted, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return f'"{value}"'
