"""Import of peft checkpoints, translated for a backbone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapterhub.anatomy.sites import Anatomy
from adapterhub.interchange.peft.adaption_prompt import import_adaption_prompt
from adapterhub.interchange.peft.files import (
    TASK_TYPES,
    PeftFiles,
    read_config,
    read_peft,
    tensor_shapes,
)
from adapterhub.interchange.peft.ia3 import import_peft_ia3
from adapterhub.interchange.peft.low_rank_importer import import_peft_low_rank
from adapterhub.interchange.peft.plain import PLAIN, import_plain
from adapterhub.interchange.peft.prompts import import_peft_prefix, import_peft_prompt
from adapterhub.interchange.peft.targets import ModuleFinder, ends_with
from adapterhub.interchange.translation import CheckpointInfo, ImportedAdapter, Translation

_WRAPPED = re.compile(r"\.(modules_to_save|base_layer|ln_tuning_layers)(?=\.)")
_NAMED_COPY = re.compile(r"\.modules_to_save\.[^.]+(?=\.)")  # with the adapter's name, as with bias
_SUFFIXES = "|".join(re.escape(s) for row in PLAIN.values() for s in row.tensors.values())
_TUNED = re.compile(
    rf"(.+)\.(?:lora_(?:embedding_)?[AB]|ia3_l|ln_tuning_layers|{_SUFFIXES})(?:\..+)?"
)
_REPLACED = ".original_module"
_WEIGHT = ".weight"


def import_peft(
    folder: Path, anatomy: Anatomy, *, allow_pickle: bool = False, head: bool = True
) -> ImportedAdapter:
    """Import the peft checkpoint in a folder for a backbone.

    Raises:
        FileError: the files are damaged, or have options that are not supported.
        MismatchError: the checkpoint does not fit the backbone; lists everything that does not.
    """
    files = read_peft(folder, allow_pickle=allow_pickle, most=anatomy.most_bytes())
    if not head:
        files = _without_missing_heads(files, anatomy)
    imported = from_peft(files, anatomy, folder.name)
    if head:
        return imported
    tensors = {name: t for name, t in imported.tensors.items() if not name.startswith("head.")}
    return replace(imported, head=False, labels=(), tensors=tensors)


def _without_missing_heads(files: PeftFiles, anatomy: Anatomy) -> PeftFiles:
    """Remove the tensors of heads that the model does not have."""
    finder, saved = ModuleFinder(anatomy, files.config), files.config["modules_to_save"] or ()

    def is_missing_head(name: str) -> bool:
        return name.partition(".")[0] in saved and _module_of(name, finder) is None

    tensors = {name: t for name, t in files.tensors.items() if not is_missing_head(name)}
    return replace(files, tensors=tensors)


def peft_checkpoint_info(folder: Path) -> CheckpointInfo:
    """Read the records of a checkpoint about its backbone and its head."""
    config = read_config(folder)
    saved = tuple(config["modules_to_save"] or ())
    heads = [
        shape[0]
        for name, shape in tensor_shapes(folder).items()
        if len(shape) == 2 and ends_with(_outermost_module(name), saved)
    ]
    return CheckpointInfo(
        backbone=config["base_model_name_or_path"] or None,
        revision=config["revision"] or None,
        task=_task(config),
        outputs=min(heads, default=0),
    )


def _task(config: Mapping[str, Any]) -> str | None:
    """Return the kind of model that a checkpoint was trained on, if recorded."""
    return next((t for t, name in TASK_TYPES.items() if name == config["task_type"]), None)


def _outermost_module(name: str) -> str:
    """Return the first component of a tensor's name below peft's wrappers and the model."""
    return next((p for p in name.split(".") if p not in ("base_model", "model")), "")


def from_peft(files: PeftFiles, anatomy: Anatomy, name: str = "default") -> ImportedAdapter:
    """Translate a peft checkpoint for a backbone.

    A name that is not printable becomes "default".

    Raises:
        MismatchError: the checkpoint does not fit the backbone; lists everything that does not.
    """
    translation, finder = Translation(anatomy), ModuleFinder(anatomy, files.config)
    files = spread_tied_weights(files, finder)
    rest = _IMPORTERS[files.kind](files, finder, translation)
    _import_parameters(rest, finder, translation)
    if "target_modules" in files.config:
        _check_targets(files, finder, translation)
    translation.finalize()
    translation.raise_problems(f"the peft checkpoint {name!r}")
    if finder.renamed:
        translation.notes.append(f"{len(finder.renamed)} modules have another path in this model")
    return ImportedAdapter(
        format="peft",
        name=name if name.isprintable() and name.strip() == name != "" else "default",
        methods=tuple(translation.methods),
        tensors=translation.tensors,
        head=translation.head,
        labels=translation.labels,
        # With a head, use the model's task: peft has one task type for all classifiers.
        task=None if translation.head else _task(files.config),
        backbone=files.config["base_model_name_or_path"] or None,
        revision=files.config["revision"] or None,
        notes=tuple(translation.notes),
    )


def _import_parameters(
    tensors: Mapping[str, Tensor], finder: ModuleFinder, translation: Translation
) -> None:
    """Import whole parameters: biases, norms, heads and other modules that were saved."""
    parameters = dict(translation.anatomy.model.named_parameters(remove_duplicate=False))
    for name, tensor in sorted(tensors.items()):
        module_path, parameter = _module_of(name, finder), name.rpartition(".")[2]
        if module_path is None:
            translation.problems.append(f"{name}: this backbone has no such module")
            continue
        value, path = tensor.to(torch.float32), f"{module_path}.{parameter}"
        if name.endswith(".base_layer.weight") and _equal(parameters.get(path), value):
            continue  # peft saves embeddings with their updates, whether changed or not
        if not _equal(translation.values.get(path, value), value):
            translation.problems.append(f"{name}: a second value of {path}")
        translation.values[path] = value


def _module_of(name: str, finder: ModuleFinder) -> str | None:
    """Return the path in the model of the module that a tensor belongs to; None if missing."""
    for unwrapped in (_WRAPPED.sub("", name), _NAMED_COPY.sub("", name)):
        if (path := finder.find(unwrapped.rpartition(".")[0])) is not None:
            return path
    return None


def _equal(parameter: Tensor | None, value: Tensor) -> bool:
    return parameter is not None and torch.equal(parameter.detach().float().cpu(), value)


def _check_targets(files: PeftFiles, finder: ModuleFinder, translation: Translation) -> None:
    """Check that the modules with tensors are those that `target_modules` matches."""
    tuned = {match[1] for name in files.tensors if (match := _TUNED.fullmatch(name))}
    # peft adapts a module at the first of its paths.
    modules = {m: path for path, m in reversed(finder.modules.items())}
    by_parameter = {
        path + ".base_layer" * depth: path
        for module, path in modules.items()
        for depth, _ in enumerate(finder.targets.parameters_at(path, module))
    }
    if files.kind in PLAIN and PLAIN[files.kind].without_tensors:
        return
    translation.problems += [
        f"{path}: has tensors, but target_modules does not match it"
        for path in sorted(tuned - by_parameter.keys() - finder.stored)
        # If the target is torch's attention, peft also adapts its output projection.
        if path.removesuffix(".base_layer.out_proj") not in finder.targets
        and not _is_tied_target(path, files, finder)
    ]
    translation.problems += [
        f"{by_parameter[path]}: target_parameters matches it, but it has no tensors"
        for path in sorted(by_parameter.keys() - tuned)
        if not finder.renamed
    ]
    if not finder.renamed:
        translation.problems += [
            f"{path}: target_modules matches it, but it has no tensors"
            for module, path in modules.items()
            if path not in tuned
            and not finder.stored
            and getattr(module, "weight", None) is not None
            and path in finder.targets
        ]


def _is_tied_target(path: str, files: PeftFiles, finder: ModuleFinder) -> bool:
    """Return whether peft adapts a module only because an adapted embedding is tied to it."""
    tied = finder.tied(finder.find(path) or "") if files.config.get("ensure_weight_tying") else ()
    return any(other in finder.targets for other in tied)


def _import_whole_modules(
    files: PeftFiles, finder: ModuleFinder, translation: Translation
) -> dict[str, Tensor]:
    """Check that modules that were trained whole (LN_TUNING) have all of their parameters."""
    names = {_WRAPPED.sub("", name) for name in files.tensors}
    for path in sorted({name.rpartition(".")[0] for name in names}):
        module = finder.modules.get(finder.find(path) or "")
        parameters = module.named_parameters(recurse=False) if module else ()
        missing = [f"{path}.{name}" for name, _ in parameters if f"{path}.{name}" not in names]
        translation.problems += [f"{name}: missing" for name in missing]
    return dict(files.tensors)


_IMPORTERS: Mapping[str, Callable[[PeftFiles, ModuleFinder, Translation], dict[str, Tensor]]] = {
    "LORA": import_peft_low_rank,
    "IA3": import_peft_ia3,
    "LN_TUNING": _import_whole_modules,
    "PROMPT_TUNING": import_peft_prompt,
    "P_TUNING": import_peft_prompt,
    "CPT": import_peft_prompt,
    "PREFIX_TUNING": import_peft_prefix,
    "CARTRIDGE": import_peft_prefix,
    "ADAPTION_PROMPT": import_adaption_prompt,
    **dict.fromkeys(PLAIN, import_plain),
}


def spread_tied_weights(files: PeftFiles, finder: ModuleFinder) -> PeftFiles:
    """Copy loaded weights to tied modules that lack a weight in the checkpoint.

    If tokens were added to a model, peft saves its embedding and its output layer unchanged:

        X.weight                  loaded into the module itself, unless X is a module to save
        X.original_module.weight  loaded into the module that the saved one replaces

    Returns:
        The checkpoint with those weights, and without replaced modules.
    """
    tensors = {name: t for name, t in files.tensors.items() if f"{_REPLACED}." not in name}
    for name, tensor in files.tensors.items():
        module, dot, parameter = name.rpartition(".")
        if f"{dot}{parameter}" != _WEIGHT or ".lora_" in name or not _is_in_place(module, files):
            continue
        path = finder.find(module.removesuffix(_REPLACED))
        for other in finder.tied(path or ""):
            _add(tensors, other, tensor)
    return replace(files, tensors=tensors)


def _is_in_place(module: str, files: PeftFiles) -> bool:
    if module.endswith(_REPLACED):
        return True
    saved = files.config["modules_to_save"] or ()
    return not any(module.endswith(name) for name in saved)


def _add(tensors: dict[str, Tensor], path: str, weight: Tensor) -> None:
    """Add the weight of a module, adapted or not, unless the checkpoint has one."""
    own = [name for name in tensors if name.startswith(f"{path}.")]
    layer = ".base_layer" if any(".lora_" in name for name in own) else ""
    if not any(name.endswith(_WEIGHT) and ".lora_" not in name for name in own):
        tensors[f"{path}{layer}{_WEIGHT}"] = weight
