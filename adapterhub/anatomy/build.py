"""Build the anatomy of a model: apply its family's row to its modules.

Rows of the user's own, for all models of a type in this process or for one model.

A row as plain data is read strictly from YAML or a mapping, and written as YAML or Python source:

    model_types: [persimmon]
    stacks:
    - name: decoder
      layers: layers
      sites: {attn.qkv: self_attn.query_key_value, attn.o: self_attn.dense, ...}
      fused: {attn.qkv: heads}
      norms: pre
    below: [embed_tokens]

The fields are those of `Family` and `Stack`; what has its default is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from adapterhub.anatomy.discovery import discover
from adapterhub.anatomy.families import FAMILIES
from adapterhub.anatomy.family import WHOLE, Family, Layout, Stack
from adapterhub.anatomy.forward_source import (
    is_called_whole,
    multiplies_weight,
    reads_token_ids,
    reversible_stack,
)
from adapterhub.anatomy.module_sites import (
    module_anatomy,
    never_called,
    read_by_owners,
    sites_by_path,
)
from adapterhub.anatomy.own_modules import (
    as_model,
    first_existing,
    has_path,
    is_view,
    layer_paths,
    own_modules,
    still_statistics,
    token_table,
)
from adapterhub.anatomy.projections import (
    HeldWeight,
    WeightMatrix,
    expert_weights,
    in_features,
    is_projection,
    latent_sizes,
    out_features,
    plain_projections,
    router_weight,
    usual_size,
)
from adapterhub.anatomy.sites import (
    EXPERTS,
    NORMS,
    ROLES,
    ROUTER,
    SUBLAYERS,
    Anatomy,
    FeatureSlice,
    Kind,
    Site,
    Stream,
    join,
)
from adapterhub.config.options import from_dict, to_dict
from adapterhub.config.yaml import dump_yaml, load_yaml
from adapterhub.errors import BackboneError, ConfigError, did_you_mean

_ROW = "_adapterhub_family"
# Projections outside of the known roles: `mixer.in_proj`, `moe.gate`.
_OPEN = ("attn", "cross", "ffn", "mixer", "moe", "other")
_FUSED = ("qkv", "gate_up")
FamilySource = Family | Mapping[str, Any] | str | Path


def register_family(family: FamilySource, *, replace: bool = False) -> Family:
    """Add a row for the models of its types, which are loaded after this or have no adapters yet.

    Args:
        family: a `Family`, a mapping of its fields, or a YAML file.
        replace: replace the rows of these types.

    Raises:
        ConfigError: the row is not valid, or there is another row for one of its types.
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
    """Use a row for one model, which has no adapters.

    Raises:
        ConfigError: the row is not valid.
        BackboneError: it is for another type of model, or names modules that the model lacks.
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
    setattr(model, _ROW, row)


def forget_family(model: PreTrainedModel) -> None:
    """Use the row of its type for a model again, or none."""
    vars(model).pop(_ROW, None)


def own_family(model: PreTrainedModel) -> Family | None:
    """Return the row that `use_family` gave to a model, if any."""
    row: Family | None = getattr(model, _ROW, None)
    return row


def _missing(base: nn.Module, row: Family) -> Iterator[str]:
    """Yield the modules that a row names, but no layer of a model has."""
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
                    where = role if number is None else f"own.{number}.{role}"
                    yield f"{stack.name}.{where}: {path!r}{did_you_mean(path, inside)}"


def read_family(source: FamilySource) -> Family:
    """Read a row from a YAML file or a mapping, and check it.

    Raises:
        ConfigError: the file cannot be read; unknown or missing fields, values of a wrong type,
            unknown roles, or fused projections that are no sites. All problems in one error.
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
    """Return a row as plain data, without the fields that have their defaults."""
    data = _changed(row)
    data["stacks"] = [_changed(stack) for stack in row.stacks]
    return data


def family_yaml(row: Family) -> str:
    """Write a row as YAML, for `read_family`."""
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
    """Write the numbers of layers as texts: YAML has numbers there, JSON cannot."""
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
    """Write a row as Python source."""
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


# Inputs with one entry per token, which virtual tokens would not have.
PER_TOKEN = frozenset({"bbox", "xpath_tags_seq", "lang_ids", "langs", "global_attention_mask"})
_TOKENS = frozenset({"input_ids", "inputs_embeds"})
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def anatomy_of(model: nn.Module, head: Sequence[str] = ()) -> Anatomy:
    """Return the anatomy of a model, from its family's row or, without one, from its structure.

    A row of the model's own (`use_family`) comes before that of its type. The sites of a module
    that is not of transformers are named by their paths; `head` are its modules that are its head.
    """
    model = as_model(model)
    with still_statistics(model):
        if is_view(model):
            return module_anatomy(model, tuple(head))
        row = own_family(model) or FAMILIES.get(model.config.model_type)
        return build_anatomy(model, row or discover(model))


def build_anatomy(model: PreTrainedModel, family: Family) -> Anatomy:
    """Apply a family's row to a model.

    Raises:
        BackboneError: the row does not fit: the model has none of the modules it names, or fused
            projections of other sizes; or it has two stacks of one name.
    """
    _check_names(family)
    base = model.base_model
    base_path = "" if base is model else next(n for n, m in model.named_modules() if m is base)
    sites: dict[str, Site] = {}
    layers: dict[str, tuple[str, ...]] = {}
    modules = dict(own_modules(model))
    read = read_by_owners(modules)
    owners = never_called(modules, read)
    for stack in family.stacks:
        if paths := tuple(join(base_path, path) for path in layer_paths(base, stack.layers)):
            layers[stack.name] = paths
            for site in _stack_sites(model, base_path, stack, paths, owners):
                sites[site.id] = site
    for site in _output_site(model, list(layers)[-1]) if layers else ():
        sites[site.id] = site
    unused: list[str] = []
    if len(layers) < len(family.stacks):  # without an encoder, cross-attention never runs
        unused = [site.host for site in sites.values() if _is_cross(site)]
        sites = {name: site for name, site in sites.items() if not _is_cross(site)}
    if not sites and family.stacks and family.model_types[0] in FAMILIES:
        raise BackboneError(
            f"the {model.config.model_type} row of families/ does not fit {type(model).__name__}",
            expected=f"a module list at {', '.join(s.layers for s in family.stacks)}",
        )
    anatomy = Anatomy(model, family, base_path, sites, layers)
    return replace(anatomy, by_path=sites_by_path(anatomy, read, unused))


def _is_cross(site: Site) -> bool:
    return site.role.partition(".")[0] == "cross"


def _check_names(family: Family) -> None:
    """Refuse a row with two stacks of one name."""
    names = [stack.name for stack in family.stacks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BackboneError(
            f"the row of {', '.join(family.model_types)} has two stacks of one name",
            offenders=twice,
            expected="one stack of each name",
        )


def _stack_sites(
    model: PreTrainedModel,
    base_path: str,
    stack: Stack,
    layers: tuple[str, ...],
    owners: Mapping[str, str],
) -> Iterator[Site]:
    root = model.get_submodule(host := join(base_path, stack.root))
    first = model.get_submodule(layers[0])
    embeds = isinstance(token_table(model), nn.Embedding) and not reads_token_ids(root, first)
    embeds = embeds and is_called_whole(model, host)
    if embeds and (width := _embedding_width(root)):
        yield Site(f"{stack.name}.embed", stack.name, None, "embed", "embed", host, width, width)
    sites = list(_sites_of_layers(model, stack, layers, owners))
    widths = {s.d_out for s in sites if s.kind == "sublayer"}
    one_stream = len(widths) == 1 and not reversible_stack(model, layers[0])
    if one_stream:
        yield from _states_behind_embeddings(model, stack, root, layers, *widths)
    yield from sites
    if not one_stream:
        return
    (width,) = widths
    for number, host in enumerate(layers):
        name = f"{stack.name}.{number}.layer"
        yield Site(name, stack.name, number, "layer", "layer", host, width, width)
    # Where layers share modules, a hook cannot tell which layer's output it receives.
    if ".*." not in stack.layers:
        yield Site(f"{stack.name}.mix", stack.name, None, "mix", "mix", layers[-1], width, width)


def _states_behind_embeddings(
    model: PreTrainedModel,
    stack: Stack,
    root: nn.Module,
    layers: tuple[str, ...],
    layer_width: int,
) -> Iterator[Site]:
    """Yield the site of the states that enter the layers of a stack that embeds tokens.

    Where embeddings are narrower than layers, or layers share modules, the states enter the
    projection that widens them.
    """
    table = token_table(model)
    reads = inspect.signature(root.forward).parameters.keys() & _TOKENS
    if not reads or not isinstance(table, nn.Embedding):
        return
    width = table.weight.shape[1]
    host: str | None = layers[0]
    if width != layer_width or ".*." in stack.layers:
        inside = tuple(f"{layer}." for layer in layers)
        found = (
            path
            for path, module in own_modules(model)
            if is_projection(module) and not path.startswith(inside)
            if (in_features(module), out_features(module)) == (width, layer_width)
        )
        host = next(found, None)
    if host is not None:
        yield Site(f"{stack.name}.input", stack.name, None, "input", "states", host, width, width)


def _output_site(model: PreTrainedModel, stack: str) -> Iterator[Site]:
    """Yield the site of the states that the output layer of a language model reads."""
    head = model.get_output_embeddings()
    path = next((path for path, module in own_modules(model) if module is head), None)
    if path is not None and is_projection(head):
        width = in_features(head)
        yield Site(f"{stack}.output", stack, None, "output", "states", path, width, width)


def _embedding_width(root: nn.Module) -> int | None:
    """Return the width of a stack's token embeddings; None if none can be put in front of them."""
    table = token_table(root)
    parameters = inspect.signature(root.forward).parameters
    takes = {"input_ids", "inputs_embeds", "attention_mask"} <= parameters.keys()
    takes = takes and parameters["input_ids"].default is None  # embeddings alone are enough
    if takes and not PER_TOKEN & parameters.keys() and isinstance(table, nn.Embedding):
        return table.weight.shape[1]
    return None


def _sites_of_layers(
    model: PreTrainedModel, stack: Stack, layers: tuple[str, ...], owners: Mapping[str, str]
) -> Iterator[Site]:
    bias: str | None = None
    for number, prefix in enumerate(layers):
        layer = model.get_submodule(prefix)
        paths = {
            role: tuple(join(prefix, end) for end in path.split(">"))
            for role, spec in stack.own.get(number, stack.sites).items()
            if (path := first_existing(layer, spec)) is not None
        }
        paths = {role: path for role, path in paths.items() if _has_sublayer(role, paths)}
        if stack.bias and has_path(layer, stack.bias):
            bias = join(prefix, stack.bias.rpartition(".")[0])
        for role, kind, fields in _layer_sites(model, layer, paths, stack, owners):
            if role == "attn.kv":
                fields["bias"] = bias
            site_id = f"{stack.name}.{number}.{role}"
            yield Site(site_id, stack.name, number, role, kind, **fields)


def _has_sublayer(role: str, roles: Iterable[str]) -> bool:
    """Return whether a layer has the sublayer that a norm belongs to; true for other roles.

    Experts alone are none: parameters of such norms have their paths as names in files.
    """
    sublayer, _, name = role.partition(".")
    return name not in NORMS or any(
        r.partition(".")[0] == sublayer and r.partition(".")[2] not in NORMS
        for r in roles
        if r not in (EXPERTS, ROUTER)
    )


# The functions below pass `paths`: role -> the path of its module, or of the first and last module
# of a sublayer; and `linear`: role of a projection -> the fields of its site.
_Paths = Mapping[str, tuple[str, ...]]
_Fields = dict[str, Any]


def _layer_sites(
    model: PreTrainedModel,
    layer: nn.Module,
    paths: _Paths,
    stack: Stack,
    owners: Mapping[str, str],
) -> Iterator[tuple[str, Kind, _Fields]]:
    for role, fields in _norms(model, paths):
        yield role, "norm", fields
    linear = _projections(model, paths, stack, owners)
    for role, fields in linear.items():
        yield role, "linear", fields
    for role, fields in _held_weights(model, paths):
        yield role, "weight", fields
    for role in SUBLAYERS:
        if f"{role}.kv" in paths and (own := _keyvalue(model, role, paths, linear)):
            yield f"{role}.kv", "keyvalue", own
        if sublayer := _sublayer(model, layer, role, paths, linear):
            stream = _stream(model, stack.norms, role, paths, sublayer.get("input_host"))
            yield role, "sublayer", sublayer | {"stream": stream}


def _norms(model: PreTrainedModel, paths: _Paths) -> Iterator[tuple[str, _Fields]]:
    for role, (path, *_) in paths.items():
        if role.rpartition(".")[2] in NORMS:
            # Some norms have no parameters; an identity module may replace a norm.
            weight = getattr(model.get_submodule(path), "weight", None)
            if weight is not None:
                yield role, {"host": path, "d_in": weight.shape[0], "d_out": weight.shape[0]}


def _held_weights(model: PreTrainedModel, paths: _Paths) -> Iterator[tuple[str, _Fields]]:
    """Yield the sites of routed experts, one for each projection, and of a router."""
    weights: list[tuple[str, str, HeldWeight]] = []
    if path := paths.get(EXPERTS):
        projections = expert_weights(model.get_submodule(path[0]))
        weights += [(f"{EXPERTS}.{name}", path[0], held) for name, held in projections.items()]
    if (path := paths.get(ROUTER)) and (held := router_weight(model.get_submodule(path[0]))):
        weights.append((ROUTER, path[0], held))
    for role, host, held in weights:
        d_in, d_out = held.sizes(model.get_submodule(host))
        yield role, {"host": host, "d_in": d_in, "d_out": d_out, "held": held}


def _projections(
    model: PreTrainedModel, paths: _Paths, stack: Stack, owners: Mapping[str, str]
) -> dict[str, _Fields]:
    """Return the fields of the sites of projections, by role.

    The host of one that is never called is the module that reads its weight, of `owners`.
    """
    linear: dict[str, _Fields] = {}
    for role, (path, *_) in paths.items():
        name = role.rpartition(".")[2]
        module = model.get_submodule(path)
        owner, _, child = path.rpartition(".")
        if multiplies_weight(model.get_submodule(owner), child):
            continue
        held = role == EXPERTS or (role == ROUTER and router_weight(module) is not None)
        if name in (*NORMS, "kv") or role in SUBLAYERS or held:
            continue
        d_out = out_features(module)
        linear[role] = {"host": path, "d_in": in_features(module), "d_out": d_out}
        if path in owners:
            host, inside = owners[path], path[len(owners[path]) + 1 :]
            matrix = WeightMatrix(
                f"{inside}.weight", f"{inside}.bias", transposed=hasattr(module, "nx")
            )
            linear[role] |= {"host": host, "matrix": matrix}
            continue
        layout = stack.fused.get(role, "blocks")
        if name in FUSED and layout != WHOLE:
            output = paths.get(f"{role.rpartition('.')[0]}.o")
            queries = in_features(model.get_submodule(output[0])) if output else None
            for part_role, part in fused_parts(model, role, module, layout, queries):
                size = d_out // part.period * (part.stop - part.start)
                linear[part_role] = linear[role] | {"d_out": size, "part": part}
    return linear


def fused_parts(
    model: PreTrainedModel, role: str, module: nn.Module, layout: Layout, queries: int | None
) -> Iterator[tuple[str, FeatureSlice]]:
    """Yield the roles and features of a fused projection's parts.

    `attn.qkv` consists of attn.q, attn.k and attn.v, `ffn.gate_up` of ffn.gate and ffn.up.

    `queries` is the size of attn.q; None if only the configuration has it.

    Raises:
        BackboneError: the parts do not have the size of the projection together.
    """
    sublayer, _, name = role.rpartition(".")
    groups, sizes = 1, [out_features(module) // 2] * 2
    if name == "qkv":
        groups, sizes = _attention_sizes(model, out_features(module), layout, queries)
    if sum(sizes) != out_features(module) or any(size % groups for size in sizes):
        raise BackboneError(
            f"{role} of {model.config.model_type} does not consist of {', '.join(FUSED[name])}: "
            f"its output has {out_features(module)} features, these have {sizes}",
            expected="a row whose fused projections have the sizes of the configuration's heads",
        )
    start = 0
    for part, size in zip(FUSED[name], sizes, strict=True):
        stop = start + size // groups
        yield f"{sublayer}.{part}", FeatureSlice(start, stop, sum(sizes) // groups)
        start = stop


def _attention_sizes(
    model: PreTrainedModel, fused: int, layout: Layout, queries: int | None
) -> tuple[int, list[int]]:
    """Return the number of runs in a fused output, and the sizes of q, k and v in all of them."""
    if queries is None:
        heads, groups = _head_counts(model)
        queries = fused // (heads + 2 * groups) * heads
    keys = (fused - queries) // 2
    if layout == "blocks":
        return 1, [queries, keys, keys]
    heads, _ = _head_counts(model)
    return max(keys * heads // queries, 1), [queries, keys, keys]


def _head_counts(model: PreTrainedModel) -> tuple[int, int]:
    """Return the numbers of query heads and of key-value heads.

    Raises:
        BackboneError: the configuration does not have them.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise BackboneError(
            f"the configuration of {model.config.model_type} has no num_attention_heads",
            expected="a row without fused projections, or a configuration with this field",
        )
    groups = getattr(config, "num_key_value_heads", None)
    return heads, groups if isinstance(groups, int) else heads


def _keyvalue(
    model: PreTrainedModel, role: str, paths: _Paths, linear: Mapping[str, _Fields]
) -> _Fields | None:
    """Return the fields of an attention's keys and values, if their sizes are known."""
    first, host = _first_projection(role, linear), paths[f"{role}.kv"][0]
    sizes = latent_sizes(model.get_submodule(host))
    if f"{role}.k" in linear:
        keys = linear[f"{role}.k"]["d_out"]
        sizes = keys, linear.get(f"{role}.v", {"d_out": keys})["d_out"]
    elif {f"{role}.qkv", f"{role}.o"} <= linear.keys():  # in an unknown order
        keys = (linear[f"{role}.qkv"]["d_out"] - linear[f"{role}.o"]["d_in"]) // 2
        sizes = keys, keys
    if not first or sizes is None:
        return None
    values = None if sizes[0] == sizes[1] else sizes[1]
    own = {"d_in": first["d_in"], "d_out": sizes[0], "d_values": values}
    return {"host": host, "input_host": first["host"], **own}


def _sublayer(
    model: PreTrainedModel,
    layer: nn.Module,
    role: str,
    paths: _Paths,
    linear: Mapping[str, _Fields],
) -> _Fields | None:
    """Return a sublayer's fields, from its own path or from its first and last projection."""
    if role in paths:
        first_path, host = paths[role][0], paths[role][-1]
        width = _own_width(model, host) or _layer_width(model, layer, paths, linear)
        input_host = first_path if first_path != host else None
        return {"host": host, "input_host": input_host, "d_in": width, "d_out": width}
    first = _first_projection(role, linear)
    last = next((linear[r] for r in (f"{role}.o", f"{role}.down") if r in linear), None)
    if not first or last is None:
        return None
    sizes = {"d_in": first["d_in"], "d_out": last["d_out"]}
    hosts = first["host"], last["host"]
    if "matrix" in first or "matrix" in last:  # no call of theirs has the input or the output
        return {"host": hosts[0], **sizes} if hosts[0] == hosts[1] else None
    return {"host": hosts[1], "input_host": hosts[0], **sizes}


def _own_width(model: PreTrainedModel, path: str) -> int | None:
    """Return the hidden size if it is the one size that a module's projections read and write.

    A layer's attention may read more than one hidden state, as in Zamba 2.
    """
    projections = plain_projections(model.get_submodule(path)).values()
    common = set(map(in_features, projections)) & set(map(out_features, projections))
    hidden = getattr(model.config.get_text_config(), "hidden_size", None)
    return hidden if common == {hidden} else None


def _layer_width(
    model: PreTrainedModel, layer: nn.Module, paths: _Paths, linear: Mapping[str, _Fields]
) -> int:
    """Return the size of a layer's input and output in features."""
    read = {in_features(module) for module in layer.modules() if is_projection(module)}
    text = getattr(model.config.get_text_config(), "hidden_size", None)
    firsts = (_first_projection(role, linear).get("d_in") for role in ("attn", "ffn"))
    norms = (fields["d_in"] for _, fields in _norms(model, paths))
    sizes = (*firsts, text if text in read else None, *norms)
    return next(filter(None, sizes), 0) or usual_size([layer])


def _first_projection(role: str, linear: Mapping[str, _Fields]) -> _Fields:
    """Return the projection whose input is the sublayer's x; {} if there is none."""
    roles = (f"{role}.{name}" for name in ("q", "qkv", "q_a", "kv_a", "up", "gate_up"))
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
