"""Import of peft's low-rank updates.

peft adds y = W x + s B A x to each target, with s = alpha / rank or alpha / sqrt(rank), and DoRA's
magnitude if enabled. At a projection that is a site the update becomes a method of ours, one for
each alpha. At any other module (a pooler, an embedding, an output layer) it is folded into a whole
weight, which the adapter stores.

Initializations that subtract a part of W (PiSSA, OLoRA) save files for W - s B0 A0. Like peft, the
importer recomputes that part from W.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.backbones.weights import read_weight
from adapterhub.errors import SiteError
from adapterhub.interchange.method_options import sites_option, size_options
from adapterhub.interchange.peft.files import PeftFiles
from adapterhub.interchange.peft.targets import ModuleFinder
from adapterhub.interchange.translation import Translation
from adapterhub.methods.dora import DoRA
from adapterhub.methods.lora import LoRA
from adapterhub.methods.pissa import PiSSA, principal
from adapterhub.methods.rslora import RsLoRA

_KEY = re.compile(
    r"(?P<path>.+)\.lora_(?P<embedding>embedding_)?(?P<what>A|B|magnitude_vector)(?:\.weight)?"
)
_PLAIN = (True, False, None, "gaussian", "orthogonal", "eva")  # initializations that keep W


@dataclass
class Update:
    """The update of one module.

    `file_path` is the module's path in the checkpoint, `path` that in the model. `tensors` are
    A: (rank, d_in), B: (d_out, rank) and, with DoRA, magnitude_vector: (d_out,).
    """

    file_path: str
    path: str
    rank: int
    alpha: float
    scale: float
    tensors: dict[str, Tensor]


def import_peft_low_rank(
    files: PeftFiles, finder: ModuleFinder, translation: Translation
) -> dict[str, Tensor]:
    """Translate the low-rank updates of a checkpoint.

    Args:
        files: the checkpoint.
        finder: finds its modules in the model.
        translation: collects the result.

    Returns:
        The other tensors, and the weights that updates outside of sites are folded into.
    """
    by_path: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    for name, tensor in files.tensors.items():
        if match := _KEY.fullmatch(name):
            by_path.setdefault(match["path"], {})[match["what"]] = tensor.to(torch.float32)
        else:
            rest[name] = tensor
    found = (_update(files.config, p, t, finder, translation) for p, t in by_path.items())
    updates = [update for update in found if update is not None]
    anatomy = translation.anatomy
    sites = {s.host: s for s in anatomy.sites.values() if s.kind == "linear" and not s.part}
    at_sites = [(sites[u.path], u) for u in updates if u.path in sites]
    for site, update in at_sites:
        translation.problems += _shape_problems(update, site.d_in, site.d_out)
    if not translation.problems:
        _add_methods(files.config, translation, at_sites)
        for update in updates:
            if update.path not in sites:
                _fold(update, finder.modules[update.path], rest, translation)
    return rest


def _update(
    config: Mapping[str, Any],
    file_path: str,
    tensors: dict[str, Tensor],
    finder: ModuleFinder,
    translation: Translation,
) -> Update | None:
    """Collect the update of one module, or report why it cannot be used."""
    needed = {"A", "B"} | ({"magnitude_vector"} if config["use_dora"] else set())
    rank = finder.targets.value_at(config["rank_pattern"], file_path, config["r"])
    alpha = finder.targets.value_at(config["alpha_pattern"], file_path, config["lora_alpha"])
    path = finder.find(file_path)
    if path is None:
        translation.problems.append(f"{file_path}: this backbone has no such module")
    elif tensors.keys() != needed:
        wrong = [f"{n} missing" for n in sorted(needed - tensors.keys())]
        wrong += [f"{n} unexpected" for n in sorted(tensors.keys() - needed)]
        translation.problems.append(f"{file_path}: {', '.join(wrong)}")
    else:
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        return Update(file_path, path, rank, alpha, scale, tensors)
    return None


def _shape_problems(update: Update, d_in: int, d_out: int) -> list[str]:
    shapes = {"A": (update.rank, d_in), "B": (d_out, update.rank), "magnitude_vector": (d_out,)}
    return [
        f"{update.file_path}: {what} is {tuple(tensor.shape)}, here it must be {shapes[what]}"
        for what, tensor in sorted(update.tensors.items())
        if tuple(tensor.shape) != shapes[what]
    ]


def _add_methods(
    config: Mapping[str, Any], translation: Translation, updates: list[tuple[Site, Update]]
) -> None:
    """Add one method for each alpha, with the tensors at its sites."""
    initialization = _subtracted_initialization(config, translation)
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
        weight = read_weight(anatomy.model.get_submodule(site.host)).detach()
        left, right = _SUBTRACTED[initialization](weight, update.rank, update.scale)
        tensors |= {"A0": right.contiguous(), "B0": left.contiguous()}
    return tensors


def _subtracted_initialization(config: Mapping[str, Any], translation: Translation) -> str:
    """Return the decomposition whose leading part was subtracted from W, "" if none was."""
    init = config["init_lora_weights"]
    name = init.lower() if isinstance(init, str) else init
    if name in _PLAIN:
        return ""
    assert isinstance(name, str)
    decomposition, _, iterations = name.partition("_niter_")
    if config["use_dora"] or decomposition not in _SUBTRACTED:
        translation.problems.append(
            f"init_lora_weights: {init!r} changed weights that are not in the files"
        )
        return ""
    if iterations:
        translation.notes.append(
            f"init_lora_weights {init}: the randomized decomposition that was subtracted from the "
            "weights is not in the files; the exact one is used instead"
        )
    return decomposition


def _components(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    left, right = principal(weight, rank, 0)
    return left / scale**0.5, right / scale**0.5


def _orthonormal(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    q, r = torch.linalg.qr(weight)
    return q[:, :rank], r[:rank]


# The subtracted part s B0 A0 of W: (W, rank, s) -> B0: (d_out, rank), A0: (rank, d_in).
_SUBTRACTED = {"pissa": _components, "olora": _orthonormal}


def _fold(
    update: Update, module: nn.Module, rest: dict[str, Tensor], translation: Translation
) -> None:
    """Fold an update outside of the sites into a new value of the module's weight."""
    low, high = update.tensors["A"], update.tensors["B"]
    is_embedding = isinstance(module, nn.Embedding)
    try:
        weight = module.weight.detach().T.float() if is_embedding else read_weight(module).detach()  # type: ignore[operator]
    except SiteError as error:
        translation.problems.append(f"{update.file_path}: {error.problem}")
        return
    if problems := _shape_problems(update, weight.shape[1], weight.shape[0]):
        translation.problems += problems
        return
    folded = weight + update.scale * high @ low
    if (magnitude := update.tensors.get("magnitude_vector")) is not None:
        folded = folded * (magnitude / folded.norm(dim=1))[:, None]
    transposed = is_embedding or isinstance(module, Conv1D)
    rest.pop(f"{update.file_path}.base_layer.weight", None)  # the original weight
    rest[f"{update.file_path}.weight"] = (folded.T if transposed else folded).contiguous()
    translation.notes.append(
        f"{update.path} is not a site: its update is stored as a whole weight of "
        f"{folded.numel():,} values"
    )
