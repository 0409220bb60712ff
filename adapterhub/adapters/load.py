"""Attach a saved adapter: all of it or nothing, and only to the backbone it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.adapter import PUBLICATION_FIELDS, Adapter, AdapterMetadata
from adapterhub.adapters.attach import snapshot_for
from adapterhub.adapters.build import build_adapter
from adapterhub.adapters.compatibility import (
    check_backbone,
    check_backbone_name,
    check_size,
    check_tensors,
    check_tokenizer,
    check_values,
    fit_head,
)
from adapterhub.adapters.parts import HEAD, HEADS
from adapterhub.adapters.passes import STRUCTURE_LOCK
from adapterhub.adapters.state import activated, bare, find_state
from adapterhub.anatomy.build import anatomy_of
from adapterhub.backbones.identity import remember_backbone
from adapterhub.backbones.task_models import MULTI_LABEL, REGRESSION
from adapterhub.errors import warn_user
from adapterhub.files.heads import name_in_file, with_head
from adapterhub.files.manifest import BackboneRef, Manifest, TaskHead, TensorInfo
from adapterhub.files.native import read_manifest, read_tensors
from adapterhub.interchange.formats import Format, detect
from adapterhub.interchange.imported_adapter import ImportedAdapter
from adapterhub.methods._skip_init import skip_init
from adapterhub.methods._spec import parse_methods, restore_methods


def load_folder(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    name: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    any_backbone: bool = False,
    any_tokenizer: bool = False,
    allow_pickle: bool = False,
    head: bool | str = True,
    sha256: str | None = None,
) -> Adapter:
    """Attach the adapter of a folder, with its head and labels, and make it the active one.

    The folder of another library is imported; such files record their backbone by name only.

    Args:
        model: the backbone that the adapter was trained on.
        folder: a folder of adapterhub, `peft` or `adapters`.
        name: replaces the name that the adapter was saved under.
        tokenizer: the model's, unless `load_backbone` loaded it; it gets new tokens and template.
        any_backbone: skip the check of the fingerprint.
        any_tokenizer: skip the check of the tokenizer.
        allow_pickle: read tensors of other libraries from a pickle, without running code.
        head: load the task head, or the one of this name of several; otherwise the model keeps its
            own.
        sha256: the digest of the manifest, if the files were verified before.

    Raises:
        ConfigError: the adapter has several heads and none is named, or it has not this one.
        FileError: the files are broken.
        MismatchError: the adapter is for another backbone or tokenizer, or tensors do not fit.
        AttachError: the name is taken.
    """
    folder = Path(folder)
    if sha256 is None and (form := detect(folder)):
        imported = _translate(form, folder, model, allow_pickle, bool(head))
        return load_imported(model, imported, name=name, any_backbone=any_backbone)
    manifest = read_manifest(folder, sha256)
    snapshot = snapshot_for(model, tokenizer)
    if snapshot and not any_tokenizer:
        check_tokenizer(manifest, snapshot)
    methods = restore_methods(manifest.methods, f"the adapter {manifest.name!r}")
    selected = _with_chosen_head(manifest, head)
    with STRUCTURE_LOCK, bare(model) as state, skip_init():
        if not any_backbone:
            check_backbone(manifest, state)
        check_size(manifest, methods, state)
        pooling = selected.head.pooling if selected.head else None
        adapter = build_adapter(
            state, methods, name or selected.name, manifest.tokens, snapshot, pooling
        )
        fit_head(selected, adapter)
        check_tensors(selected, adapter)
        _copy(_chosen_tensors(read_tensors(folder, manifest), selected, head), adapter)
        adapter.metadata, adapter.template = _metadata(selected), manifest.chat_template
        state.add(adapter)
    if not any_backbone:
        remember_backbone(model, manifest.backbone.id)
    return adapter


def load_imported(
    model: PreTrainedModel,
    imported: ImportedAdapter,
    *,
    name: str | None = None,
    any_backbone: bool = False,
) -> Adapter:
    """Attach an adapter that was translated from another library's format for this model.

    Args:
        model: the model.
        imported: the translated adapter.
        name: replaces the name in its files.
        any_backbone: skip the comparison of the backbone's name.

    Raises:
        MismatchError: its files name a different backbone, or its tensors do not fit.
    """
    manifest = _manifest_of(imported, model.config)
    unchecked = [] if any_backbone else check_backbone_name(imported, model)
    for note in (*imported.notes, *unchecked):
        warn_user(note, stacklevel=3)
    with STRUCTURE_LOCK, bare(model) as state, skip_init():
        methods = parse_methods(manifest.methods)
        # These files have no rows of new tokens, but may have whole embeddings.
        adapter = build_adapter(state, methods, name or imported.name, tokens=())
        fit_head(manifest, adapter)
        check_tensors(manifest, adapter)
        _copy(imported.tensors, adapter)
        adapter.metadata = AdapterMetadata(imported.task, training={"imported": imported.format})
        state.add(adapter)
    return adapter


def _translate(
    form: Format, folder: Path, model: PreTrainedModel, allow_pickle: bool, head: bool
) -> ImportedAdapter:
    """Translate for the bare backbone: active adapters may have parameters of theirs in it."""
    state = find_state(model)
    if state is None:
        return form.read(folder, anatomy_of(model), allow_pickle=allow_pickle, head=head)
    with STRUCTURE_LOCK, activated(state, ()):
        return form.read(folder, state.anatomy, allow_pickle=allow_pickle, head=head)


def _with_chosen_head(manifest: Manifest, head: bool | str) -> Manifest:
    """Return the manifest with the head to load, if there is one to load."""
    if head is False:
        return _without_head(manifest)
    return with_head(manifest, None if head is True else head)


def _chosen_tensors(
    tensors: Mapping[str, Tensor], selected: Manifest, head: bool | str
) -> dict[str, Tensor]:
    """Return the tensors to load under the names of an adapter with one head.

    Args:
        tensors: those of the file.
        selected: the manifest with the head to load.
        head: the head, as for `load_folder`.
    """
    chosen = head if isinstance(head, str) else None
    return {name: tensors[name_in_file(name, chosen)] for name in selected.tensors}


def _without_head(manifest: Manifest) -> Manifest:
    prefixes = (f"{HEAD}.", f"{HEADS}.")
    tensors = {n: t for n, t in manifest.tensors.items() if not n.startswith(prefixes)}
    return replace(manifest, head=None, heads={}, labels=(), tensors=tensors)


def _manifest_of(imported: ImportedAdapter, config: PreTrainedConfig) -> Manifest:
    problem_type = REGRESSION
    if imported.labels:  # other formats do not record whether a text has one label or several
        several = config.problem_type == MULTI_LABEL
        problem_type = MULTI_LABEL if several else "single_label_classification"
    return Manifest(
        name=imported.name,
        methods=tuple({n: dict(o) for n, o in spec.items()} for spec in imported.methods),
        backbone=BackboneRef(imported.backbone or "", imported.revision, "", config.model_type),
        task=imported.task,
        labels=imported.labels,
        head=TaskHead(imported.task, problem_type) if imported.head else None,
        tensors={n: TensorInfo("F32", tuple(t.shape)) for n, t in imported.tensors.items()},
    )


def _metadata(manifest: Manifest) -> AdapterMetadata:
    return AdapterMetadata(
        manifest.task,
        manifest.tokenizer,
        manifest.chat_template,
        dict(manifest.training),
        dict(manifest.metrics),
        publication={name: getattr(manifest, name) for name in PUBLICATION_FIELDS},
    )


def _copy(tensors: Mapping[str, Tensor], adapter: Adapter) -> None:
    check_values(tensors, adapter)
    with torch.no_grad():
        for name, tensor in adapter.tensors().items():
            tensor.copy_(tensors[name])
