"""All sites of one layer: attention, network, further projections and norms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from adapterhub.anatomy.discovery.attentions import (
    attention_group,
    attention_sites,
    attention_sublayers,
)
from adapterhub.anatomy.discovery.further_sites import further_sites, mixer_of
from adapterhub.anatomy.discovery.networks import (
    expert_blocks,
    feed_forward_group,
    feed_forward_networks,
    inner_size,
)
from adapterhub.anatomy.discovery.norm_roles import norm_roles
from adapterhub.anatomy.held_weights import expert_modules, router_path
from adapterhub.anatomy.layer_paths import has_path
from adapterhub.anatomy.projections import plain_projections
from adapterhub.anatomy.sites import EXPERTS, ROUTER, join


def sites_of_layer(layer: nn.Module, width: int) -> dict[str, str]:
    """Map the roles in a layer of a size in features to the paths of their modules."""
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
