"""The module lists of a model whose elements are layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import nn

from adapterhub.anatomy.discovery.attentions import attention_modules
from adapterhub.anatomy.own_modules import own_modules
from adapterhub.anatomy.projections import is_projection, plain_projections


def layer_lists(base: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """List the module lists of layers: those with attention, and those apart from them.

    Of nested lists whose layers have one class and attention only the innermost, of others the
    outermost; lists in a list (`groups.0.layers`, `groups.1.layers`) are one entry
    (`groups.*.layers`) with all modules.
    """
    lists = {p: list(m) for p, m in own_modules(base) if isinstance(m, nn.ModuleList)}
    every = {p: m for p, m in lists.items() if m and None not in m}
    alike = {p: m for p, m in every.items() if len(set(map(type, m))) == 1 and _attend(m)}
    chosen = {p: m for p, m in alike.items() if not any(o.startswith(f"{p}.") for o in alike)}
    for path, layers in every.items():
        apart = not any(_nested(path, other) for other in chosen)
        if apart and (_attend(layers) or (len(layers) > 1 and all(map(_is_layer, layers)))):
            chosen[path] = layers
    chosen = {path: m for path, m in chosen.items() if not _beside(path, m, chosen)}
    if not chosen:  # of convolutions alone, say: they have layers, if no projections
        outer = {p: m for p, m in every.items() if len(m) > 1 and all(map(_has_parameters, m))}
        chosen = {p: m for p, m in outer.items() if not any(p.startswith(f"{o}.") for o in outer)}
    specs: dict[str, list[nn.Module]] = {}
    for path in sorted(chosen, key=list(every).index):
        specs.setdefault(re.sub(r"\.\d+\.", ".*.", path), []).extend(chosen[path])
    return list(specs.items())


def _attend(layers: Iterable[nn.Module]) -> bool:
    return any(any(attention_modules(layer)) for layer in layers)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _beside(path: str, modules: list[nn.Module], lists: Mapping[str, list[nn.Module]]) -> bool:
    """Return whether a list belongs to layers in the same module: one merger for some of them."""
    parent = path.rpartition(".")[0]
    beside = [layers for other, layers in lists.items() if other.rpartition(".")[0] == parent]
    return not _attend(modules) and any(_attend(m) and len(m) > len(modules) for m in beside)


def _nested(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module may be a layer: it has projections, and is none itself."""
    return not is_projection(module) and bool(plain_projections(module))
