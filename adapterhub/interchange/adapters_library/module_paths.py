"""Map tensor names and module paths of `adapters` to sites of a backbone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.interchange.translation import Translation

# Separate modules for bottlenecks, in layers without a module that adds the residual.
_BOTTLENECK_ROLES = {
    "attention_adapters": "attn",
    "cross_attention_adapters": "cross",
    "output_adapters": "ffn",
}


class RemainingTensors:
    """The tensors of a checkpoint that no importer has taken yet."""

    def __init__(self, adapter_name: str, tensors: Mapping[str, Tensor]) -> None:
        self._name, self._tensors = re.escape(adapter_name), dict(tensors)

    def take(
        self, kind: str, accept: Callable[[str], bool] = lambda path: True
    ) -> list[tuple[str, str, Tensor]]:
        """Remove and return (path, parameter, tensor) of one kind, such as `adapters` or `loras`.

        Their names have the form PATH.KIND.ADAPTER.PARAMETER. Only paths that `accept` accepts are
        taken.
        """
        pattern = re.compile(rf"(?:(.+)\.)?{kind}\.{self._name}\.(.+)")
        taken = []
        for name in list(self._tensors):
            match = pattern.fullmatch(name)
            if match and accept(match[1] or ""):
                taken.append((match[1] or "", match[2], self._tensors.pop(name).float()))
        return taken

    def names(self) -> list[str]:
        """Return the names of the tensors that were not taken."""
        return sorted(self._tensors)


def sites_with_roles(
    anatomy: Anatomy, roles: Iterable[str], leave_out: Iterable[int]
) -> list[Site]:
    """Return the sites of some roles, except in some layers.

    `leave_out` are layer numbers; a decoder continues the numbering of its encoder.
    """
    roles, left_out = set(roles), set(leave_out)
    return [
        site
        for site in anatomy.sites.values()
        if site.role in roles and site.layer is not None
        if layer_number(anatomy, site) not in left_out
    ]


def layer_number(anatomy: Anatomy, site: Site) -> int:
    """Return the layer number of a site; a decoder continues the numbering of its encoder."""
    after_encoder = site.stack == "decoder" and len(anatomy.stacks) == 2
    return (site.layer or 0) + (anatomy.depth("encoder") if after_encoder else 0)


def local_path(anatomy: Anatomy, path: str) -> tuple[str, int, str] | None:
    """Split a module's path into stack, layer number and the path inside the layer.

    The path may start with any name of the base model. Returns None outside of the layers.
    """
    for candidate in (path, path.partition(".")[2]):
        for stack, layers in anatomy.layers.items():
            for number, layer in enumerate(layers):
                prefix = layer.removeprefix(f"{anatomy.base_path}.") if anatomy.base_path else layer
                if candidate.startswith(f"{prefix}."):
                    return stack, number, candidate.removeprefix(f"{prefix}.")
    return None


def sublayer_at(anatomy: Anatomy, path: str) -> Site | None:
    """Return the sublayer of a module with bottleneck adapters."""
    if (location := local_path(anatomy, path)) is None:
        return None
    stack, number, rest = location
    for site in anatomy.sites.values():
        if site.kind == "sublayer" and (site.stack, site.layer) == (stack, number):
            host = site.host.removeprefix(f"{anatomy.layers[stack][number]}.")
            if site.role == _BOTTLENECK_ROLES.get(rest) or host.startswith(f"{rest}."):
                return site
    return None


def attention_at(anatomy: Anatomy, path: str) -> Site | None:
    """Return the site where prefixes enter the attention at a path."""
    host = _host(anatomy, path)
    sites = anatomy.sites.values()
    return next((s for s in sites if s.kind == "keyvalue" and s.host == host), None)


def projections_at(anatomy: Anatomy, path: str) -> list[Site]:
    """Return the projections of a module: one, or the parts of a fused one."""
    host = _host(anatomy, path)
    sites = [s for s in anatomy.sites.values() if s.kind == "linear" and s.host == host]
    return [site for site in sites if site.part is not None] or sites


def _host(anatomy: Anatomy, path: str) -> str | None:
    """Return the path of the same module in the model, for modules inside of layers."""
    if (location := local_path(anatomy, path)) is None:
        return None
    stack, number, rest = location
    return f"{anatomy.layers[stack][number]}.{rest}"


def check_sites(
    with_tensors: Iterable[Site], named: Iterable[Site], translation: Translation
) -> None:
    """Check that the sites with tensors are those that the options name."""
    tensor_ids, named_ids = {s.id for s in with_tensors}, {s.id for s in named}
    translation.problems += [
        f"{i}: named by the options, but has no tensors" for i in named_ids - tensor_ids
    ] + [f"{i}: has tensors, but the options do not name it" for i in tensor_ids - named_ids]
