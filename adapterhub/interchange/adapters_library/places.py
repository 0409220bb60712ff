"""Where `adapters` puts its modules, in terms of sites."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.interchange.translation import Translation

# Modules of their own, where a layer has none that adds the residual.
_NAMED = {
    "attention_adapters": "attn",
    "cross_attention_adapters": "cross",
    "output_adapters": "ffn",
}


class Held:
    """The tensors of one adapter, taken by importers; `left` are those that nobody took."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name, self.tensors = re.escape(name), dict(tensors)

    def take(
        self, kind: str, keep: Callable[[str], object] = lambda path: True
    ) -> list[tuple[str, str, Tensor]]:
        """Take all tensors of a kind (`adapters`, `loras`, ...) at paths to `keep`: (the path that
        stands before the kind, the parameter behind the adapter's name, the tensor)."""
        form = re.compile(rf"(?:(.+)\.)?{kind}\.{self.name}\.(.+)")
        matched = {name: m for name in self.tensors if (m := form.fullmatch(name))}
        found = {name: m for name, m in matched.items() if keep(m[1] or "")}
        return [(m[1] or "", m[2], self.tensors.pop(name).float()) for name, m in found.items()]

    def left(self) -> list[str]:
        """The names of what nobody took."""
        return sorted(self.tensors)


def wanted_sites(anatomy: Anatomy, roles: Iterable[str], leave_out: Iterable[int]) -> list[Site]:
    """The sites of some roles, but for layers that are left out. Layers are counted through, those
    of a decoder behind those of its encoder."""
    start = dict.fromkeys(anatomy.stacks, 0)
    if len(start) == 2:
        start["decoder"] = anatomy.depth("encoder")
    roles, left_out = set(roles), set(leave_out)
    return [
        site
        for site in anatomy.sites.values()
        if site.role in roles and site.layer is not None
        if start[site.stack] + site.layer not in left_out
    ]


def layer_number(anatomy: Anatomy, site: Site) -> int:
    """The number of a site's layer, counted through both stacks."""
    behind = site.stack == "decoder" and len(anatomy.stacks) == 2
    return (site.layer or 0) + (anatomy.depth("encoder") if behind else 0)


def local_path(anatomy: Anatomy, path: str) -> tuple[str, int, str] | None:
    """The stack, the layer and the rest of a module's path; the base model may have any name."""
    for candidate in (path, path.partition(".")[2]):
        for stack, layers in anatomy.layers.items():
            for number, layer in enumerate(layers):
                own = layer.removeprefix(f"{anatomy.base_path}.") if anatomy.base_path else layer
                if candidate.startswith(f"{own}."):
                    return stack, number, candidate.removeprefix(f"{own}.")
    return None


def sublayer_at(anatomy: Anatomy, path: str) -> Site | None:
    """The sublayer that a module with bottleneck adapters belongs to."""
    if (place := local_path(anatomy, path)) is None:
        return None
    stack, number, rest = place
    for site in anatomy.sites.values():
        if site.kind == "sublayer" and (site.stack, site.layer) == (stack, number):
            host = site.host.removeprefix(f"{anatomy.layers[stack][number]}.")
            if site.role == _NAMED.get(rest) or host.startswith(f"{rest}."):
                return site
    return None


def attention_at(anatomy: Anatomy, path: str) -> Site | None:
    """Where the keys and values of an attention enter."""
    if (place := local_path(anatomy, path)) is None:
        return None
    stack, number, rest = place
    host = f"{anatomy.layers[stack][number]}.{rest}"
    sites = anatomy.sites.values()
    return next((s for s in sites if s.kind == "keyvalue" and s.host == host), None)


def projections_at(anatomy: Anatomy, path: str) -> list[Site]:
    """The projections that a module is: one, or the parts of a fused one."""
    if (place := local_path(anatomy, path)) is None:
        return []
    stack, number, rest = place
    host = f"{anatomy.layers[stack][number]}.{rest}"
    found = [s for s in anatomy.sites.values() if s.kind == "linear" and s.host == host]
    parts = [site for site in found if site.part is not None]
    return parts or found


def check_places(found: Iterable[Site], wanted: Iterable[Site], draft: Translation) -> None:
    """Tensors must be where the options say, and nowhere else."""
    have, need = {s.id for s in found}, {s.id for s in wanted}
    draft.problems += [f"{i}: its options name it, and it has no tensors" for i in need - have]
    draft.problems += [f"{i}: it has tensors, and its options do not name it" for i in have - need]


def note_dropout(options: Mapping[str, Any], draft: Translation) -> None:
    """Methods without an option for dropout train without it; what they compute is the same."""
    if options["dropout"]:
        draft.notes.append(f"dropout {options['dropout']} of training is not carried over")


def common(option: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The options for a size at each site id: `size` and `sizes`, say."""
    (most, _), *_ = Counter(sizes.values()).most_common(1)
    return {option: most, f"{option}s": {i: n for i, n in sorted(sizes.items()) if n != most}}


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal in shape and values."""
    return first.shape == second.shape and torch.equal(first, second)
