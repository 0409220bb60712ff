"""Methods that are built of trained adapters: find these, on the model or in folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.errors import AttachError, MismatchError, did_you_mean
from adapterhub.files.manifest import Manifest
from adapterhub.files.native import adapter_folder, find_adapter, read_adapter
from adapterhub.methods._base import Method, TrainedSource
from adapterhub.methods._spec import restore_methods

Fill = Callable[[Adapter], None]


def resolve_sources(
    methods: Sequence[Method], on_model: Mapping[str, Adapter]
) -> tuple[tuple[Method, ...], Fill]:
    """The methods with the adapters that they name in them, and what gives a new adapter of them
    the tensors that it takes over.

    Raises:
        AttachError: a name that is neither on the model nor a folder with an adapter.
        FileError: the files in a folder are broken.
    """
    names = [name for method in methods for name in method.sources()]
    if wrong := [name for name in names if not (name in on_model or find_adapter(Path(name)))]:
        raise AttachError(
            "no such adapter is on this model, nor in a folder",
            offenders=[f"{name!r}{did_you_mean(name, on_model)}" for name in wrong],
            expected=f"one of {', '.join(map(repr, on_model))}, or a folder" if on_model else "",
            hint="ah.load(model, FOLDER, name=...) first, or name the folder",
        )
    folders = {name: adapter_folder(Path(name)) for name in names if name not in on_model}
    read = {name: read_adapter(folder) for name, folder in folders.items()}
    built: list[Method] = []
    start: dict[str, Tensor] = {}
    for method in methods:
        sources = [_source(name, on_model, read) for name in method.sources()]
        whole, tensors = method.built_of(sources) if sources else (method, {})
        built.append(whole)
        start |= tensors

    def fill(adapter: Adapter) -> None:
        fingerprint = adapter.home.fingerprint() if read else ""
        for manifest, _ in read.values():
            check_backbone(manifest, adapter.model, fingerprint)
        own = adapter.tensors()
        with torch.no_grad():
            for name, tensor in start.items():
                own[name].copy_(tensor)

    return tuple(built), fill


def _source(
    name: str,
    on_model: Mapping[str, Adapter],
    read: Mapping[str, tuple[Manifest, Mapping[str, Tensor]]],
) -> TrainedSource:
    if name in on_model:
        adapter = on_model[name]
        return TrainedSource(
            name, tuple(m.inference_form() for m in adapter.methods), adapter.saved_tensors()
        )
    manifest, tensors = read[name]
    return TrainedSource(
        manifest.name, restore_methods(manifest.methods, f"the adapter {manifest.name!r}"), tensors
    )


def check_backbone(manifest: Manifest, model: PreTrainedModel, fingerprint: str) -> None:
    """Refuse files that were written for another backbone than that of a model, by its fingerprint.

    Raises:
        MismatchError: which one they are for.
    """
    wanted = manifest.backbone
    at = f" at {wanted.revision}" if wanted.revision else ""
    if fingerprint != wanted.fingerprint:
        raise MismatchError(
            f"the adapter {manifest.name!r} was trained on another backbone",
            offenders=[f"this model: {model.config._name_or_path}, {fingerprint}"],
            expected=f"{wanted.id}{at}, {wanted.fingerprint}",
            hint=f"load_backbone({wanted.id!r}), or load(..., any_backbone=True)",
        )
