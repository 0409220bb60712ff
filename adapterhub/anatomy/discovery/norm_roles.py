"""Which norms of a layer belong to which sublayer, for discovery.

A norm inside a sublayer's module belongs to that sublayer, unless it is applied between its
projections. A layer's own norms follow from the order in which its forward uses them. A norm whose
role is ambiguous gets none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from adapterhub.anatomy.forward_source import call_order

_HEAD_NORM = re.compile(r"^(q|k|v|query|key|value)_?[a-z]*norm", re.IGNORECASE)
_ENDS = ("o", "down")

Sublayers = Mapping[str, Sequence[str]]  # name -> the paths of its modules, its projections or it


def norm_roles(
    layer: nn.Module, width: int, groups: Mapping[str, str], sublayers: Sublayers
) -> dict[str, str]:
    """Map the roles of norms (`attn.norm`) to their paths.

    `groups` maps a sublayer to the path of a module that contains it only; `sublayers` to the paths
    of its first and last projection, or of its module, empty if they are unknown.
    """
    paths = [path for path, module in layer.named_modules() if _is_norm(path, module, width)]
    inside: dict[str, list[str]] = {sublayer: [] for sublayer in groups}
    for path in paths:
        for sublayer, group in groups.items():
            if path.startswith(f"{group}."):
                inside[sublayer].append(path)
    contained = {
        f"{sublayer}.norm": outer[0]
        for sublayer, found in inside.items()
        if len(outer := [p for p in found if not _inner(layer, p, sublayers[sublayer])]) == 1
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
    """Return the size of a norm's weight; None for a norm without, and for other modules."""
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
    starts_before = len(here) < len(projections)  # outside of the holder
    return (starts_before or used[0] < at) and at < used[-1]


def _using(order: Sequence[str], path: str) -> int | None:
    """Return the position of the first call of a module or of one around it."""
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
    """Assign norms to sublayers by their number before the first, between, and after the last."""
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
