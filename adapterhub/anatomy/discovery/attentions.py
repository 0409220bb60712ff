"""The attention modules of a layer, and the roles of their projections."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn

from adapterhub.anatomy.attention_source import attends
from adapterhub.anatomy.discovery.further_sites import MIXER, own_name
from adapterhub.anatomy.forward_source import returns_tuple
from adapterhub.anatomy.own_modules import own_modules
from adapterhub.anatomy.projections import (
    in_features,
    is_projection,
    latent_sizes,
    out_features,
    plain_projections,
)
from adapterhub.anatomy.sites import join

_PREFIX = re.compile(r"^(project|projection|linear)_(?=.)")
_SUFFIX = re.compile(r"_(proj|projection|lin|linear|layer)$")
_NAMES = {
    "q": ("q", "query", "wq"),
    "k": ("k", "key", "wk"),
    "v": ("v", "value", "wv"),
    "o": ("o", "out", "output", "dense", "c", "wo", "proj", "projection", "attention_out"),
    "qkv": ("qkv", "query_key_value", "wqkv", "c_attn", "in"),
    # Latent attention: keys and values, often queries too, through a small bottleneck.
    "q_a": ("q_a",),
    "q_b": ("q_b",),
    "kv_a": ("kv_a", "kv_a_proj_with_mqa"),
    "kv_b": ("kv_b",),
}
# Attention without a softmax, which has states instead of keys and values.
_RECURRENT = re.compile(r"linear_?att|delta|lightning|mamba|rwkv|gla", re.IGNORECASE)
_CROSS = re.compile(r"cross|enc_?dec|encoder_att", re.IGNORECASE)
_SEPARATE = ("q", "k", "v", "q_a", "q_b", "kv_a", "kv_b")


def attention_modules(layer: nn.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the attention modules inside a layer, with the names of their projections by role."""
    for path, module in own_modules(layer):
        children = dict(_children(module))
        projections = {role: name for name in children if (role := _role(name)) is not None}
        by_role = {role: children[name] for role, name in projections.items()}
        if any(map(returns_tuple, by_role.values())):
            continue
        # A layer may use the keys and values of an earlier one.
        shares = {"q", "o"} == projections.keys() == set(map(_role, children))
        whole = shares or {"q", "k", "v"} <= projections.keys()
        latent = {"kv_a", "kv_b"} <= projections.keys()
        if not latent and _RECURRENT.search(own_name(module, layer)):
            continue
        mixes = MIXER.search(f"{path.rpartition('.')[2]} {own_name(module, layer)}")
        if whole or latent or (not mixes and _is_fused(by_role)):
            yield path, projections


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the projections of a module; some are wrapped, as `q_proj.linear`."""
    for name, child in module.named_children():
        if is_projection(child):
            yield name, child
        elif list(plain_projections(child)) == ["linear"]:
            yield f"{name}.linear", child.get_submodule("linear")


def _role(name: str) -> str | None:
    stem = _PREFIX.sub("", _SUFFIX.sub("", name.lower().removesuffix(".linear")))
    return next((role for role, names in _NAMES.items() if stem in names), None)


def _is_fused(projections: Mapping[str, nn.Module]) -> bool:
    """Return whether a projection has the size of q, k and v together, as far as that is known."""
    if "qkv" not in projections:
        return False
    if "o" not in projections:
        return True
    queries = in_features(projections["o"])
    keys, odd = divmod(out_features(projections["qkv"]) - queries, 2)
    return not odd and keys > 0 and queries % keys == 0


def attention_sublayers(layer: nn.Module) -> dict[str, dict[str, dict[str, str]]]:
    """Map attn and cross to their attention modules, and these to their projections by role."""
    sublayers: dict[str, dict[str, dict[str, str]]] = {}
    for path, projections in attention_modules(layer):
        sublayer = "cross" if _CROSS.search(path) else "attn"
        sublayers.setdefault(sublayer, {})[path] = projections
    return sublayers


def attention_group(attention: str) -> str:
    """Return the path of the module around an attention's projections, its output among them."""
    # q, k and v may be one level deeper than the output, as in BERT.
    return attention.rpartition(".")[0] or attention


def attention_sites(
    layer: nn.Module, sublayer: str, path: str, projections: dict[str, str], width: int
) -> dict[str, str]:
    """Map the roles of an attention's projections and of its keys and values to their paths.

    `path` is that of the attention module in the layer; `projections` maps roles to their names.
    """
    separate = [name for name in _SEPARATE if name in projections]
    names = separate if {"q", "kv_a"} & projections.keys() else [*separate, "qkv"]
    sites = {f"{sublayer}.{name}": join(path, projections[name]) for name in names}
    if output := _attention_output(layer, path, projections.get("o"), width):
        sites[f"{sublayer}.o"] = output
    attention = layer.get_submodule(path)
    latent = "k" not in projections and {"kv_a", "kv_b"} & projections.keys()
    if attends(attention) and (not latent or latent_sizes(attention)):
        sites[f"{sublayer}.kv"] = path
    return sites


def _attention_output(layer: nn.Module, path: str, name: str | None, width: int) -> str | None:
    """Return the output projection: the child `name`, or one beside the attention at `path`."""
    candidates = [join(path, name)] if name else []
    group = attention_group(path)
    around = (join(group, p) for p in plain_projections(layer.get_submodule(group)))
    candidates += [p for p in around if not p.startswith(f"{path}.")]
    return next((c for c in candidates if out_features(layer.get_submodule(c)) == width), None)
