"""Import of peft's low-rank updates.

peft adds y = W x + s B A x to each target, with s = alpha / rank or alpha / sqrt(rank), and DoRA's
magnitude if enabled. At a projection that is a site the update becomes a method of ours, one for
each alpha. Elsewhere (a pooler, an embedding, an output layer) it is folded into a whole weight,
which the adapter stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from adapterhub.anatomy.site_patterns import sites_option
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.backbones.weights import read_bias, read_weight
from adapterhub.interchange.method_options import size_options
from adapterhub.interchange.peft.files import PeftFiles
from adapterhub.interchange.peft.folded import WeightFolder
from adapterhub.interchange.peft.initializations import (
    subtracted_factors,
    subtracted_initialization,
)
from adapterhub.interchange.peft.targets import ModuleFinder
from adapterhub.interchange.peft.token_rows import read_token_rows
from adapterhub.interchange.peft.updates import BIAS, Update, read_updates
from adapterhub.interchange.translation import Translation
from adapterhub.methods.dora import DoRA
from adapterhub.methods.lora import LoRA
from adapterhub.methods.pissa import PiSSA
from adapterhub.methods.rslora import RsLoRA


def import_peft_low_rank(
    files: PeftFiles, finder: ModuleFinder, translation: Translation
) -> dict[str, Tensor]:
    """Translate the updates of a checkpoint.

    Returns:
        The other tensors, and the weights that updates outside of sites are folded into.
    """
    rows, files = read_token_rows(files, finder, translation)
    updates, rest = read_updates(files, finder, translation)
    initialization = subtracted_initialization(files.config, translation)
    anatomy = translation.anatomy
    sites = {s.host: s for s in anatomy.sites.values() if s.kind == "linear" and not s.part}
    at_sites, elsewhere = [], []
    for update in updates:
        site = None if update.parameter else sites.get(update.path)
        if site is None:
            elsewhere.append(update)
            continue
        if initialization:
            update = _with_available_rank(update, site.d_in, site.d_out)
        translation.problems += update.shape_problems(site.d_in, site.d_out)
        at_sites.append((site, update))
    _add_biases(updates, rest, finder, translation)
    if not translation.problems:
        _add_methods(files.config, initialization, translation, at_sites)
        rest = WeightFolder(initialization, rows, rest, finder, translation).fold(elsewhere)
    return rest


def _add_biases(
    updates: list[Update], rest: dict[str, Tensor], finder: ModuleFinder, translation: Translation
) -> None:
    """Add the biases of `lora_bias` to those of their modules: y = W x + b + s (B A x + b_B)."""
    for update in updates:
        if (added := update.tensors.get(BIAS)) is None:
            continue
        own = read_bias(finder.modules[update.path])
        name = f"{update.file_path}.bias"
        bias = rest.get(f"{update.file_path}.base_layer.bias", own)
        if own is None or bias is None or not own.shape == bias.shape == added.shape:
            shape = "none" if own is None else f"one of shape {tuple(own.shape)}"
            translation.problems.append(
                f"{name}: lora_bias adds a bias {tuple(added.shape)}, this module has {shape}"
            )
            continue
        rest.pop(f"{update.file_path}.base_layer.bias", None)
        rest[name] = bias.detach().float().cpu() + update.scale * added


def _with_available_rank(update: Update, d_in: int, d_out: int) -> Update:
    """Lower the rank to the number of components of a weight, (d_out, d_in), at the same scale."""
    rank = min(update.rank, d_in, d_out)
    if rank == update.rank:
        return update
    return replace(update, rank=rank, alpha=update.scale * rank)


def _add_methods(
    config: Mapping[str, Any],
    initialization: str,
    translation: Translation,
    updates: list[tuple[Site, Update]],
) -> None:
    """Add one method for each alpha, with the tensors at its sites."""
    method = PiSSA if initialization else DoRA if config["use_dora"] else LoRA
    if config["use_rslora"] and method is LoRA:
        method = RsLoRA
    # Of our methods only RsLoRA divides alpha by the root of the rank.
    convert = config["use_rslora"] and method is not RsLoRA
    by_alpha: dict[float, list[tuple[Site, Update]]] = {}
    for site, update in updates:
        alpha = update.scale * update.rank if convert else update.alpha
        by_alpha.setdefault(alpha, []).append((site, update))
    for alpha, group in by_alpha.items():
        options: dict[str, Any] = {
            **size_options("rank", {site.id: update.rank for site, update in group}),
            "alpha": float(alpha),
            "dropout": float(config["lora_dropout"]),
            "sites": sites_option(translation.anatomy, [site for site, _ in group]),
        }
        if initialization:
            options["iterations"] = 0
        translation.methods.append({method.name: options})
        for site, update in group:
            tensors = _method_tensors(translation.anatomy, site, update, initialization)
            for name, tensor in tensors.items():
                translation.tensors[f"{site.id}.{method.name}.{name}"] = tensor


def _method_tensors(
    anatomy: Anatomy, site: Site, update: Update, initialization: str
) -> dict[str, Tensor]:
    """Rename the tensors of an update, and recompute a subtracted part of W."""
    tensors = {"A": update.tensors["A"], "B": update.tensors["B"]}
    if "magnitude_vector" in update.tensors:
        tensors["magnitude"] = update.tensors["magnitude_vector"]
    if initialization:
        host = anatomy.model.get_submodule(site.host)
        weight = read_weight(host).detach()
        left, right = subtracted_factors(initialization, host, weight, update.rank, update.scale)
        tensors |= {"A0": right.contiguous(), "B0": left.contiguous()}
    return tensors
