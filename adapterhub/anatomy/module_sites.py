"""The sites of any module: each projection, convolution, embedding and norm, by its path.

A site's id is its path: `blocks.3.attn.qkv`. Its role is the last part of the path, `qkv`, or in an
attention or a feed-forward network that a row of `_ATTENTION` or `_NETWORKS` fits, the role that it
has in a model of transformers: `attn.q`, `ffn.up`. So options that name either find it. Layers are
numbered in each list of modules of one class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from adapterhub.anatomy.any_module import ModuleView
from adapterhub.anatomy.family import Family
from adapterhub.anatomy.forward_source import call_order, returns_tuple, weights_read
from adapterhub.anatomy.matrices import matrices_in
from adapterhub.anatomy.own_modules import has_statistics, join, own_modules
from adapterhub.anatomy.projections import in_features, is_projection, out_features
from adapterhub.anatomy.sites import Anatomy, FeatureSlice, Kind, Site
from adapterhub.errors import SiteError, did_you_mean

# The children of an attention, with their roles: of diffusers, timm, CLIP-like and plain code.
_ATTENTION: tuple[Mapping[str, str], ...] = (
    {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"},
    {"to_q": "q", "to_k": "k", "to_v": "v"},
    {"q": "q", "k": "k", "v": "v", "o": "o"},
    {"qkv": "qkv", "proj": "o"},
    {"to_qkv": "qkv", "to_out": "o"},
    {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"},
    {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"},
    {"query": "q", "key": "k", "value": "v"},
)
# Of an attention to two sequences (Flux, Stable Diffusion 3), those of the second one: the text.
_ADDED: tuple[Mapping[str, str], ...] = (
    {"add_q_proj": "q", "add_k_proj": "k", "add_v_proj": "v", "to_add_out": "o"},
    {"add_q_proj": "q", "add_k_proj": "k", "add_v_proj": "v"},
)
_NETWORKS: tuple[Mapping[str, str], ...] = (
    {"net.0.proj": "up", "net.2": "down"},
    {"proj_mlp": "up", "proj_out": "down"},
    {"wi_0": "gate", "wi_1": "up", "wo": "down"},
    {"wi": "up", "wo": "down"},
    {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
    {"fc1": "up", "fc2": "down"},
    {"linear1": "up", "linear2": "down"},
)
_SLICES = 3
_CHANNELS = "channels_first"
_WITH_WEIGHT = ("linear", "norm", "weight")
_FIRST, _LAST = ("q", "qkv", "up"), ("o", "down")


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
    layers = _layers(paths)
    roles, sublayers = _roles(paths)
    sites: dict[str, Site] = {}
    without = (*head, *_read_by_others(paths))
    for path, module in paths.items():
        if path and not any(f"{path}.".startswith(f"{name}.") for name in without):
            for site in _sites(path, module, roles, layers):
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


def sites_by_path(anatomy: Anatomy, unused: Collection[str] = ()) -> dict[str, Site]:
    """Return the sites of a model of transformers that have no role in its family, by their paths.

    They are projections, convolutions, embeddings and norms, in layers and outside: of models of
    pictures without attention, embeddings, poolers, the output layer of a language model. A path
    is that in the base model, so that it is the same with any head.

    Args:
        anatomy: the sites with roles.
        unused: the paths of modules that are never called.
    """
    paths = dict(own_modules(anatomy.model))
    base = f"{anatomy.base_path}." if anatomy.base_path else ""
    hosts = {site.host for site in anatomy.sites.values() if site.kind in _WITH_WEIGHT}
    without = (*anatomy.head(), *unused, *_read_by_others(paths), *_only_tied(paths))
    sites: dict[str, Site] = {}
    for path, module in paths.items():
        if path in hosts or any(f"{path}.".startswith(f"{name}.") for name in without):
            continue
        for site in _sites(path, module, {}, anatomy.layers) if path else ():
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


def _read_by_others(paths: Mapping[str, nn.Module]) -> set[str]:
    """Return the paths of modules whose weights the module around them reads in their place.

    torch's own layers do so only where no module inside has a hook.
    """
    others = {p: m for p, m in paths.items() if not type(m).__module__.startswith("torch.nn.")}
    read = {join(path, name) for path, m in others.items() for name in weights_read(m)}
    return read & paths.keys()


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
    paths: Mapping[str, nn.Module],
) -> tuple[dict[str, str], dict[str, tuple[str, str, str]]]:
    """Find attention and feed-forward networks.

    Returns:
        The roles of projections by their paths; and by the path of each sublayer that is as wide
        behind as in front, its role and its first and last projection.
    """
    roles: dict[str, str] = {}
    sublayers: dict[str, tuple[str, str, str]] = {}
    for path, module in paths.items():
        children = {p for p, m in own_modules(module) if is_projection(m)}
        own = _attention_name(path, module)
        for sublayer, rows in ((own, _ATTENTION), ("added", _ADDED), ("ffn", _NETWORKS)):
            row = next((row for row in rows if row.keys() <= children), {})
            inside = {role: join(path, child) for child, role in row.items()}
            for role, child in inside.items():
                roles.setdefault(child, f"{sublayer}.{role}")
            first = next((inside[role] for role in _FIRST if role in inside), None)
            last = next((inside[role] for role in _LAST if role in inside), None)
            if not (path and first and last) or path in sublayers:
                continue
            if in_features(paths[first]) == out_features(paths[last]):
                sublayers[path] = sublayer, first, last
    return roles, sublayers


def _attention_name(path: str, module: nn.Module) -> str:
    crossed = getattr(module, "is_cross_attention", None)
    crossed = "cross" in path.rpartition(".")[2] if crossed is None else crossed
    return "cross" if crossed else "attn"


def _sites(
    path: str, module: nn.Module, roles: Mapping[str, str], layers: Mapping[str, tuple[str, ...]]
) -> Iterator[Site]:
    stack, layer = _layer_of(path, layers)

    def site(name: str, role: str, kind: Kind, sizes: tuple[int, int], **fields: Any) -> Site:
        return Site(name, stack, layer, role, kind, path, *sizes, **fields)

    role = roles.get(path, path.rpartition(".")[2])
    if is_projection(module) and not returns_tuple(module):
        sizes = in_features(module), out_features(module)
        yield site(path, role, "linear", sizes)
        if role == "attn.qkv" and sizes[1] == _SLICES * sizes[0]:
            for number, name in enumerate("qkv"):
                part = FeatureSlice(number * sizes[0], (number + 1) * sizes[0], sizes[1])
                own = (sizes[0], sizes[0])
                yield site(f"{path}.{name}", f"attn.{name}", "linear", own, part=part)
    for name, matrix in matrices_in(module).items():
        named = join(path, name)
        role_inside = f"{_attention_name(path, module)}.{name}" if name else role
        yield site(named, role_inside, "linear", matrix.sizes(module), matrix=matrix)
    weight = getattr(module, "weight", None)
    if _is_norm(module) and weight is not None and weight.ndim == 1:
        yield site(path, role, "norm", (len(weight), len(weight)))


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm whose features are the last dimension, as of tokens.

    Those of channels, (batch, channels, ...), are no places for what changes features.
    """
    name = type(module).__name__.lower()
    channels = isinstance(module, nn.GroupNorm) or has_statistics(module)
    channels = channels or name.endswith(("1d", "2d", "3d"))
    return "norm" in name and not channels and getattr(module, "data_format", "") != _CHANNELS


def _layer_of(path: str, layers: Mapping[str, tuple[str, ...]]) -> tuple[str, int | None]:
    """Return the list that a path is in, and the layer's number; else the outermost module."""
    for stack, members in layers.items():
        for number, layer in enumerate(members):
            if f"{path}.".startswith(f"{layer}."):
                return stack, number
    return path.partition(".")[0], None
