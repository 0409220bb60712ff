"""Checkpoints of peft, translated for a backbone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy
from adapterhub.interchange.imported import CheckpointInfo, ImportedAdapter
from adapterhub.interchange.peft.files import (
    TASK_TYPES,
    PeftFiles,
    read_config,
    read_peft,
    tensor_shapes,
)
from adapterhub.interchange.peft.low_rank import import_peft_low_rank
from adapterhub.interchange.peft.prompts import import_peft_prefix, import_peft_prompt
from adapterhub.interchange.peft.targets import ModuleFinder, ends_with
from adapterhub.interchange.specs import sites_option
from adapterhub.interchange.translation import Translation
from adapterhub.methods.ia3 import IA3

_WRAPPED = re.compile(r"\.(modules_to_save|base_layer|ln_tuning_layers)(?=\.)")
_TUNED = re.compile(r"(.+)\.(?:lora_(?:embedding_)?[AB]|ia3_l|ln_tuning_layers)(?:\..+)?")
_SCALE = ".ia3_l"


def import_peft(
    folder: Path, anatomy: Anatomy, *, allow_pickle: bool = False, head: bool = True
) -> ImportedAdapter:
    """The checkpoint of peft in a folder, for a backbone; without `head` its task head is left out.

    Raises:
        FileError: the files are broken, or have options that are not known here.
        MismatchError: they do not fit the backbone; everything that does not is listed.
    """
    foreign = from_peft(read_peft(folder, allow_pickle=allow_pickle), anatomy, folder.name)
    if head:
        return foreign
    rest = {name: t for name, t in foreign.tensors.items() if not name.startswith("head.")}
    return replace(foreign, head=False, labels=(), tensors=rest)


def peft_checkpoint_info(folder: Path) -> CheckpointInfo:
    """What a checkpoint of peft says of its backbone and its head."""
    config = read_config(folder)
    task = next((t for t, name in TASK_TYPES.items() if name == config["task_type"]), None)
    shapes = tensor_shapes(folder)
    heads = [s[0] for n, s in shapes.items() if len(s) == 2 and ends_with(*_head_of(config, n))]
    return CheckpointInfo(
        backbone=config["base_model_name_or_path"] or None,
        revision=config["revision"] or None,
        task=task,
        outputs=min(heads, default=0),
    )


def _head_of(config: Mapping[str, Any], name: str) -> tuple[str, tuple[str, ...]]:
    """A tensor's outermost module below the model, and the modules that were saved whole."""
    parts = [p for p in name.split(".") if p not in ("base_model", "model")]
    return parts[0], tuple(config["modules_to_save"] or ())


def from_peft(files: PeftFiles, anatomy: Anatomy, name: str = "default") -> ImportedAdapter:
    """A checkpoint of peft in our terms."""
    draft, places = Translation(anatomy), ModuleFinder(anatomy, files.config)
    rest = _IMPORTERS[files.kind](files, places, draft)
    _take_parameters(rest, places, draft)
    if "target_modules" in files.config:
        _check_targets(files, places, draft)
    draft.finalize()
    draft.raise_problems(f"the checkpoint {name!r} of peft")
    if places.renamed:
        draft.notes.append(f"{len(places.renamed)} modules have another path in this model")
    return ImportedAdapter(
        format="peft",
        name=name if name.isprintable() and name.strip() == name != "" else "default",
        methods=tuple(draft.methods),
        tensors=draft.tensors,
        head=draft.head,
        labels=draft.labels,
        backbone=files.config["base_model_name_or_path"] or None,
        revision=files.config["revision"] or None,
        notes=tuple(draft.notes),
    )


def _take_parameters(rest: Mapping[str, Tensor], places: ModuleFinder, draft: Translation) -> None:
    """Whole parameters: biases, norms, heads and other modules that were trained and saved."""
    own = dict(draft.anatomy.model.named_parameters(remove_duplicate=False))
    for name, tensor in sorted(rest.items()):
        if ".original_module." in name:
            continue  # of the module that a saved one stands in for: nothing computes with it
        module, _, parameter = _WRAPPED.sub("", name).rpartition(".")
        path = places.find(module)
        if path is None:
            draft.problems.append(f"{name}: this backbone has no such module")
            continue
        value, path = tensor.to(torch.float32), f"{path}.{parameter}"
        if name.endswith(".base_layer.weight") and _equal(own.get(path), value):
            continue  # peft saves embeddings beside their updates, changed or not
        if not _equal(draft.values.get(path, value), value):
            draft.problems.append(f"{name}: a second value of {path}")
        draft.values[path] = value


def _equal(own: Tensor | None, value: Tensor) -> bool:
    return own is not None and torch.equal(own.detach().float().cpu(), value)


def _check_targets(files: PeftFiles, places: ModuleFinder, draft: Translation) -> None:
    """The modules with tensors must be those that the configuration names."""
    held = {match[1] for name in files.tensors if (match := _TUNED.fullmatch(name))}
    draft.problems += [
        f"{path}: has tensors, and target_modules does not name it"
        for path in sorted(held)
        if path not in places.targets
    ]
    if not places.renamed:
        draft.problems += [
            f"{path}: named by target_modules, and has no tensors"
            for path, module in places.modules.items()
            if path not in held
            and getattr(module, "weight", None) is not None
            and path in places.targets
        ]


def _import_scales(files: PeftFiles, places: ModuleFinder, draft: Translation) -> dict[str, Tensor]:
    sites = {s.host: s for s in draft.anatomy.sites.values() if s.kind == "linear" and not s.part}
    chosen, inputs = [], []
    for name in [n for n in files.tensors if n.endswith(_SCALE)]:
        there = name.removesuffix(_SCALE)
        path = places.find(there)
        site = sites.get(path or "")
        if site is None:
            draft.problems.append(
                f"{there}: {'no such module' if path is None else 'no site'} here"
            )
            continue
        at_input = places.targets.is_feedforward(there)
        scale = files.tensors[name].to(torch.float32)
        if scale.numel() != (site.d_in if at_input else site.d_out):
            draft.problems.append(f"{there}: shape {tuple(scale.shape)} does not fit {site.id}")
        chosen.append(site)
        inputs += [site] if at_input else []
        draft.tensors[f"{site.id}.{IA3.name}.scale"] = scale.flatten()
    if chosen:
        options = {
            "sites": sites_option(draft.anatomy, chosen),
            "inputs": sites_option(draft.anatomy, inputs) if inputs else [],
        }
        draft.methods.append({IA3.name: options})
    return {n: t for n, t in files.tensors.items() if not n.endswith(_SCALE)}


def _whole(files: PeftFiles, places: ModuleFinder, draft: Translation) -> dict[str, Tensor]:
    """Modules that were trained as they are: each with all of its parameters."""
    held = {_WRAPPED.sub("", name) for name in files.tensors}
    for path in sorted({name.rpartition(".")[0] for name in held}):
        module = places.modules.get(places.find(path) or "")
        own = module.named_parameters(recurse=False) if module else ()
        missing = [f"{path}.{name}" for name, _ in own if f"{path}.{name}" not in held]
        draft.problems += [f"{name}: missing" for name in missing]
    return dict(files.tensors)


_IMPORTERS: Mapping[str, Callable[[PeftFiles, ModuleFinder, Translation], dict[str, Tensor]]] = {
    "LORA": import_peft_low_rank,
    "IA3": _import_scales,
    "LN_TUNING": _whole,
    "PROMPT_TUNING": import_peft_prompt,
    "P_TUNING": import_peft_prompt,
    "PREFIX_TUNING": import_peft_prefix,
}
