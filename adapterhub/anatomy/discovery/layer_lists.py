"""The module lists of a model whose elements are layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import nn

from adapterhub.anatomy.discovery.attentions import attention_modules
from adapterhub.anatomy.own_modules import own_modules
from adapterhub.anatomy.projections import is_projection, plain_projections

_OF_A_STAGE = re.compile(r"\.\d+\.(layers?|(\w+_)?blocks)$")
_MERGERS = re.compile(r"merger|projector", re.IGNORECASE)


def layer_lists(base: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """List the module lists of layers: those with attention, and those apart from them.

    Of nested lists whose layers have one class and attention only the innermost, and those of
    stages; of others the outermost. Lists in a list (`groups.0.layers`, `groups.1.layers`) are one
    entry (`groups.*.layers`) with all modules.
    """
    lists = {p: list(m) for p, m in own_modules(base) if isinstance(m, nn.ModuleList)}
    every = {p: m for p, m in lists.items() if m and None not in m}
    sequences = {p: list(m) for p, m in own_modules(base) if isinstance(m, nn.Sequential)}
    every |= {p: m for p, m in sequences.items() if _all_attend(m)}
    alike = {p: m for p, m in every.items() if len(set(map(type, m))) == 1 and _attend(m)}
    chosen = {p: m for p, m in alike.items() if not any(o.startswith(f"{p}.") for o in alike)}
    staged = _staged(every)
    for path, layers in every.items():
        apart = not any(_nested(path, other) for other in chosen) and path not in staged.values()
        several = len(layers) > 1 or path in staged
        if apart and (_attend(layers) or (several and all(map(_is_layer, layers)))):
            chosen[path] = layers
    chosen = {path: m for path, m in chosen.items() if not _beside(path, m, chosen)}
    if not chosen:  # of convolutions alone, say: they have layers, if no projections
        outer = {p: m for p, m in every.items() if len(m) > 1 and all(map(_has_parameters, m))}
        chosen = {p: m for p, m in outer.items() if not any(p.startswith(f"{o}.") for o in outer)}
    specs: dict[str, list[nn.Module]] = {}
    for path in sorted(chosen, key=list(every).index):
        specs.setdefault(re.sub(r"\.\d+\.", ".*.", path), []).extend(chosen[path])
    return list(specs.items())


def _staged(lists: Mapping[str, list[nn.Module]]) -> dict[str, str]:
    """Map the lists of the layers of stages to the list of the stages, as in ConvNeXt."""
    inner = {p: p.rsplit(".", 2)[0] for p, m in lists.items() if _OF_A_STAGE.search(p)}
    inner = {p: o for p, o in inner.items() if o in lists and _alike_layers(lists[p])}
    counts = Counter(inner.values())
    return {p: outer for p, outer in inner.items() if counts[outer] == len(lists[outer])}


def _alike_layers(modules: list[nn.Module]) -> bool:
    return len(set(map(type, modules))) == 1 and all(map(_is_layer, modules))


def _all_attend(modules: list[nn.Module]) -> bool:
    """Return whether a `Sequential`, which may hold anything, holds layers of one class."""
    one_class = len(set(map(type, modules))) == 1
    return one_class and all(any(attention_modules(layer)) for layer in modules)


def _attend(layers: Iterable[nn.Module]) -> bool:
    return any(any(attention_modules(layer)) for layer in layers)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _beside(path: str, modules: list[nn.Module], lists: Mapping[str, list[nn.Module]]) -> bool:
    """Return whether a list belongs to layers beside it: one merger for some of them."""
    if _MERGERS.search(path) and not _attend(modules) and any(map(_attend, lists.values())):
        return True
    parent = path.rpartition(".")[0]
    beside = [layers for other, layers in lists.items() if other.rpartition(".")[0] == parent]
    return not _attend(modules) and any(_attend(m) and len(m) > len(modules) for m in beside)


def _nested(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module may be a layer: it has projections, and is none itself."""
    return not is_projection(module) and bool(plain_projections(module))
