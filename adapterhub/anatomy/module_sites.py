"""The sites of any module: each projection, convolution, embedding and norm, by its path.

A site's id is its path: `blocks.3.attn.qkv`. Its role is the last part of the path, `qkv`, or in an
attention, or in a feed-forward network that a row of `_NETWORKS` fits, the role that it has in a
model of transformers: `attn.q`, `ffn.up`. So options that name either find it. Layers are
numbered in each list of modules of one class.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from adapterhub.anatomy.family import Family
from adapterhub.anatomy.forward_source import call_order, returns_tuple, weights_read
from adapterhub.anatomy.own_modules import ModuleView, has_statistics, join, own_modules
from adapterhub.anatomy.projections import (
    CONVOLUTIONS,
    WeightMatrix,
    in_features,
    is_projection,
    matrices_in,
    out_features,
)
from adapterhub.anatomy.sites import Anatomy, FeatureSlice, Kind, Site
from adapterhub.errors import SiteError, did_you_mean

# The words in the names of an attention's children: `to_q`, `q_proj`, `query`, `to_out.0`,
# `img_attn_qkv`, `add_k_proj`, `txt_kv_proj`. A name with another word is of something else.
_WORDS = {
    "q": "q", "query": "q", "k": "k", "key": "k", "v": "v", "value": "v", "kv": "kv", "qkv": "qkv",
    "o": "o", "out": "o",
}  # fmt: skip
_SILENT = {"to", "proj", "linear", "layer", "attn", "img"}
# Of an attention to two sequences (Flux, Stable Diffusion 3), those of the second one: the text.
_ADDED = {"add", "added", "txt", "t"}
# The children of a feed-forward network, with their roles. Which one is the gate, names do not say.
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


def module_anatomy(view: ModuleView, head: tuple[str, ...] = ()) -> Anatomy:
    """Return the anatomy of a module of any library.

    Args:
        view: the module.
        head: the paths of the modules that are its head: no sites, and trained as a whole.

    Raises:
        SiteError: a head that the module does not have.
    """
    paths = dict(own_modules(view))
    if unknown := [name for name in head if name not in paths or not name]:
        raise SiteError(
            f"{type(view.module).__name__} has no such module to be a head",
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
                # A container passes its input through all children, and may not get another one.
                role, first, last = sublayers[path]
                width = in_features(paths[first])
                sizes = (width, width)
                stack = _layer_of(path, layers)
                sites[path] = Site(path, *stack, role, "sublayer", last, *sizes, input_host=first)
    if not sites:
        raise SiteError(
            f"{type(view.module).__name__} has no modules inside that an adapter could be at",
            expected="projections, convolutions, embeddings or norms inside",
            hint="torch.nn.Sequential(module)",
        )
    family = Family((view.config.model_type,), (), ())
    return Anatomy(view, family, "", sites, layers, head)


def sites_by_path(
    anatomy: Anatomy, read: Mapping[str, str], unused: Collection[str] = ()
) -> dict[str, Site]:
    """Return the sites of a model of transformers that have no role in its family, by their paths.

    They are projections, convolutions, embeddings and norms, in layers and outside: of models of
    pictures without attention, embeddings, poolers, the output layer of a language model. A path
    is that in the base model, so that it is the same with any head.

    Args:
        anatomy: the sites with roles.
        read: the modules whose weights others read, as `read_by_owners` maps them.
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
    """Yield the paths of embeddings that only hold the table of others: `shared` of T5."""
    tables: dict[int, list[str]] = {}
    for path, module in paths.items():
        if isinstance(module, nn.Embedding):
            tables.setdefault(id(module.weight), []).append(path)
    for path in (path for tied in tables.values() if len(tied) > 1 for path in tied):
        owner, _, name = path.rpartition(".")
        if name not in call_order(paths[owner]):
            yield path


def _layers(paths: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """Map lists of modules of one class, which are not inside of another one, to their elements."""
    found: dict[str, tuple[str, ...]] = {}
    for path, module in paths.items():
        inside = any(path.startswith(f"{other}.") for other in found)
        if inside or not path or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = dict(module.named_children())
        kinds = {type(child) for child in children.values()}
        nested = any(True for child in children.values() for _ in child.children())
        if len(children) > 1 and len(kinds) == 1 and nested:
            found[path] = tuple(f"{path}.{name}" for name in children)
    return found


def _roles(
    paths: Mapping[str, nn.Module], fused: Container[str], read: Container[str]
) -> tuple[dict[str, str], dict[str, tuple[str, str, str]]]:
    """Find attention and feed-forward networks.

    Returns:
        The roles of projections by their paths; and by the path of each sublayer that is as wide
        behind as in front, its role and its first and last projection.
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
    """Map the roles of an attention to its projections, and those of a second sequence.

    Both are empty for what is no attention: without queries and keys.
    """
    both: tuple[dict[str, str], dict[str, str]] = {}, {}
    for child in (child for child in children if "." not in child.removesuffix(".0")):
        added, role = _in_attention(child)
        if role:
            both[added].setdefault(role, child)
    found = {*both[0], *both[1]}
    return both if "qkv" in found or ("q" in found and found & {"k", "kv"}) else ({}, {})


def _in_attention(child: str) -> tuple[bool, str]:
    """Return whether a child of an attention is of the second sequence, and its role; "" if none.

    A name of silent words alone is of the output: `proj`, `proj_attn`.
    """
    words = set(re.split(r"[._]", child.removesuffix(".0")))
    named = {_WORDS[word] for word in words & _WORDS.keys()}
    silent = _SILENT | _ADDED | ({"mlp"} if named == {"qkv"} else set())  # both in one: of Flux 2
    known = words <= _WORDS.keys() | silent and len(named) <= 1
    role = next(iter(named), "o" if "proj" in words else "")
    return bool(words & _ADDED), role if known else ""


def _fused(paths: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the paths of projections that nothing calls: diffusers has fused them in another."""
    for path, module in paths.items():
        if getattr(module, "fused_projections", False):
            children = {name: _in_attention(name) for name, _ in module.named_children()}
            fused = [(added, role) for added, role in children.values() if role in ("kv", "qkv")]
            for name, (added, role) in children.items():
                if any(added == of and role in [*letters] for of, letters in fused):
                    yield join(path, name)


def read_by_owners(paths: Mapping[str, nn.Module]) -> dict[str, str]:
    """Map modules to the modules around them that read their weights themselves, by path.

    `F.linear(x, self.qkv.weight)`: no hook of the inner one sees what is computed. torch's own
    layers do so only where no module inside has a hook.
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
    """Return those of `read` that the module around them does not call: WavLM's projections.

    Others are called in some branch of its forward, where hooks see them.
    """
    called: dict[type[nn.Module], Collection[str]] = {}
    found: dict[str, str] = {}
    for path, owner in read.items():
        parent, _, name = path.rpartition(".")
        if (around := type(paths[parent])) not in called:
            called[around] = call_order(paths[parent])
        if owner and name not in called[around]:
            found[path] = owner
    return found


def _of_network(
    paths: Mapping[str, nn.Module], path: str, children: Container[str]
) -> dict[str, str]:
    """Map the roles of a feed-forward network to its projections; {} if it is none.

    What is not as wide behind as in front embeds something.
    """
    for row in _NETWORKS:
        if all(child in children for child in row):
            found = {role: child for child, role in row.items()}
            first = found.get("up") or found["gate_up"]
            ends = paths[join(path, first)], paths[join(path, found["down"])]
            return found if in_features(ends[0]) == out_features(ends[1]) else {}
    return {}


def _attention_name(path: str, module: nn.Module) -> str:
    crossed = getattr(module, "is_cross_attention", None)
    if crossed is None:
        name = path.rpartition(".")[2]
        crossed = "cross" in name or name.endswith("attn2")  # the second one of a block
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

    There is none where the owner is the whole model, or the weight is no matrix.
    """
    if not owner or not (is_projection(module) or isinstance(module, CONVOLUTIONS)):
        return
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return
    name = path[len(owner) + 1 :]
    turned = hasattr(module, "nx")  # GPT-2's
    whole = WeightMatrix(f"{name}.weight", f"{name}.bias", transposed=turned)
    columns, rows = WeightMatrix(transposed=turned).sizes(module)
    yield path, role, (columns, rows), whole
    for letter, inside, part in () if turned else _slices(path, role, columns, rows):
        width = part.stop - part.start
        matrix = whole._replace(start=part.start, rows=width)
        yield f"{path}.{letter}", inside, (columns, width), matrix


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm whose features are the last dimension, as of tokens.

    Those of channels, (batch, channels, ...), are no places for what changes features.
    """
    name = type(module).__name__.lower()
    channels = isinstance(module, nn.GroupNorm) or has_statistics(module)
    channels = channels or name.endswith(("1d", "2d", "3d"))
    return "norm" in name and not channels and getattr(module, "data_format", "") != _CHANNELS


def _slices(path: str, role: str, d_in: int, d_out: int) -> Iterator[tuple[str, str, FeatureSlice]]:
    """Yield the slices of the output of a fused projection, with their names and roles.

    Queries, keys and values are apart only where they are as wide as the input: with fewer keys,
    names do not say how many.
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
    """Return the list that a path is in, and the layer's number; else the outermost module."""
    for stack, members in layers.items():
        for number, layer in enumerate(members):
            if f"{path}.".startswith(f"{layer}."):
                return stack, number
    return path.partition(".")[0], None
