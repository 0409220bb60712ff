"""Build the anatomy of a model: apply its family's row to its modules.

In a module of another library, each projection, convolution, embedding and norm is a site. A site's
id is its path: `blocks.3.attn.qkv`. Its role is the last part of the path: `qkv`. In an attention,
and in a feed-forward network that matches a row of `_NETWORKS`, it is the role used for
transformers models: `attn.q`, `ffn.up`. Options accept either name. Layers are numbered in each
list of modules of one class.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from adapterhub.anatomy.backbone import (
    Backbone,
    first_existing,
    has_path,
    has_statistics,
    join,
    layer_paths,
    own_modules,
    still_statistics,
    token_table,
)
from adapterhub.anatomy.discovery import discover
from adapterhub.anatomy.families import FAMILIES
from adapterhub.anatomy.family import WHOLE, Family, Layout, Stack
from adapterhub.anatomy.projections import (
    CONVOLUTIONS,
    HeldWeight,
    WeightMatrix,
    call_order,
    expert_weights,
    in_features,
    is_called_whole,
    is_projection,
    latent_sizes,
    matrices_in,
    multiplies_weight,
    out_features,
    plain_projections,
    reads_token_ids,
    returns_tuple,
    reversible_stack,
    router_weight,
    usual_size,
    weights_read,
)
from adapterhub.anatomy.sites import (
    EXPERTS,
    NORMS,
    ROUTER,
    SUBLAYERS,
    Anatomy,
    FeatureSlice,
    Kind,
    Site,
    Stream,
)
from adapterhub.errors import BackboneError, SiteError, did_you_mean

# The words in the names of an attention's children: `to_q`, `q_proj`, `query`, `to_out.0`,
# `img_attn_qkv`, `add_k_proj`, `txt_kv_proj`. A name with any other word is not part of attention.
_WORDS = {
    "q": "q", "query": "q", "k": "k", "key": "k", "v": "v", "value": "v", "kv": "kv", "qkv": "qkv",
    "o": "o", "out": "o",
}  # fmt: skip
_SILENT = {"to", "proj", "linear", "layer", "attn", "img"}
# In attention over two sequences (Flux, Stable Diffusion 3), the words for the second (the text).
_ADDED = {"add", "added", "txt", "t"}
# The children of a feed-forward network and their roles. Names do not show which one is the gate.
_NETWORKS: tuple[Mapping[str, str], ...] = (
    {"net.0.proj": "up", "net.2": "down"},
    {"proj_mlp": "up", "proj_out": "down"},
    {"wi_0": "gate", "wi_1": "up", "wo": "down"},
    {"wi": "up", "wo": "down"},
    {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
    {"gate_proj": "gate", "up_proj": "up", "linear_fc2": "down"},
    {"gate_up_proj": "gate_up", "down_proj": "down"},
    {"gate_layer": "gate", "proj": "up", "out": "down"},
    {"gate": "gate", "up": "up", "down": "down"},
    {"w_gate": "gate", "w_up": "up", "w_down": "down"},
    {"fc1": "up", "fc2": "down"},
    {"linear1": "up", "linear2": "down"},
    {"linear_1": "gate", "linear_3": "up", "linear_2": "down"},
    {"linear_1": "gate", "linear_2": "up", "out_projection": "down"},
    {"w1": "gate", "w3": "up", "w2": "down"},
    {"w0": "gate", "w1": "up", "w2": "down"},
    {"linear_in": "up", "linear_out": "down"},
    {"ff.0": "up", "ff.3": "down"},
    {"in_layer": "up", "out_layer": "down"},
)
_CHANNELS = "channels_first"
_WITH_WEIGHT = ("linear", "norm", "weight")
_FIRST, _LAST = ("q", "qkv", "up", "gate_up"), ("o", "down")


def module_anatomy(backbone: Backbone, head: tuple[str, ...] = ()) -> Anatomy:
    """Return the anatomy of a module of any library.

    Args:
        backbone: the module.
        head: the paths of the modules of its head. They have no sites and are trained whole.

    Raises:
        SiteError: a path in `head` does not exist in the module.
    """
    paths = dict(own_modules(backbone.module))
    if unknown := [name for name in head if name not in paths or not name]:
        raise SiteError(
            f"{type(backbone.module).__name__} has no such module to be a head",
            offenders=[f"{name!r}{did_you_mean(name, paths)}" for name in unknown],
            expected="paths of modules",
        )
    fused, read = set(_fused(paths)), read_by_owners(paths)
    layers = _layers(paths)
    roles, sublayers = _roles(paths, fused, read)
    sites: dict[str, Site] = {}
    for path, module in paths.items():
        if path and not any(f"{path}.".startswith(f"{name}.") for name in (*head, *fused)):
            for site in _sites(path, module, roles, layers, read.get(path)):
                sites[site.id] = site
            if path in sublayers:
                # A container passes its input through all children: it must not get another one.
                role, first, last = sublayers[path]
                width = in_features(paths[first])
                sizes = (width, width)
                stack = _layer_of(path, layers)
                sites[path] = Site(path, *stack, role, "sublayer", last, *sizes, input_host=first)
    if not sites:
        raise SiteError(
            f"{type(backbone.module).__name__} has no modules inside that an adapter could be at",
            expected="projections, convolutions, embeddings or norms inside",
            hint="torch.nn.Sequential(module)",
        )
    family = Family((backbone.name,), (), ())
    return Anatomy(backbone, family, "", sites, layers, head)


def sites_by_path(
    anatomy: Anatomy, read: Mapping[str, str], unused: Collection[str] = ()
) -> dict[str, Site]:
    """Return the sites of a transformers model that have no role in its family, by their paths.

    They are projections, convolutions, embeddings and norms, inside and outside layers. Examples
    are the modules of vision models without attention, poolers, and the output layer of a language
    model. Paths are relative to the base model, so they are the same with any head.

    Args:
        anatomy: the sites with roles.
        read: the modules whose weights other modules read, as mapped by `read_by_owners`.
        unused: the paths of modules that are never called.
    """
    paths = dict(own_modules(anatomy.model))
    base = f"{anatomy.base_path}." if anatomy.base_path else ""
    hosts = {site.module for site in anatomy.sites.values() if site.kind in _WITH_WEIGHT}
    without = (*anatomy.head(), *unused, *_fused(paths), *_only_tied(paths))
    sites: dict[str, Site] = {}
    for path, module in paths.items():
        if path in hosts or any(f"{path}.".startswith(f"{name}.") for name in without):
            continue
        for site in _sites(path, module, {}, anatomy.layers, read.get(path)) if path else ():
            named = replace(site, id=site.id.removeprefix(base))
            if named.id not in anatomy.sites:
                sites[named.id] = named
    return sites


def _only_tied(paths: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the paths of embeddings that only hold a table for others, such as T5's `shared`."""
    tables: dict[int, list[str]] = {}
    for path, module in paths.items():
        if isinstance(module, nn.Embedding):
            tables.setdefault(id(module.weight), []).append(path)
    for path in (path for tied in tables.values() if len(tied) > 1 for path in tied):
        owner, _, name = path.rpartition(".")
        if name not in call_order(paths[owner]):
            yield path


def _layers(paths: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """Map the outermost lists of modules of one class to their elements."""
    layers: dict[str, tuple[str, ...]] = {}
    for path, module in paths.items():
        inside = any(path.startswith(f"{other}.") for other in layers)
        if inside or not path or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = dict(module.named_children())
        kinds = {type(child) for child in children.values()}
        nested = any(True for child in children.values() for _ in child.children())
        if len(children) > 1 and len(kinds) == 1 and nested:
            layers[path] = tuple(f"{path}.{name}" for name in children)
    return layers


def _roles(
    paths: Mapping[str, nn.Module], fused: Container[str], read: Container[str]
) -> tuple[dict[str, str], dict[str, tuple[str, str, str]]]:
    """Find attention and feed-forward networks.

    Returns:
        The roles of projections by their paths. Also, for each sublayer with equal input and output
        widths, its role and its first and last projection, by the sublayer's path.
    """
    roles: dict[str, str] = {}
    sublayers: dict[str, tuple[str, str, str]] = {}
    for path, module in paths.items():
        inside = (p for p, m in own_modules(module) if is_projection(m))
        children = {child: None for child in inside if join(path, child) not in fused}
        own, added = _of_attention(children)
        for sublayer, row in (
            (_attention_name(path, module), own),
            ("added", added),
            ("ffn", _of_network(paths, path, children)),
        ):
            ends = {role: join(path, child) for role, child in row.items()}
            for role, child in ends.items():
                roles.setdefault(child, f"{sublayer}.{role}")
            first = next((ends[role] for role in _FIRST if role in ends), None)
            last = next((ends[role] for role in _LAST if role in ends), None)
            if not (path and first and last) or path in sublayers or first in read or last in read:
                continue
            if in_features(paths[first]) == out_features(paths[last]):
                sublayers[path] = sublayer, first, last
    return roles, sublayers


def _of_attention(children: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Map roles to the projections of an attention, and to its projections of a second sequence.

    Both maps are empty without queries and keys: the module is then not an attention.
    """
    both: tuple[dict[str, str], dict[str, str]] = {}, {}
    for child in (child for child in children if "." not in child.removesuffix(".0")):
        added, role = _in_attention(child)
        if role:
            both[added].setdefault(role, child)
    roles = {*both[0], *both[1]}
    return both if "qkv" in roles or ("q" in roles and roles & {"k", "kv"}) else ({}, {})


def _in_attention(child: str) -> tuple[bool, str]:
    """Return whether an attention's child serves the second sequence, and its role or "".

    A name that consists only of silent words is the output: `proj`, `proj_attn`.
    """
    words = set(re.split(r"[._]", child.removesuffix(".0")))
    named = {_WORDS[word] for word in words & _WORDS.keys()}
    silent = _SILENT | _ADDED | ({"mlp"} if named == {"qkv"} else set())  # fused, as in Flux 2
    known = words <= _WORDS.keys() | silent and len(named) <= 1
    role = next(iter(named), "o" if "proj" in words else "")
    return bool(words & _ADDED), role if known else ""


def _fused(paths: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the paths of projections that are never called because diffusers has fused them."""
    for path, module in paths.items():
        if getattr(module, "fused_projections", False):
            children = {name: _in_attention(name) for name, _ in module.named_children()}
            fused = [(added, role) for added, role in children.values() if role in ("kv", "qkv")]
            for name, (added, role) in children.items():
                if any(added == of and role in [*letters] for of, letters in fused):
                    yield join(path, name)


def read_by_owners(paths: Mapping[str, nn.Module]) -> dict[str, str]:
    """Map modules to the enclosing modules that read their weights directly, by path.

    With `F.linear(x, self.qkv.weight)`, no hook of the inner module sees the computation. torch's
    own layers do this only if no module inside has a hook.
    """
    classes = {type(module): module for module in paths.values()}
    others = (m for m in classes.values() if not type(m).__module__.startswith("torch.nn."))
    read = {type(module): weights_read(module) for module in others}
    return {
        join(path, name): path
        for path, module in paths.items()
        for name in read.get(type(module), ())
        if join(path, name) in paths
    }


def never_called(paths: Mapping[str, nn.Module], read: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of `read` that the enclosing module never calls: WavLM's projections.

    The other modules are called in some branch of its forward, where hooks see them.
    """
    called: dict[type[nn.Module], Collection[str]] = {}
    uncalled: dict[str, str] = {}
    for path, owner in read.items():
        parent, _, name = path.rpartition(".")
        if (around := type(paths[parent])) not in called:
            called[around] = call_order(paths[parent])
        if owner and name not in called[around]:
            uncalled[path] = owner
    return uncalled


def _of_network(
    paths: Mapping[str, nn.Module], path: str, children: Container[str]
) -> dict[str, str]:
    """Map roles to the projections of a feed-forward network; {} for other modules.

    A module with different input and output widths is an embedding, not a network.
    """
    for row in _NETWORKS:
        if all(child in children for child in row):
            by_role = {role: child for child, role in row.items()}
            first = by_role.get("up") or by_role["gate_up"]
            ends = paths[join(path, first)], paths[join(path, by_role["down"])]
            return by_role if in_features(ends[0]) == out_features(ends[1]) else {}
    return {}


def _attention_name(path: str, module: nn.Module) -> str:
    crossed = getattr(module, "is_cross_attention", None)
    if crossed is None:
        name = path.rpartition(".")[2]
        crossed = "cross" in name or name.endswith("attn2")  # a block's second attention
    return "cross" if crossed else "attn"


def _sites(
    path: str,
    module: nn.Module,
    roles: Mapping[str, str],
    layers: Mapping[str, tuple[str, ...]],
    owner: str | None,
) -> Iterator[Site]:
    """Yield the sites of a module; `owner` is the path of the module that reads its weight."""
    stack, layer = _layer_of(path, layers)

    def site(name: str, role: str, kind: Kind, sizes: tuple[int, int], **fields: Any) -> Site:
        host = path if owner is None else owner
        return Site(name, stack, layer, role, kind, host, *sizes, **fields)

    role = roles.get(path, path.rpartition(".")[2])
    if owner is not None:
        role = role if layer is not None else path.rpartition(".")[2]  # no default outside
        for name, inside, sizes, matrix in _read_matrices(path, module, role, owner):
            yield site(name, inside, "linear", sizes, matrix=matrix)
        return
    if is_projection(module) and not returns_tuple(module):
        sizes = in_features(module), out_features(module)
        of_prefixes = role.endswith(".kv")  # `attn.kv` is where keys and values are read
        whole = path.rpartition(".")[2] if of_prefixes else role
        yield site(path, whole, "linear", sizes)
        for name, inside, part in _slices(path, role, *sizes):
            own = (sizes[0], part.stop - part.start)
            yield site(f"{path}.{name}", inside, "linear", own, part=part)
    for name, matrix in matrices_in(module).items():
        named = join(path, name)
        role_inside = f"{_attention_name(path, module)}.{name}" if name else role
        yield site(named, role_inside, "linear", matrix.sizes(module), matrix=matrix)
    weight = getattr(module, "weight", None)
    if _is_norm(module) and weight is not None and weight.ndim == 1:
        yield site(path, role, "norm", (len(weight), len(weight)))


def _read_matrices(
    path: str, module: nn.Module, role: str, owner: str
) -> Iterator[tuple[str, str, tuple[int, int], WeightMatrix]]:
    """Yield the matrices of a module whose weight its owner reads: id, role, sizes and matrix.

    Nothing is yielded if the owner is the whole model or the weight is not a matrix.
    """
    if not owner or not (is_projection(module) or isinstance(module, CONVOLUTIONS)):
        return
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return
    name = path[len(owner) + 1 :]
    turned = hasattr(module, "nx")  # GPT-2's Conv1D
    whole = WeightMatrix(f"{name}.weight", f"{name}.bias", transposed=turned)
    columns, rows = WeightMatrix(transposed=turned).sizes(module)
    yield path, role, (columns, rows), whole
    for letter, inside, part in () if turned else _slices(path, role, columns, rows):
        width = part.stop - part.start
        matrix = whole._replace(start=part.start, rows=width)
        yield f"{path}.{letter}", inside, (columns, width), matrix


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm over the last dimension, as for tokens.

    Norms over channels, (batch, channels, ...), do not suit methods that change features.
    """
    name = type(module).__name__.lower()
    channels = isinstance(module, nn.GroupNorm) or has_statistics(module)
    channels = channels or name.endswith(("1d", "2d", "3d"))
    return "norm" in name and not channels and getattr(module, "data_format", "") != _CHANNELS


def _slices(path: str, role: str, d_in: int, d_out: int) -> Iterator[tuple[str, str, FeatureSlice]]:
    """Yield the slices of a fused projection's output, with their names and roles.

    Queries, keys and values are separated only if they are as wide as the input: with fewer keys,
    names do not show how many.
    """
    sublayer, _, letters = role.rpartition(".")
    with_network = "mlp" in path.rpartition(".")[2]
    if letters == "kv" and d_out % len(letters) == 0:
        width = d_out // len(letters)
    elif letters == "qkv" and (d_out > 3 * d_in if with_network else d_out == 3 * d_in):
        width = d_in
    else:
        return
    for number, letter in enumerate(letters):
        part = FeatureSlice(number * width, (number + 1) * width, d_out)
        yield letter, f"{sublayer}.{letter}", part
    if with_network:
        yield "mlp", "ffn.up", FeatureSlice(len(letters) * width, d_out, d_out)


def _layer_of(path: str, layers: Mapping[str, tuple[str, ...]]) -> tuple[str, int | None]:
    """Return the list that contains a path and the layer's number, or the outermost module."""
    for stack, members in layers.items():
        for number, layer in enumerate(members):
            if f"{path}.".startswith(f"{layer}."):
                return stack, number
    return path.partition(".")[0], None


# Projections outside the known roles: `mixer.in_proj`, `moe.gate`.
# Inputs with one entry per token, which virtual tokens would not have.
PER_TOKEN = frozenset({"bbox", "xpath_tags_seq", "lang_ids", "langs", "global_attention_mask"})
_TOKENS = frozenset({"input_ids", "inputs_embeds"})
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def anatomy_of(model: nn.Module, head: Sequence[str] = ()) -> Anatomy:
    """Return the anatomy of a model, from its family's row or, without a row, from its structure.

    A row set for the model (`use_family`) overrides the row of its type. The sites of a module
    outside transformers are named by their paths; `head` lists the modules of its head.
    """
    backbone = Backbone.of(model)
    with still_statistics(backbone.module):
        if backbone.foreign:
            return module_anatomy(backbone, tuple(head))
        model, row = backbone.pretrained, backbone.family or FAMILIES.get(backbone.model_type)
        return build_anatomy(model, row or discover(model))


def build_anatomy(model: PreTrainedModel, family: Family) -> Anatomy:
    """Apply a family's row to a model.

    Raises:
        BackboneError: the row does not fit the model. The model lacks all modules that the row
            names, or has fused projections of other sizes; or two stacks have the same name.
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
    anatomy = Anatomy(Backbone.of(model), family, base_path, sites, layers)
    return replace(anatomy, by_path=sites_by_path(anatomy, read, unused))


def _is_cross(site: Site) -> bool:
    return site.role.partition(".")[0] == "cross"


def _check_names(family: Family) -> None:
    """Raise an error if two stacks of a row have the same name."""
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
    """Yield the site of the states that enter the layers of a stack with token embeddings.

    If embeddings are narrower than layers, or layers share modules, the states enter the projection
    that widens them.
    """
    table = token_table(model)
    reads = inspect.signature(root.forward).parameters.keys() & _TOKENS
    if not reads or not isinstance(table, nn.Embedding):
        return
    width = table.weight.shape[1]
    host: str | None = layers[0]
    if width != layer_width or ".*." in stack.layers:
        inside = tuple(f"{layer}." for layer in layers)
        hosts = (
            path
            for path, module in own_modules(model)
            if is_projection(module) and not path.startswith(inside)
            if (in_features(module), out_features(module)) == (width, layer_width)
        )
        host = next(hosts, None)
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
    """Return the width of a stack's token embeddings; None if none can be prepended."""
    table = token_table(root)
    parameters = inspect.signature(root.forward).parameters
    takes = {"input_ids", "inputs_embeds", "attention_mask"} <= parameters.keys()
    takes = takes and parameters["input_ids"].default is None  # embeddings alone suffice
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
    """Return whether a layer has the sublayer of a norm; true for other roles.

    Experts alone are not a sublayer: files name the parameters of such norms by their paths.
    """
    sublayer, _, name = role.partition(".")
    return name not in NORMS or any(
        r.partition(".")[0] == sublayer and r.partition(".")[2] not in NORMS
        for r in roles
        if r not in (EXPERTS, ROUTER)
    )


# The functions below pass `paths` (role -> the path of its module, or of a sublayer's first and
# last module) and `linear` (role of a projection -> the fields of its site).
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
    """Yield the sites of routed experts, one for each projection, and the site of a router."""
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

    If a projection is never called, its host is the module in `owners` that reads its weight.
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

    `attn.qkv` consists of attn.q, attn.k and attn.v; `ffn.gate_up` consists of ffn.gate and ffn.up.

    `queries` is the size of attn.q; None if only the configuration defines it.

    Raises:
        BackboneError: the sizes of the parts do not add up to the size of the projection.
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
    """Return the number of runs in a fused output, and the total sizes of q, k and v."""
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
        BackboneError: the configuration does not define them.
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
    """Return a sublayer's fields, from its path or from its first and last projection."""
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
    if "matrix" in first or "matrix" in last:  # their calls have no input or output to hook
        return {"host": hosts[0], **sizes} if hosts[0] == hosts[1] else None
    return {"host": hosts[1], "input_host": hosts[0], **sizes}


def _own_width(model: PreTrainedModel, path: str) -> int | None:
    """Return the hidden size if it is the only size that is both an input and an output size.

    A layer's attention may read more than one hidden state, as in Zamba 2.
    """
    projections = plain_projections(model.get_submodule(path)).values()
    common = set(map(in_features, projections)) & set(map(out_features, projections))
    hidden = getattr(model.config.get_text_config(), "hidden_size", None)
    return hidden if common == {hidden} else None


def _layer_width(
    model: PreTrainedModel, layer: nn.Module, paths: _Paths, linear: Mapping[str, _Fields]
) -> int:
    """Return the number of features of a layer's input and output."""
    read = {in_features(module) for module in layer.modules() if is_projection(module)}
    text = getattr(model.config.get_text_config(), "hidden_size", None)
    firsts = (_first_projection(role, linear).get("d_in") for role in ("attn", "ffn"))
    norms = (fields["d_in"] for _, fields in _norms(model, paths))
    sizes = (*firsts, text if text in read else None, *norms)
    return next(filter(None, sizes), 0) or usual_size([layer])


def _first_projection(role: str, linear: Mapping[str, _Fields]) -> _Fields:
    """Return the projection whose input is the sublayer's x, or {}."""
    roles = (f"{role}.{name}" for name in ("q", "qkv", "q_a", "kv_a", "up", "gate_up"))
    return next((linear[r] for r in roles if r in linear), {})


def _stream(
    model: PreTrainedModel, norms: str | None, role: str, paths: _Paths, input_host: str | None
) -> Stream | None:
    """Return a sublayer's connection to the residual stream; None if the row has no norms."""
    if norms is None:
        return None
    norm, postnorm = (paths.get(f"{role}.{name}", (None,))[0] for name in NORMS)
    pre = norms == "pre" or (norms != "post" and getattr(model.config, norms))
    if norm is None and (postnorm is None or not pre):
        return None  # one norm serves two sublayers
    return Stream(norm or input_host, None, postnorm) if pre else Stream(input_host, norm, None)
