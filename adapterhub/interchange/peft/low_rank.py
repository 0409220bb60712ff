"""Low-rank updates of peft in our terms.

peft puts y = W x + s B A x beside each target, with s = alpha / rank or alpha / sqrt(rank), and
DoRA's magnitude where asked for. At a projection that is a site it becomes a method of ours, one
for each alpha. Anywhere else (a pooler, an embedding, an output layer) the update is folded into a
whole weight, that the adapter holds.

An initialization that takes a part off W (PiSSA, OLoRA) leaves files that mean W - s B0 A0. peft
finds that part again from W, and so does this.
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
from adapterhub.interchange.peft.files import PeftFiles
from adapterhub.interchange.peft.targets import ModuleFinder
from adapterhub.interchange.specs import ranks_options, sites_option
from adapterhub.interchange.translation import Translation
from adapterhub.methods.dora import DoRA
from adapterhub.methods.lora import LoRA
from adapterhub.methods.pissa import PiSSA, principal
from adapterhub.methods.rslora import RsLoRA

_KEY = re.compile(
    r"(?P<path>.+)\.lora_(?P<embedding>embedding_)?(?P<what>A|B|magnitude_vector)(?:\.weight)?"
)
_PLAIN = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass
class Update:
    """One module's update: A: (rank, d_in), B: (d_out, rank), magnitude: (d_out,) or None."""

    there: str  # the module's path in the checkpoint
    path: str  # and in this model
    rank: int
    alpha: float
    scale: float
    tensors: dict[str, Tensor]


def import_peft_low_rank(
    files: PeftFiles, places: ModuleFinder, draft: Translation
) -> dict[str, Tensor]:
    """Translate the updates into the draft; returns the tensors that are none."""
    found: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    for name, tensor in files.tensors.items():
        if match := _KEY.fullmatch(name):
            found.setdefault(match["path"], {})[match["what"]] = tensor.to(torch.float32)
        else:
            rest[name] = tensor
    updates = [
        u for path, t in found.items() if (u := _update(files.config, path, t, places, draft))
    ]
    sites = {s.host: s for s in draft.anatomy.sites.values() if s.kind == "linear" and not s.part}
    at_sites = [(sites[u.path], u) for u in updates if u.path in sites]
    for site, update in at_sites:
        draft.problems += _misfits(update, site.d_in, site.d_out)
    if not draft.problems:
        _as_methods(files.config, draft, at_sites)
        for update in updates:
            if update.path not in sites:
                _fold(update, places.modules[update.path], rest, draft)
    return rest


def _update(
    config: Mapping[str, Any],
    there: str,
    tensors: dict[str, Tensor],
    places: ModuleFinder,
    draft: Translation,
) -> Update | None:
    wanted = {"A", "B"} | ({"magnitude_vector"} if config["use_dora"] else set())
    rank = places.targets.value_at(config["rank_pattern"], there, config["r"])
    alpha = places.targets.value_at(config["alpha_pattern"], there, config["lora_alpha"])
    path = places.find(there)
    if path is None:
        draft.problems.append(f"{there}: this backbone has no such module")
    elif tensors.keys() != wanted:
        draft.problems.append(f"{there}: {', '.join(sorted(tensors.keys() ^ wanted))} amiss")
    else:
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        return Update(there, path, rank, alpha, scale, tensors)
    return None


def _misfits(update: Update, d_in: int, d_out: int) -> list[str]:
    wanted = {"A": (update.rank, d_in), "B": (d_out, update.rank), "magnitude_vector": (d_out,)}
    return [
        f"{update.there}: {what} is {tuple(tensor.shape)}, here it must be {wanted[what]}"
        for what, tensor in sorted(update.tensors.items())
        if tuple(tensor.shape) != wanted[what]
    ]


def _as_methods(
    config: Mapping[str, Any], draft: Translation, updates: list[tuple[Site, Update]]
) -> None:
    starts = _starts(config, draft)
    method = PiSSA if starts else DoRA if config["use_dora"] else LoRA
    if config["use_rslora"] and method is LoRA:
        method = RsLoRA
    own_scale = config["use_rslora"] and method is not RsLoRA  # theirs by the root of the rank
    by_alpha: dict[float, list[tuple[Site, Update]]] = {}
    for site, update in updates:
        alpha = update.scale * update.rank if own_scale else update.alpha
        by_alpha.setdefault(alpha, []).append((site, update))
    for alpha, group in by_alpha.items():
        options: dict[str, Any] = {
            **ranks_options({site.id: u.rank for site, u in group}),
            "alpha": float(alpha),
            "dropout": float(config["lora_dropout"]),
            "sites": sites_option(draft.anatomy, [site for site, _ in group]),
        }
        draft.methods.append({method.name: options | ({"iterations": 0} if starts else {})})
        for site, update in group:
            for what, tensor in _own_tensors(draft.anatomy, site, update, starts).items():
                draft.tensors[f"{site.id}.{method.name}.{what}"] = tensor


def _own_tensors(anatomy: Anatomy, site: Site, update: Update, starts: str) -> dict[str, Tensor]:
    tensors = {"A": update.tensors["A"], "B": update.tensors["B"]}
    if "magnitude_vector" in update.tensors:
        tensors["magnitude"] = update.tensors["magnitude_vector"]
    if starts:
        weight = read_weight(anatomy.model.get_submodule(site.host)).detach()
        left, right = _STARTS[starts](weight, update.rank, update.scale)
        tensors |= {"A0": right.contiguous(), "B0": left.contiguous()}
    return tensors


def _starts(config: Mapping[str, Any], draft: Translation) -> str:
    """The decomposition whose leading part was taken off W, "" if none was."""
    init = config["init_lora_weights"]
    name = init.lower() if isinstance(init, str) else init
    if name in _PLAIN:
        return ""
    assert isinstance(name, str)
    known, _, iterations = name.partition("_niter_")
    if config["use_dora"] or known not in _STARTS:
        draft.problems.append(f"init_lora_weights: {init!r} changed weights that the files lack")
        return ""
    if iterations:
        draft.notes.append(
            f"init_lora_weights {init}: the random decomposition that was taken off the weights is "
            "not in the files; the exact one stands in for it"
        )
    return known


def _components(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    left, right = principal(weight, rank, 0)
    return left / scale**0.5, right / scale**0.5


def _orthonormal(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    q, r = torch.linalg.qr(weight)
    return q[:, :rank], r[:rank]


# What took a part s B0 A0 off W: (W, rank, s) -> B0: (d_out, rank), A0: (rank, d_in).
_STARTS = {"pissa": _components, "olora": _orthonormal}


def _fold(update: Update, module: nn.Module, rest: dict[str, Tensor], draft: Translation) -> None:
    """Put an update outside the sites into the weight's own new value."""
    low, high = update.tensors["A"], update.tensors["B"]
    embedding = isinstance(module, nn.Embedding)
    try:
        weight = module.weight.detach().T.float() if embedding else read_weight(module).detach()  # type: ignore[operator]
    except SiteError as error:
        draft.problems.append(f"{update.there}: {error.problem}")
        return
    if wrong := _misfits(update, weight.shape[1], weight.shape[0]):
        draft.problems += wrong
        return
    whole = weight + update.scale * high @ low
    if (magnitude := update.tensors.get("magnitude_vector")) is not None:
        whole = whole * (magnitude / whole.norm(dim=1))[:, None]
    turned = embedding or isinstance(module, Conv1D)
    rest.pop(f"{update.there}.base_layer.weight", None)  # the weight as it was
    rest[f"{update.there}.weight"] = (whole.T if turned else whole).contiguous()
    draft.notes.append(
        f"{update.path} is no site: its update is kept as a whole weight of {whole.numel():,} "
        "numbers"
    )
