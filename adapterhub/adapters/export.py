"""A saved adapter in the format of peft, from its folder: its backbone's weights are not needed.

The backbone is made without weights, from its configuration, and the adapter put on it. Its weights
are loaded only where peft's files hold some of them: where an adapter trains a part of a module,
peft keeps the module whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from adapterhub.adapters.activate import activate
from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attach import place
from adapterhub.adapters.load import load_folder
from adapterhub.anatomy.build import anatomy_of
from adapterhub.backbones.load import load_backbone, meta_model
from adapterhub.backbones.newly_initialized import NEWLY_INITIALIZED
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.errors import AdapterhubError, BackboneError, ConfigError, unknown
from adapterhub.files.card import model_kind
from adapterhub.files.manifest import Manifest
from adapterhub.files.native import read_manifest, read_tensors
from adapterhub.files.run_folder import backbone_of_adapter
from adapterhub.interchange.peft.exporter import NEW_TOKENS, try_peft
from adapterhub.interchange.peft.files import PeftFiles
from adapterhub.interchange.peft.vllm import DEFAULT_RANK, vllm_problems
from adapterhub.methods._spec import Spec, parse_methods


@dataclass(frozen=True)
class InPeftsFormat:
    """An adapter as peft would have it: its files, or the problems that it has none. `kind` is the
    kind of model that it is for, if that could be told."""

    files: PeftFiles | None
    problems: tuple[str, ...]
    kind: str | None


def in_peft(folder: Path, backbone: str | None = None) -> InPeftsFormat:
    """The adapter of a folder as peft would have it; that it cannot have it is no error.

    `backbone` is where the adapter's backbone is, if not where its run or its manifest says.

    Raises:
        FileError: the folder holds no sound adapter.
        BackboneError: `backbone` is given, and is none.
    """
    manifest = read_manifest(folder)
    place, revision = backbone_of_adapter(folder, manifest, backbone)
    if place == manifest.backbone.id:
        revision = manifest.backbone.revision
    kind = model_kind(manifest)
    if manifest.tokens:
        return InPeftsFormat(None, (NEW_TOKENS,), kind)
    try:
        kind = kind or _kind_of_checkpoint(place, revision)
        options: dict[str, Any] = {"task": kind, "labels": manifest.labels, "revision": revision}
        found = _without_weights(meta_model(place, **options), folder, manifest)
        if found is None:
            found = _tried(load_folder(load_backbone(place, **options)[0], folder), manifest)
        files, problems = found
    except AdapterhubError as error:
        if isinstance(error, BackboneError) and backbone is not None:
            raise
        # What others will read names no folder of this machine.
        problem = " ".join(error.problem.replace(place, manifest.backbone.id).split())
        return InPeftsFormat(None, (problem,), kind)
    return InPeftsFormat(None if problems else files, tuple(problems), kind)


def _without_weights(
    model: PreTrainedModel, folder: Path, manifest: Manifest
) -> tuple[PeftFiles, Sequence[str]] | None:
    """What peft would have, or None if that takes weights of the backbone."""
    adapter = _on_skeleton(model, folder, manifest)
    try:
        files, problems = _tried(adapter, manifest)
    except RuntimeError:  # torch does not compute with weights that are not there
        return None
    weights = not problems and any(t.is_meta for t in files.tensors.values())
    return None if weights else (files, problems)


def _tried(adapter: Adapter, manifest: Manifest) -> tuple[PeftFiles, Sequence[str]]:
    known = manifest.backbone
    source = replace(adapter.source(), backbone=known.id, revision=known.revision)
    return try_peft(source)


def _kind_of_checkpoint(place: str, revision: str | None) -> str:
    """The kind of model that a checkpoint was made as; "features" where that is none of ours."""
    config = meta_model(place, revision=revision).config
    made = set(config.architectures or ())
    for kind, row in TASK_MODELS.items():
        found = row.classes_for(config)
        if not row.has_head and made & {cls.__name__ for cls in found}:
            return kind
    return "features"


def _on_skeleton(model: PreTrainedModel, folder: Path, manifest: Manifest) -> Adapter:
    """The adapter, with its numbers, on a backbone without any."""
    anatomy = anatomy_of(model)
    places = {path: anatomy.key(path).rpartition(".") for path in anatomy.parameters()}
    fresh = (
        path for path, (site, _, n) in places.items() if f"{site}.fresh.{n}" in manifest.tensors
    )
    setattr(model, NEWLY_INITIALIZED, frozenset(fresh))
    with torch.device("meta"):
        adapter = load_folder(model, folder, any_backbone=True, any_tokenizer=True)
    activate(model)
    held = [p.module for p in adapter.placed]
    held += adapter.head.own.values() if adapter.head else []
    for module in held:
        module.to_empty(device="cpu")
    for changed in adapter.changed:
        changed.kept = nn.Parameter(torch.empty_like(changed.kept, device="cpu"))
    numbers = read_tensors(folder, manifest)
    with torch.no_grad():
        for name, tensor in adapter.tensors().items():
            tensor.copy_(numbers[name])
    return adapter


TARGETS = ("peft", "vllm")


def blocking(
    model: PreTrainedModel, method: Spec, target: str, *, max_rank: int = DEFAULT_RANK
) -> list[str]:
    """Every feature of a method on a model that keeps `target` (peft or vllm) from taking it.

    The model may be without weights (`meta_model`). It is left as it was.

    Raises:
        ConfigError: an unknown target, method or option.
    """
    if target not in TARGETS:
        raise unknown("target library", target, TARGETS)
    methods = parse_methods(method)
    try:
        with torch.random.fork_rng(devices=[]), torch.device(model.device):
            adapter = place(model, methods, f"check for {target}")
    except ConfigError:
        raise
    except AdapterhubError as error:  # the method does not even fit the backbone
        return ["; ".join([error.problem, *error.offenders])]
    try:
        files, found = try_peft(adapter.source())
    finally:
        adapter.detach()
    return found + (vllm_problems(files, model, max_rank) if target == "vllm" else [])
