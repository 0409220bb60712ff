"""Translate (IA)^3 to and from peft: `ia3_l` scales a module's output or a feed-forward's input."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from adapterhub.anatomy.projections import CONVOLUTIONS
from adapterhub.anatomy.sites import sites_option
from adapterhub.interchange.peft.export_types import (
    CheckpointPart,
    ExportedModule,
    ExportSource,
    target_options,
)
from adapterhub.interchange.peft.files import PeftFiles
from adapterhub.interchange.peft.kernels import as_kernel
from adapterhub.interchange.peft.targets import ModuleFinder
from adapterhub.interchange.translation import Translation
from adapterhub.methods.ia3 import IA3, InputScale, OutputScale

_SCALE = ".ia3_l"


def import_peft_ia3(
    files: PeftFiles, finder: ModuleFinder, translation: Translation
) -> dict[str, Tensor]:
    """Translate the scales of a checkpoint; return the other tensors."""
    anatomy = translation.anatomy
    sites = {s.host: s for s in anatomy.every() if s.kind == "linear" and not s.part}
    scaled, at_inputs = [], []
    for name in [n for n in files.tensors if n.endswith(_SCALE)]:
        file_path = name.removesuffix(_SCALE)
        path = finder.find(file_path)
        site = sites.get(path or "")
        if site is None:
            reason = "no such module" if path is None else "not a site"
            translation.problems.append(f"{file_path}: {reason} in this backbone")
            continue
        at_input = finder.targets.is_feedforward(file_path)
        scale = files.tensors[name].to(torch.float32)
        if scale.numel() != (site.d_in if at_input else site.d_out):
            translation.problems.append(
                f"{file_path}: shape {tuple(scale.shape)} does not fit {site.id}"
            )
        scaled.append(site)
        at_inputs += [site] if at_input else []
        translation.tensors[f"{site.id}.{IA3.name}.scale"] = scale.flatten()
    if scaled:
        options = {
            "sites": sites_option(anatomy, scaled),
            "inputs": sites_option(anatomy, at_inputs) if at_inputs else [],
        }
        translation.methods.append({IA3.name: options})
    return {n: t for n, t in files.tensors.items() if not n.endswith(_SCALE)}


def export_ia3(source: ExportSource) -> CheckpointPart:
    """Return the scales in peft's form, one per module; a fused projection's are joined."""
    scales: dict[tuple[str, bool], Tensor] = {}
    for part in source.parts:
        if isinstance(part.module, OutputScale | InputScale):
            key = (part.site.host, isinstance(part.module, InputScale))
            scale = _module_scale(part, part.module, source.modules[part.site.host])
            scales[key] = scales[key] * scale if key in scales else scale
    inputs = sorted(host for host, at_input in scales if at_input)
    both = [host for host, at_input in scales if at_input and (host, False) in scales]
    problems = [f"{host}: peft rescales the input or the output, not both" for host in both]
    kernels = {h for h, _ in scales if isinstance(source.modules[h], CONVOLUTIONS)}
    problems += [
        f"{host}: peft rescales channels of a Conv2d only, and of its output here"
        for host in sorted(kernels)
        if not isinstance(source.modules[host], nn.Conv2d) or host in inputs
    ]
    problems += [
        f"{part.site.id}: peft rescales the input of the whole {part.site.host}, not that of a part"
        for part in source.parts
        if isinstance(part.module, InputScale) and part.site.part is not None
    ]
    return CheckpointPart(
        config=target_options(source, {host for host, _ in scales})
        # A list would match the ends of other targets, so it is one regular expression.
        | {"feedforward_modules": "|".join(map(re.escape, inputs)) if inputs else []},
        tensors={
            f"{host}{_SCALE}": _as_stored(scale, at_input, source.modules[host])
            for (host, at_input), scale in scales.items()
        },
        targets=sorted({host for host, _ in scales}),
        problems=problems,
    )


def _as_stored(scale: Tensor, at_input: bool, host: nn.Module) -> Tensor:
    """Return a scale in the shape that peft multiplies with a weight, or with a kernel's output."""
    if isinstance(host, CONVOLUTIONS):
        return as_kernel(host, "scale", scale)
    return scale[None] if at_input else scale[:, None]


def _module_scale(part: ExportedModule, scale: OutputScale | InputScale, host: nn.Module) -> Tensor:
    """Return the scale of the whole module, with ones outside the site's slice."""
    values = scale.scale.detach()
    if part.site.part is None or isinstance(scale, InputScale):
        return values
    width = int(getattr(host, "nf", 0) or getattr(host, "out_features", 0))
    return part.site.part.write(torch.ones(width, device=values.device), values)
