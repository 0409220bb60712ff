"""The layers of a model: what was found in each, and modules whose outputs nothing reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from adapterhub.anatomy.own_modules import own_modules
from adapterhub.anatomy.sites import SUBLAYERS, Anatomy, Site, join, own_parameters

_OPTION = "vision_feature_layer"


class LayerGroup(NamedTuple):
    """Layers of one stack that have the same sites.

    Attributes:
        stack: the name of the stack.
        layers: the numbers of the layers.
        found: the roles of their sites, by sublayer: `attn.q`, `attn.o`, `attn`.
        missing: what methods would need and is not there, in words.
        other_weights: the matrices that belong to no site, relative to the layer.
        experts: how many routed experts each layer has, if their weights are sites.
    """

    stack: str
    layers: tuple[int, ...]
    found: tuple[str, ...]
    missing: tuple[str, ...]
    other_weights: tuple[str, ...]
    experts: int | None = None


def layer_groups(anatomy: Anatomy) -> list[LayerGroup]:
    """Group the layers of each stack by what was found in them."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for stack, paths in anatomy.layers.items():
        for number, path in enumerate(paths):
            sites = [s for s in anatomy.sites.values() if (s.stack, s.layer) == (stack, number)]
            roles = tuple(sorted((site.role for site in sites), key=_by_sublayer))
            others = tuple(_other_weights(anatomy, path, sites))
            experts = max((s.held.experts or 0 for s in sites if s.held), default=0) or None
            key = stack, roles, tuple(_missing(roles)), others, experts
            groups.setdefault(key, []).append(number)
    return [
        LayerGroup(str(key[0]), tuple(numbers), *key[1:])  # type: ignore[arg-type]
        for key, numbers in groups.items()
    ]


def _by_sublayer(role: str) -> tuple[int, str]:
    sublayer = role.partition(".")[0]
    place = SUBLAYERS.index(sublayer) if sublayer in SUBLAYERS else len(SUBLAYERS)
    return place, role


def _missing(roles: tuple[str, ...]) -> Iterator[str]:
    has = {role.partition(".")[0] for role in roles if not role.endswith("norm")}
    if not {"attn", "mixer"} & has:
        yield "attention or a mixer"
    for sublayer in ("attn", "cross"):
        if f"{sublayer}.qkv" in roles and f"{sublayer}.q" not in roles:
            yield f"q, k and v in {sublayer}.qkv"
        elif sublayer in has and f"{sublayer}.kv" not in roles:
            yield f"keys and values in {sublayer}"
    if "ffn" not in has:
        yield "a feed-forward network"
    elif not {"ffn.down", "ffn"} & set(roles):
        yield "the output of the feed-forward network"
    for sublayer in SUBLAYERS[:-1]:
        if sublayer in has and sublayer not in roles:
            yield f"the output of {sublayer}"


def _other_weights(anatomy: Anatomy, layer: str, sites: list[Site]) -> Iterator[str]:
    """Yield the paths of a layer's matrices that no site stands for."""
    hosts = {site.host for site in sites if site.kind in ("linear", "norm")}
    held = {join(site.host, site.held.parameter) for site in sites if site.held}
    for path, module in own_modules(anatomy.model.get_submodule(layer)):
        if join(layer, path) in hosts:
            continue
        names = (n for n, p in own_parameters(module) if p.ndim > 1)
        yield from (join(path, n) for n in names if join(layer, path, n) not in held)


def dropped_modules(anatomy: Anatomy) -> tuple[str, ...]:
    """Return the paths of the modules behind the last states that are read; () in most models.

    LLaVA and its kin read the states before the last layer of their encoder of pictures,
    hidden_states[-2]: what follows is computed and dropped, so nothing there could be trained.
    """
    chosen = getattr(anatomy.model.config, _OPTION, None)
    numbers = [chosen] if isinstance(chosen, int) else list(chosen or ())
    if not numbers or "vision" not in anatomy.layers:
        return ()
    layers = anatomy.layers["vision"]
    # States 0 are the embeddings: states n are read behind n layers.
    read = max(n if n >= 0 else len(layers) + 1 + n for n in numbers)
    return (*layers[read:], *_behind(anatomy)) if read < len(layers) else ()


def _behind(anatomy: Anatomy) -> Iterator[str]:
    """Yield the modules of the encoder that are registered behind its layers, such as a norm."""
    paths = [paths[0].split(".") for paths in anatomy.layers.values()]
    columns = zip(*paths, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda names: len(set(names)) == 1, columns))
    parts = anatomy.layers["vision"][0].split(".")[:-1]
    for depth in range(shared + 1, len(parts)):
        holder = ".".join(parts[:depth])
        names = [name for name, _ in anatomy.model.get_submodule(holder).named_children()]
        yield from (f"{holder}.{name}" for name in names[names.index(parts[depth]) + 1 :])
