"""Invertible adapters and ReFT of `adapters`.

    bert.invertible_adapters.NAME.F.0.*                       input.invertible.coupling.f.down.*
    bert.encoder.layer.0.reft_layer.refts.NAME.units.0.*      layer.loreft.edit.*

Its first unit edits the first tokens and its second unit the last tokens. With `tied_weights`, the
first unit edits both. The orthonormal rows are computed by torch's parametrization: files contain a
base and reflections. Files do not distinguish DiReFT from NoReFT, and `adapters` itself reads both
as NoReFT; here, `subtract_projection: false` in the options marks DiReFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from adapterhub.anatomy.sites import Site, sites_option
from adapterhub.interchange.adapters_library.files import MethodConfig
from adapterhub.interchange.adapters_library.module_paths import RemainingTensors, local_path
from adapterhub.interchange.translation import Translation
from adapterhub.methods.invertible import Invertible
from adapterhub.methods.reft import DiReFT, LoReFT, NoReFT

_COUPLING = {"F.0": "f.down", "F.2": "f.up", "G.0": "g.down", "G.2": "g.up"}
_SOURCE = {"learned_source.weight": "W", "learned_source.bias": "b"}
_PROJECTION = "projection."
_ORTHOGONAL = {"weight.original": "original", "weight.0.base": "base"}


def import_invertible(
    options: Mapping[str, Any],
    activation: str,
    remaining: RemainingTensors,
    translation: Translation,
) -> None:
    """Translate the invertible adapter of a bottleneck's options."""
    method = Invertible.name
    tensors = {name: tensor for _, name, tensor in remaining.take("invertible_adapters")}
    if not tensors:  # not saved for task adapters
        translation.notes.append("inv_adapter: there is none in the files")
        return
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        if module in _COUPLING:
            own[f"{_COUPLING[module]}.{parameter}"] = tensor
        else:
            translation.problems.append(f"invertible_adapters: unexpected tensor {name}")
    shapes = [tuple(t.shape) for n, t in own.items() if n.endswith("down.weight") and t.ndim == 2]
    factor = options["inv_adapter_reduction_factor"] or 2
    reduction = max(round(factor), 1)
    if any(max(width // reduction, 1) != hidden for hidden, width in shapes):
        translation.problems.append(
            f"inv_adapter_reduction_factor: {factor}, hidden layers of {[s[0] for s in shapes]}"
        )
    prefix = f"{Invertible().site(translation.anatomy).id}.{method}.coupling"
    translation.tensors |= {f"{prefix}.{name}": tensor for name, tensor in own.items()}
    spec: dict[str, Any] = {"reduction": reduction, "activation": activation}
    if not options["inv_adapter_undone"]:
        spec["undone"] = False
        translation.notes.append(
            "inv_adapter: not undone in front of an output layer, as with the model class that "
            "wrote the files"
        )
    translation.methods.append({method: spec})


def import_reft(part: MethodConfig, remaining: RemainingTensors, translation: Translation) -> None:
    """Translate ReFT."""
    options, problems = part.options, translation.problems
    counts = {"f": options["prefix_positions"], "l": options["suffix_positions"]}
    nonzero = {kind: count for kind, count in counts.items() if count}
    if not nonzero:
        problems.append("prefix_positions and suffix_positions: 0, so nothing is edited")
    orthonormal, subtracts = options["orthogonality"], options["subtract_projection"]
    if orthonormal and not subtracts:
        problems.append("subtract_projection: false, only with orthogonality false")
    method = LoReFT.name if orthonormal else NoReFT.name if subtracts else DiReFT.name
    shared = options["tied_weights"]
    edits = ["edit"] if shared else [{"f": "first", "l": "last"}[kind] for kind in counts]
    sites: dict[str, Site] = {}
    units: dict[str, dict[str, Tensor]] = {}
    for path, parameter, tensor in remaining.take("refts"):
        site, (_, number, name) = _layer_at(path, translation), parameter.split(".", 2)
        if site is None or not number.isdecimal() or int(number) >= len(edits):
            problems.append(f"{path}: unexpected tensor {parameter}")
            continue
        edit = edits[int(number)]
        if shared or nonzero.get(edit[0]):  # the other unit does not edit any token
            sites[site.id] = site
            units.setdefault(f"{site.id}.{method}.{edit}", {})[name] = tensor
    two_stacks = len(translation.anatomy.stacks) == 2
    if counts["l"] and two_stacks and any(site.stack == "decoder" for site in sites.values()):
        problems.append(
            "suffix_positions: adapters looks for the last tokens of a decoder where those of the "
            "encoder are"
        )
    for prefix, tensors in units.items():
        _add_unit(prefix, tensors, orthonormal, translation)
    translation.note_dropout(options["dropout"])
    if sites and nonzero:
        positions = "+".join(f"{kind}{count}" for kind, count in nonzero.items())
        own_sites = {"sites": sites_option(translation.anatomy, sites.values())}
        spec = {"rank": options["r"], "positions": positions, "shared": shared} | own_sites
        translation.methods.append({method: spec})


def _layer_at(path: str, translation: Translation) -> Site | None:
    """Return the site behind the layer with a module of ReFT."""
    location = local_path(translation.anatomy, path)
    if location is None or location[2] != "reft_layer":
        return None
    return translation.anatomy.sites.get(f"{location[0]}.{location[1]}.layer")


def _add_unit(
    prefix: str, tensors: Mapping[str, Tensor], orthonormal: bool, translation: Translation
) -> None:
    """Add the tensors of one edit: W, b and P."""
    factors: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        inner = name.removeprefix(f"{_PROJECTION}parametrizations.")
        if name in _SOURCE:
            translation.tensors[f"{prefix}.{_SOURCE[name]}"] = tensor
        elif name == f"{_PROJECTION}weight" and not orthonormal:
            translation.tensors[f"{prefix}.P"] = tensor
        elif inner in _ORTHOGONAL and orthonormal:
            factors[_ORTHOGONAL[inner]] = tensor
        else:
            translation.problems.append(f"{prefix}: unexpected tensor {name}")
    if factors:
        rows = _orthonormal_rows(factors)
        if rows is None:
            translation.problems.append(f"{prefix}: the parts of projection.weight do not fit")
        else:
            translation.tensors[f"{prefix}.P"] = rows


def _orthonormal_rows(factors: Mapping[str, Tensor]) -> Tensor | None:
    """Compute (rank, d) like torch's parametrization, in fp32; None for other shapes."""
    original = factors.get("original")
    if original is None or original.ndim != 2 or len(factors) != len(_ORTHOGONAL):
        return None
    linear: Any = nn.Linear(original.shape[1], original.shape[0], bias=False)
    parametrizations.orthogonal(linear)
    parts = linear.parametrizations.weight
    if parts[0].base.shape != factors["base"].shape:
        return None
    with torch.no_grad():
        parts.original.copy_(original)
        parts[0].base.copy_(factors["base"])
        rows: Tensor = linear.weight.detach().clone()
    return rows
