"""Attach a saved adapter completely or not at all, and only to the backbone it was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from adapterhub.adapters.activation import attached_foundation, freeze, frozen_part
from adapterhub.adapters.adapter import (
    PUBLICATION_FIELDS,
    Adapter,
    AdapterMetadata,
)
from adapterhub.adapters.attach import build_adapter, free_name, snapshot_for
from adapterhub.adapters.compatibility import (
    check_backbone,
    check_backbone_name,
    check_precision,
    check_processor,
    check_size,
    check_tensors,
    check_values,
    fit_head,
)
from adapterhub.adapters.model_methods import STRUCTURE_LOCK
from adapterhub.adapters.state import ModelState, activated, bare, find_state
from adapterhub.anatomy.backbone import Backbone
from adapterhub.anatomy.build import anatomy_of
from adapterhub.anatomy.family import Family
from adapterhub.anatomy.family_file import read_family, use_family
from adapterhub.backbones.find import remember_backbone
from adapterhub.backbones.processor import TokenizerSnapshot
from adapterhub.backbones.task_models import MULTI_LABEL, REGRESSION, TASK_MODELS
from adapterhub.errors import ConfigError, FileError, MismatchError, warn_user
from adapterhub.files.manifest import (
    FAMILY,
    HEAD_MODULES,
    BackboneRef,
    Manifest,
    TaskHead,
    name_in_file,
    only_head,
    with_head,
    without_heads,
)
from adapterhub.files.native import Foundation, Saved, check_foundations, tensor_info
from adapterhub.interchange.formats import Format, detect
from adapterhub.interchange.translation import ImportedAdapter
from adapterhub.methods.common.base import parse_methods, restore_methods
from adapterhub.methods.common.site_module import skip_init


def load_folder(
    model: nn.Module,
    source: str | Path | Saved,
    *,
    name: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    any_backbone: bool = False,
    any_tokenizer: bool = False,
    allow_pickle: bool = False,
    head: bool | str = True,
    modules: bool = True,
    foundation: Foundation | None = None,
) -> Adapter:
    """Attach a saved adapter, with its head and labels, and make it active.

    The folder of another library is imported; such files record their backbone by name only.

    `tokenizer` is the model's tokenizer, unless `load_backbone` loaded it; it gets the new tokens
    and the template. `allow_pickle` reads tensors of other libraries from a pickle, without running
    code. `head` loads the task head, or the named one of several; False keeps the model's own.
    Without `modules`, only the head is loaded. `foundation` loads the adapter frozen and without
    its head, for others to be on; it is the record of the adapter.

    Raises:
        ConfigError: the adapter has several heads and none is named, or it lacks the named one.
        FileError: the files are broken.
        MismatchError: the adapter is for another backbone or tokenizer, or tensors do not fit.
        AttachError: the name is taken.
    """
    backbone = Backbone.of(model)
    model = backbone.module
    if not isinstance(source, Saved) and (form := detect(Path(source))):
        imported = _translate(form, Path(source), model, allow_pickle, bool(head))
        return load_imported(model, imported, name=name, any_backbone=any_backbone)
    saved = Saved.at(source)
    manifest = saved.manifest
    check_foundations(saved)
    snapshot = snapshot_for(backbone, tokenizer)
    if not any_tokenizer:
        check_processor(manifest, model, snapshot)
    part = frozen_part(manifest) if foundation else _with_one_head(manifest, head, modules)
    checks = {"any_backbone": any_backbone, "any_tokenizer": any_tokenizer, "tokenizer": tokenizer}
    family, brought = adopted_family(model, manifest), _brought(model, saved.on, checks)
    with STRUCTURE_LOCK, family, brought as below, _bare(model, manifest) as state, skip_init():
        if not any_backbone:
            check_backbone(manifest, state)
        adapter = _built(state, part, name, snapshot, any_backbone)
        adapter.metadata = _metadata(manifest if foundation else part)
        if foundation:
            freeze(adapter, foundation)
        else:
            adapter.template = manifest.chat_template
        check_tensors(part, adapter)
        _copy(_tensors_of(part, saved.tensors(), head), adapter)
        adapter.on = below
        state.add(adapter)
    if not any_backbone:
        remember_backbone(adapter.backbone, manifest.backbone.id)
    return adapter


def _bare(model: nn.Module, manifest: Manifest) -> AbstractContextManager[ModelState]:
    """Prepare a model for the adapter of a manifest, which records the modules of its head."""
    return bare(model, _recorded_head(manifest) if Backbone.of(model).foreign else ())


def _with_one_head(manifest: Manifest, head: bool | str, modules: bool) -> Manifest:
    """Return the part of an adapter to load, with the selected head, if any."""
    if head is False:
        return without_heads(manifest)
    part = with_head(manifest, None if head is True else head)
    return part if modules else only_head(part)


def _tensors_of(
    part: Manifest, tensors: Mapping[str, Tensor], head: bool | str
) -> dict[str, Tensor]:
    """Return the tensors of a file by their names in an adapter with at most one head."""
    chosen = head if isinstance(head, str) else None
    return {name: tensors[name_in_file(name, chosen)] for name in part.tensors}


def _built(
    state: ModelState,
    part: Manifest,
    name: str | None,
    snapshot: TokenizerSnapshot | None,
    any_backbone: bool,
) -> Adapter:
    """Build an adapter that fits in size, without its values."""
    if name is None:
        name = free_name(part.name, state.adapters) if part.is_unnamed else part.name
    methods = restore_methods(part.methods, f"the adapter {part.name!r}")
    check_size(part, methods, state)
    pooling = part.head.pooling if part.head else None
    adapter = build_adapter(state, methods, name, part.tokens, snapshot, pooling)
    if not any_backbone:
        check_precision(part, adapter)
    fit_head(part, adapter)
    return adapter


@contextmanager
def adopted_family(model: nn.Module, manifest: Manifest) -> Iterator[None]:
    """Use an adapter's family row for a model without one; remove it on an error.

    Raises:
        FileError: the row is broken.
        MismatchError: the model has other sites: from another row, or since adapters are attached.
    """
    if Backbone.of(model).foreign:
        yield
        return
    row, state = _recorded_family(manifest), find_state(model)
    current = state.anatomy.family if state else Backbone.of(model).family
    if row and current and current != row:
        raise MismatchError(
            f"the adapter {manifest.name!r} was trained with another row of sites than this model "
            "has",
            hint="detach the other adapters, or load the backbone without `family`: the adapter "
            "has its row",
        )
    if not row or current:
        yield
        return
    use_family(Backbone.of(model).pretrained, row)
    try:
        yield
    except BaseException:
        Backbone.of(model).family = None
        raise


def _recorded_head(manifest: Manifest) -> tuple[str, ...]:
    """Return the recorded head modules of a module that is not of transformers.

    Raises:
        FileError: the record is not a list of names.
    """
    recorded = manifest.training.get(HEAD_MODULES, ())
    if not (isinstance(recorded, list | tuple) and all(isinstance(n, str) for n in recorded)):
        raise FileError(
            f"training.{HEAD_MODULES} of {manifest.name!r} cannot be used",
            expected="a list of paths of modules",
        )
    return tuple(recorded)


def _recorded_family(manifest: Manifest) -> Family | None:
    recorded = manifest.training.get(FAMILY)
    if not recorded:
        return None
    try:
        if not isinstance(recorded, Mapping):  # a string would be a file path
            raise ConfigError(f"training.{FAMILY} is a {type(recorded).__name__}")
        return read_family(recorded)
    except ConfigError as error:
        raise FileError(
            f"the family row of {manifest.name!r} cannot be used",
            offenders=[error.problem, *error.offenders],
            expected="the row that adapterhub recorded",
        ) from error


@contextmanager
def _brought(
    model: nn.Module, foundations: Sequence[Foundation], checks: Mapping[str, Any]
) -> Iterator[tuple[Adapter, ...]]:
    """Attach the adapters that another one was trained on, frozen; attached ones are shared.

    On an error inside, the newly attached adapters are detached.

    `checks` are arguments of `load_folder` for each of them.
    """
    if not foundations:
        yield ()
        return
    state = find_state(model)
    before = () if state is None else state.activation.compositions[0]
    names = () if state is None else tuple(state.adapters)
    try:
        yield tuple(bring_foundation(model, each, **checks) for each in foundations)
    except BaseException:
        if (state := find_state(model)) is not None:
            if new := [name for name in state.adapters if name not in names]:
                state.detach(*new)
            if state.adapters:
                state.activate(before)
        raise


def bring_foundation(model: nn.Module, foundation: Foundation, **checks: Any) -> Adapter:
    """Attach an adapter frozen, for others to be on; share it if it is already attached.

    It is detached with the last adapter that is on it.

    `checks` are arguments of `load_folder`: tokenizer, any_backbone, any_tokenizer.

    Raises:
        FileError: the adapter's files are broken.
        MismatchError: the adapter is for another backbone, or cannot be below others.
    """
    state = find_state(model)
    if state and (attached := attached_foundation(state.adapters, foundation)):
        return attached
    name = f"{foundation.ref.name}@{foundation.ref.digest[:8]}"
    adapter = load_folder(model, foundation.saved, name=name, foundation=foundation, **checks)
    adapter.brought = True
    return adapter


def load_imported(
    model: nn.Module,
    imported: ImportedAdapter,
    *,
    name: str | None = None,
    any_backbone: bool = False,
) -> Adapter:
    """Attach an adapter that was translated from another library's format for this model.

    Raises:
        MismatchError: the files name a different backbone, or the tensors do not fit.
    """
    manifest = _manifest_of(imported, Backbone.of(model))
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
    form: Format, folder: Path, model: nn.Module, allow_pickle: bool, head: bool
) -> ImportedAdapter:
    """Translate for the bare backbone, since active adapters may replace its parameters."""
    state = find_state(model)
    if state is None:
        return form.read(folder, anatomy_of(model), allow_pickle=allow_pickle, head=head)
    with STRUCTURE_LOCK, activated(state, ()):
        return form.read(folder, state.anatomy, allow_pickle=allow_pickle, head=head)


def _manifest_of(imported: ImportedAdapter, backbone: Backbone) -> Manifest:
    problem_type = REGRESSION
    if imported.labels:  # other formats do not record whether a text has one label or several
        recorded = TASK_MODELS.get(imported.task or "")
        several = MULTI_LABEL in (
            backbone.labels["problem_type"],
            recorded and recorded.problem_type,
        )
        problem_type = MULTI_LABEL if several else "single_label_classification"
    return Manifest(
        name=imported.name,
        methods=tuple({n: dict(o) for n, o in spec.items()} for spec in imported.methods),
        backbone=BackboneRef(imported.backbone or "", imported.revision, "", backbone.model_type),
        task=imported.task,
        labels=imported.labels,
        head=TaskHead(imported.task, problem_type, activation=imported.activation)
        if imported.head
        else None,
        tensors={n: tensor_info(t) for n, t in imported.tensors.items()},
    )


def _metadata(manifest: Manifest) -> AdapterMetadata:
    return AdapterMetadata(
        manifest.task,
        manifest.tokenizer,
        manifest.chat_template,
        dict(manifest.training),
        dict(manifest.metrics),
        publication={name: getattr(manifest, name) for name in PUBLICATION_FIELDS},
        processor=manifest.processor,
    )


def _copy(tensors: Mapping[str, Tensor], adapter: Adapter) -> None:
    check_values(tensors, adapter)
    with torch.no_grad():
        for name, tensor in adapter.tensors().items():
            tensor.copy_(tensors[name])
