"""The feed-forward networks of a layer, mixtures of experts among them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from adapterhub.anatomy.discovery.further_sites import kind_of
from adapterhub.anatomy.own_modules import own_modules
from adapterhub.anatomy.projections import in_features, out_features, plain_projections


def feed_forward_networks(layer: nn.Module, groups: list[str], width: int) -> list[dict[str, str]]:
    """List the sites of each feed-forward network of a layer; {} for one without sites.

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
    """List the outermost modules with experts, but for attention whose projections are experts."""
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
    """Return the size of a network between its projections; a mixture of experts is the largest."""
    down = network.get("ffn.down")
    return in_features(layer.get_submodule(down)) if down else math.inf


def feed_forward_group(
    layer: nn.Module, groups: dict[str, str], sites: dict[str, str]
) -> dict[str, str]:
    """Return the outermost module around ffn.down that does not contain attention.

    `groups` maps a sublayer to the path of a module that contains it, `sites` roles to paths.
    """
    group = ""
    parent = sites.get("ffn.down", sites.get("ffn", "")).rpartition(".")[0]
    while parent and not any(f"{g}.".startswith(f"{parent}.") for g in groups.values()):
        group, parent = parent, parent.rpartition(".")[0]
        if isinstance(layer.get_submodule(parent), nn.ModuleList):
            break
    return {"ffn": group} if group else {}
