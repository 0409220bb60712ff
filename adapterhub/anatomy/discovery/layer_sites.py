"""All sites of one layer: attention, network, further projections and norms.

A norm inside a sublayer's module belongs to that sublayer, unless it is applied between its
projections. The roles of a layer's direct norms follow from their order of use in its forward. A
norm with an ambiguous role does not get a role.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from adapterhub.anatomy.backbone import has_path, join, own_modules
from adapterhub.anatomy.discovery.roles import (
    attention_group,
    attention_sites,
    attention_sublayers,
    further_sites,
    kind_of,
    mixer_of,
)
from adapterhub.anatomy.projections import (
    call_order,
    expert_modules,
    in_features,
    out_features,
    plain_projections,
    router_path,
)
from adapterhub.anatomy.sites import EXPERTS, ROUTER

_HEAD_NORM = re.compile(r"^(q|k|v|query|key|value)_?[a-z]*norm", re.IGNORECASE)
_ENDS = ("o", "down")
Sublayers = Mapping[str, Sequence[str]]  # name -> the paths of its projections, or its own path


def sites_of_layer(layer: nn.Module, width: int) -> dict[str, str]:
    """Map the roles in a layer with `width` features to the paths of their modules."""
    sublayers = attention_sublayers(layer)
    sites: dict[str, str] = {}
    for sublayer, attentions in sublayers.items():
        path, projections = next(iter(attentions.items()))
        sites |= attention_sites(layer, sublayer, path, projections, width)
    groups = {sublayer: attention_group(next(iter(paths))) for sublayer, paths in sublayers.items()}
    networks = feed_forward_networks(layer, _groups(sublayers), width)
    if networks:
        largest = max(networks, key=lambda network: inner_size(layer, network))
        sites.update(largest)
    sites |= _experts(layer)
    sites |= further_sites(layer, plain_projections(layer), sites)
    if mixer := mixer_of(layer, sites):
        sites["mixer"] = mixer
        groups |= {} if groups else {"mixer": mixer}
    return sites | _norms(layer, width, groups, sites)


def _experts(layer: nn.Module) -> dict[str, str]:
    """Map the roles of routed experts and of their router to the paths of their modules."""
    sites: dict[str, str] = {}
    stacked = expert_modules(layer)
    if stacked:
        sites[EXPERTS] = stacked[0]
    blocks = [
        path for path in (join(p, "experts") for p in expert_blocks(layer)) if has_path(layer, path)
    ]
    for experts in (*stacked[:1], *blocks[:1]):
        if router := router_path(layer, experts):
            return sites | {ROUTER: router}
    return sites


def _groups(sublayers: Mapping[str, Iterable[str]]) -> list[str]:
    return [attention_group(path) for paths in sublayers.values() for path in paths]


def _norms(
    layer: nn.Module, width: int, groups: dict[str, str], sites: dict[str, str]
) -> dict[str, str]:
    if not groups:
        return {}
    ends = {sublayer: _ends(sublayer, sites) for sublayer in (*groups, "ffn")}
    ends["ffn"] = ends["ffn"] or [path for path in expert_blocks(layer) if path]
    return norm_roles(layer, width, groups | feed_forward_group(layer, groups, sites), ends)


def _ends(sublayer: str, sites: dict[str, str]) -> list[str]:
    """Return the paths of a sublayer's first and last projection, or of its module."""
    if sublayer in sites:
        return [sites[sublayer]]
    roles = (f"{sublayer}.{name}" for name in ("q", "qkv", "up", "gate_up", "o", "down"))
    return [sites[role] for role in roles if role in sites]


def feed_forward_networks(layer: nn.Module, groups: list[str], width: int) -> list[dict[str, str]]:
    """List the sites of each feed-forward network of a layer; {} for a network without sites.

    `groups` are the paths of the modules that contain attention; `width` is the layer's size in
    features.
    """
    attention = tuple(f"{group}." for group in groups)
    blocks = [path for path in expert_blocks(layer) if not f"{path}.".startswith(attention)]
    apart = (*attention, *(f"{path}." for path in blocks if path))
    candidates = {
        path: module
        for path, module in plain_projections(layer).items()
        if not path.startswith(apart) and kind_of(layer, path) not in ("attn", "mixer")
    }
    networks = [_whole_block(path) for path in blocks]
    while network := _last_network(candidates, width):
        networks.append(network)
        candidates = {p: m for p, m in candidates.items() if p not in network.values()}
        candidates = {p: m for p, m in candidates.items() if in_features(m) != out_features(m)}
    return networks


def _last_network(candidates: dict[str, nn.Module], width: int) -> dict[str, str]:
    for down, module in reversed(candidates.items()):
        if out_features(module) != width:
            continue
        inner = in_features(module)
        outputs = {
            path: out_features(m)
            for path, m in candidates.items()
            if path != down and in_features(m) == width
        }
        beside = {
            p: n for p, n in outputs.items() if p.rpartition(".")[0] == down.rpartition(".")[0]
        }
        outputs = beside if {inner, 2 * inner} & {*beside.values()} else outputs
        ups = [path for path, size in outputs.items() if size == inner]
        fused = [path for path, size in outputs.items() if size == 2 * inner]
        if ups or fused:
            alone = not ups and len(fused) == 1 and fused[0] in beside
            known = fused if alone else [p for p in fused if "gate_up" in p]
            return {"ffn.down": down} | _ups(ups, known)
    return {}


def _ups(ups: list[str], fused: list[str]) -> dict[str, str]:
    if fused:
        return {"ffn.gate_up": fused[0]}
    gates = (
        [p for p in ups if "gate" in p or p.endswith(("wi_0", "w_0", "w1"))] if len(ups) > 1 else []
    )
    plain = [p for p in ups if p not in gates]
    if len(gates) > 1 or len(plain) != 1:
        return {}
    return {"ffn.gate": gates[0], "ffn.up": plain[0]} if gates else {"ffn.up": plain[0]}


def expert_blocks(layer: nn.Module) -> list[str]:
    """List the outermost modules with experts, except attention with experts as projections."""
    paths = [path for path, module in own_modules(layer) if _has_experts(module)]
    outermost = [p for p in paths if not any(p.startswith(f"{q}.") for q in paths)]
    return [p for p in outermost if kind_of(layer, f"{p}.experts") != "attn"]


def _has_experts(module: nn.Module) -> bool:
    """Return whether a module has experts, or projections with a matrix for each expert."""
    stacked = (m for m in module.children() if not type(m).__module__.startswith("torch."))
    weights = (getattr(m, "weight", None) for m in stacked)
    counts = [len(w) for w in weights if isinstance(w, Tensor) and w.ndim == 3]
    return isinstance(getattr(module, "experts", None), nn.Module) or (
        len(counts) > 1 and len(set(counts)) == 1
    )


def _whole_block(path: str) -> dict[str, str]:
    """Return a mixture of experts as one sublayer."""
    return {"ffn": path} if path else {}


def inner_size(layer: nn.Module, network: Mapping[str, str]) -> float:
    """Return a network's size between its projections; infinite for a mixture of experts."""
    down = network.get("ffn.down")
    return in_features(layer.get_submodule(down)) if down else math.inf


def feed_forward_group(
    layer: nn.Module, groups: dict[str, str], sites: dict[str, str]
) -> dict[str, str]:
    """Return the outermost module around ffn.down that does not contain attention.

    `groups` maps a sublayer to the path of a module that contains it; `sites` maps roles to paths.
    """
    group = ""
    parent = sites.get("ffn.down", sites.get("ffn", "")).rpartition(".")[0]
    while parent and not any(f"{g}.".startswith(f"{parent}.") for g in groups.values()):
        group, parent = parent, parent.rpartition(".")[0]
        if isinstance(layer.get_submodule(parent), nn.ModuleList):
            break
    return {"ffn": group} if group else {}


def norm_roles(
    layer: nn.Module, width: int, groups: Mapping[str, str], sublayers: Sublayers
) -> dict[str, str]:
    """Map the roles of norms (`attn.norm`) to their paths.

    `groups` maps a sublayer to the path of a module that contains only it. `sublayers` maps it to
    the paths of its first and last projection, or of its module; empty if they are unknown.
    """
    paths = [path for path, module in layer.named_modules() if _is_norm(path, module, width)]
    inside: dict[str, list[str]] = {sublayer: [] for sublayer in groups}
    for path in paths:
        for sublayer, group in groups.items():
            if path.startswith(f"{group}."):
                inside[sublayer].append(path)
    contained = {
        f"{sublayer}.norm": outer[0]
        for sublayer, norms in inside.items()
        if len(outer := [p for p in norms if not _inner(layer, p, sublayers[sublayer])]) == 1
    }
    others = [path for path in paths if "." not in path]
    missing = [s for s in sublayers if f"{s}.norm" not in contained]
    return contained | _own_norms(layer, others, {s: sublayers[s] for s in missing})


def _is_norm(path: str, module: nn.Module, width: int) -> bool:
    weight = getattr(module, "weight", None)
    fits = weight is None or tuple(weight.shape) == (width,)
    named = "norm" in type(module).__name__.lower()
    return named and fits and not _HEAD_NORM.match(path.rpartition(".")[2])


def norm_size(module: nn.Module) -> int | None:
    """Return the size of a norm's weight; None for norms without a weight and other modules."""
    weight = getattr(module, "weight", None)
    named = "norm" in type(module).__name__.lower()
    return weight.shape[0] if named and isinstance(weight, Tensor) and weight.ndim == 1 else None


def _inner(layer: nn.Module, norm: str, projections: Sequence[str]) -> bool:
    """Return whether a norm is applied between the first and the last projection."""
    holder, _, name = norm.rpartition(".")
    order = call_order(layer.get_submodule(holder))
    start = f"{holder}." if holder else ""
    here = [path.removeprefix(start) for path in projections if path.startswith(start)]
    used = [place for path in here if (place := _using(order, path)) is not None]
    if name not in order or not used:
        return False
    at = order.index(name)
    starts_before = len(here) < len(projections)  # outside the holder
    return (starts_before or used[0] < at) and at < used[-1]


def _using(order: Sequence[str], path: str) -> int | None:
    """Return the position of the first call of a module or an enclosing module."""
    return next((n for n, used in enumerate(order) if f"{path}.".startswith(f"{used}.")), None)


def _own_norms(layer: nn.Module, norms: list[str], sublayers: Sublayers) -> dict[str, str]:
    order = call_order(layer)
    starts = {s: _using(order, paths[0]) if paths else None for s, paths in sublayers.items()}
    if None in starts.values() or not set(norms) <= set(order):
        return {}
    names = sorted(starts, key=lambda s: starts[s] or 0)
    gaps: list[list[str]] = [[] for _ in range(len(names) + 1)]
    for norm in sorted(norms, key=order.index):
        before = sum((starts[s] or 0) < order.index(norm) for s in names)
        gaps[before].append(norm)
    return _assigned(names, gaps)


def _assigned(names: list[str], gaps: list[list[str]]) -> dict[str, str]:
    """Assign norms to sublayers by the number of norms before, between and after sublayers."""
    counts = [len(gap) for gap in gaps]
    between = len(names) - 1
    norms = [norm for gap in gaps for norm in gap]
    kinds: tuple[str, ...] = ("norm",)
    if counts == [1, *[2] * between, 1] and names:
        kinds = ("norm", "postnorm")
    elif counts == [0, *[1] * between, 1] and all(norm.startswith("post") for norm in norms):
        kinds = ("postnorm",)
    elif counts not in ([1, *[1] * between, 0], [0, *[1] * between, 1], [1, *[0] * between, 0]):
        return {}
    roles = [f"{name}.{kind}" for name in names for kind in kinds]
    return dict(zip(roles, norms, strict=False))
