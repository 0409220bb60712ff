"""The sites of any module: each projection, convolution, embedding and norm, by its path.

A site's id is its path: `blocks.3.attn.qkv`. Its role is the last part of the path, `qkv`, or in an
attention or a feed-forward network that a row of `_ATTENTION` or `_NETWORKS` fits, the role that it
has in a model of transformers: `attn.q`, `ffn.up`. So options that name either find it. Layers are
numbered in each list of modules of one class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from adapterhub.anatomy.any_module import ModuleView
from adapterhub.anatomy.family import Family
from adapterhub.anatomy.matrices import matrices_in
from adapterhub.anatomy.own_modules import join, own_modules
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
    inside = [f"{p}.out_proj" for p, m in paths.items() if isinstance(m, nn.MultiheadAttention)]
    layers = _layers(paths)
    roles, sublayers = _roles(paths)
    sites: dict[str, Site] = {}
    for path, module in paths.items():
        if path and not any(f"{path}.".startswith(f"{name}.") for name in (*head, *inside)):
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
    if is_projection(module):
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
    if "norm" in type(module).__name__.lower() and weight is not None and weight.ndim == 1:
        yield site(path, role, "norm", (len(weight), len(weight)))


def _layer_of(path: str, layers: Mapping[str, tuple[str, ...]]) -> tuple[str, int | None]:
    """Return the list that a path is in, and the layer's number; else the outermost module."""
    for stack, members in layers.items():
        for number, layer in enumerate(members):
            if f"{path}.".startswith(f"{layer}."):
                return stack, number
    return path.partition(".")[0], None
