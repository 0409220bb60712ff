"""Put a saved adapter on a backbone: all of it or nothing, and only on the backbone that it was
made for."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.activate import activate_per_row
from adapterhub.adapters.adapter import LISTING, Adapter, AdapterMetadata
from adapterhub.adapters.attach import bind_new, place
from adapterhub.adapters.fusion_sources import check_backbone
from adapterhub.adapters.parts import HEAD, AdapterHead
from adapterhub.adapters.state import Attachments, attachments
from adapterhub.anatomy.build import anatomy_of
from adapterhub.backbones.tokenizer import TokenizerSnapshot, tokenizer_snapshot
from adapterhub.errors import MismatchError
from adapterhub.files.manifest import BackboneRef, Manifest, TaskHead, TensorInfo
from adapterhub.files.native import read_manifest, read_tensors
from adapterhub.hooks.new_tokens import add_new_tokens
from adapterhub.interchange.formats import Format, detect
from adapterhub.interchange.imported import ImportedAdapter
from adapterhub.methods._base import Method
from adapterhub.methods._ops import skip_init
from adapterhub.methods._spec import parse_methods, restore_methods

SMALL = 1 << 22  # numbers; 16 MiB of fp32


def load_folder(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    name: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    any_backbone: bool = False,
    any_tokenizer: bool = False,
    allow_pickle: bool = False,
    head: bool = True,
) -> Adapter:
    """Put the adapter of a folder on a model, with its head and labels, and make it the active one.

    `name` replaces the name that it was saved under. `tokenizer` is the model's, where
    `load_backbone` did not make both: it gets the adapter's new tokens and chat template (detaching
    puts the old template back). `any_backbone` skips the check of the fingerprint, `any_tokenizer`
    that of the tokenizer: the adapter was trained with others, and what it computes is up to you.
    Without `head` the task head of the folder is left out, and the model keeps its own.

    A folder of another library is imported: it knows its backbone by name alone. `allow_pickle`
    opens its tensors where they are in a pickle, without running code.

    Raises:
        FileError: the files are broken. MismatchError: the files are sound, but for another
            backbone or tokenizer; every tensor that does not fit is listed. AttachError: the name
            is taken.
    """
    folder = Path(folder)
    if form := detect(folder):
        foreign = _read(form, folder, model, allow_pickle, head)
        return load_imported(model, foreign, name=name, any_backbone=any_backbone)
    manifest = read_manifest(folder)
    if tokenizer is not None:
        bind_new(model, tokenizer, manifest.tokens)
    known = tokenizer_snapshot(model)
    if known and not any_tokenizer:
        _check_tokenizer(manifest, known)
    adapter = _build_and_load(model, folder, manifest, name, any_backbone=any_backbone, head=head)
    if known and manifest.chat_template:
        adapter.set_template(known.tokenizer, manifest.chat_template)
    return adapter


def _build_and_load(
    model: PreTrainedModel,
    folder: Path,
    manifest: Manifest,
    name: str | None,
    *,
    any_backbone: bool,
    head: bool,
) -> Adapter:
    """Build the adapter of a manifest and fill it from its folder, before it touches the model."""
    methods = restore_methods(manifest.methods, f"the adapter {manifest.name!r}")
    wanted = manifest if head else _headless(manifest)

    def admit(state: Attachments) -> None:
        if not any_backbone:
            check_backbone(manifest, model, state.fingerprint())
        _check_size(manifest, methods, state)

    def fill(adapter: Adapter) -> None:
        _fit_head(wanted, adapter)
        _check_fit(wanted, adapter)
        tensors = read_tensors(folder, manifest)
        _copy({name: tensors[name] for name in wanted.tensors}, adapter)
        adapter.notes = _notes(manifest)
        if known := tokenizer_snapshot(model):
            add_new_tokens(known, manifest.tokens)

    with skip_init():
        return place(model, methods, name or manifest.name, fill, manifest.tokens, admit=admit)


def _headless(manifest: Manifest) -> Manifest:
    rest = {n: t for n, t in manifest.tensors.items() if not n.startswith(f"{HEAD}.")}
    return replace(manifest, head=None, labels=(), tensors=rest)


def load_imported(
    model: PreTrainedModel,
    foreign: ImportedAdapter,
    *,
    name: str | None = None,
    any_backbone: bool = False,
) -> Adapter:
    """Put a translated adapter on the model that it was translated for.

    Raises:
        MismatchError: it names another backbone (unless `any_backbone`), or does not fit.
    """
    manifest = _manifest_of(foreign, model.config.model_type)
    notes = [*foreign.notes, *([] if any_backbone else _check_name(foreign, model))]
    for note in notes:
        warnings.warn(note, stacklevel=3)

    def fill(adapter: Adapter) -> None:
        _fit_head(manifest, adapter)
        _check_fit(manifest, adapter)
        _copy(foreign.tensors, adapter)
        adapter.notes = AdapterMetadata(foreign.task, training={"imported": foreign.format})

    with skip_init():
        return place(model, parse_methods(manifest.methods), name or foreign.name, fill)


def _manifest_of(foreign: ImportedAdapter, model_type: str) -> Manifest:
    kind = "single_label_classification" if foreign.labels else "regression"
    return Manifest(
        name=foreign.name,
        methods=tuple({n: dict(o) for n, o in spec.items()} for spec in foreign.methods),
        backbone=BackboneRef(foreign.backbone or "", foreign.revision, "", model_type),
        task=foreign.task,
        labels=foreign.labels,
        head=TaskHead(foreign.task, kind) if foreign.head else None,
        tensors={n: TensorInfo("F32", tuple(t.shape)) for n, t in foreign.tensors.items()},
    )


def _read(
    form: Format, folder: Path, model: PreTrainedModel, allow_pickle: bool, head: bool
) -> ImportedAdapter:
    """Translate for the bare backbone: other adapters may hold parameters of theirs in it."""
    state = attachments(model)
    if state is None:
        return form.read(folder, anatomy_of(model), allow_pickle=allow_pickle, head=head)
    before = state.rows
    activate_per_row(state, ((),))
    try:
        return form.read(folder, state.anatomy, allow_pickle=allow_pickle, head=head)
    finally:
        activate_per_row(state, before)


def _check_name(foreign: ImportedAdapter, model: PreTrainedModel) -> list[str]:
    """Compare the backbone's name and commit, all that another library keeps; what could not be
    compared is noted."""
    wanted, found = foreign.backbone, model.config._name_or_path
    if not wanted or not found:
        return ["the files or the model do not name their backbone: it was not checked"]
    if Path(wanted).is_absolute() or wanted.startswith(".") or wanted.count("/") > 1:
        return [f"the files name a folder as their backbone ({wanted}): it was not checked"]
    if Path(found).exists() and not Path(wanted).exists():
        return [f"the backbone is the folder {found}, the files name {wanted}: it was not checked"]
    commits = {foreign.revision, getattr(model.config, "_commit_hash", None)}
    one_commit = len(commits) == 1 or not all(
        re.fullmatch("[0-9a-f]{40}", c or "") for c in commits
    )
    if wanted == found and one_commit:
        return []
    at = f" at {foreign.revision}" if foreign.revision else ""
    raise MismatchError(
        f"the adapter {foreign.name!r} was trained on another backbone",
        offenders=[f"this model: {found}"],
        expected=f"{wanted}{at}",
        hint=f"load_backbone({wanted!r}), or load(..., any_backbone=True)",
    )


def _notes(manifest: Manifest) -> AdapterMetadata:
    return AdapterMetadata(
        manifest.task,
        manifest.tokenizer,
        manifest.chat_template,
        dict(manifest.training),
        dict(manifest.metrics),
        listing={name: getattr(manifest, name) for name in LISTING},
    )


def _check_tokenizer(manifest: Manifest, known: TokenizerSnapshot) -> None:
    found = known.identity()
    if manifest.tokenizer not in (None, found):
        raise MismatchError(
            f"the adapter {manifest.name!r} was trained with another tokenizer",
            offenders=[f"this tokenizer: {known.tokenizer.name_or_path}, {found}"],
            expected=f"that of {manifest.backbone.id}, {manifest.tokenizer}",
            hint=f"load_backbone({manifest.backbone.id!r}), or load(..., any_tokenizer=True)",
        )


def _check_size(manifest: Manifest, methods: Sequence[Method], state: Attachments) -> None:
    """Refuse methods that would take far more memory than the file has numbers, before they do.

    What is smaller is built, so that the error can list each tensor that does not fit.
    """
    declared = sum(math.prod(info.shape) for info in manifest.tensors.values())
    needed = sum(method.count(state.anatomy) for method in methods)
    if needed > 4 * declared + SMALL:
        raise MismatchError(
            f"the adapter {manifest.name!r} does not fit this model",
            offenders=[f"its methods have {needed} numbers on this model, its file {declared}"],
            expected="a file with the tensors that its methods have",
        )


def _fit_head(manifest: Manifest, adapter: Adapter) -> None:
    """Give the adapter a head of the saved size and its labels."""
    saved = manifest.head
    if saved is None:
        adapter.head = None
    elif adapter.head is None:
        raise MismatchError(
            f"the adapter {manifest.name!r} has a task head, the model has none",
            hint=f"load_backbone({manifest.backbone.id!r}, task={saved.kind!r}, "
            f"labels={list(manifest.labels)!r})",
        )
    else:
        old, outputs = adapter.model.config.num_labels or 0, len(manifest.labels) or 1
        heads = adapter.head.own.items()
        fits = [_resize(m, f"{HEAD}.{n}", manifest.tensors, old, outputs) for n, m in heads]
        if outputs != old and not any(fits):
            raise MismatchError(
                f"the adapter {manifest.name!r} does not fit this model",
                offenders=[f"{outputs} label(s), and no head of so many outputs in its file"],
                expected="one output a label",
            )
        _set_labels(adapter.head, manifest, saved.problem_type)


def _resize(
    head: nn.Module, prefix: str, tensors: Mapping[str, TensorInfo], old: int, outputs: int
) -> bool:
    """Replace the output layer of a head, the one of `old` rows, by one of the saved number of
    rows; whether there was one to replace."""
    resized = False
    for path, module in head.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            saved = tensors.get(".".join(p for p in (prefix, path, name) if p))
            fits = saved is not None and saved.shape == (outputs, *parameter.shape[1:])
            if fits and parameter.shape[0] == old != outputs:
                setattr(module, name, nn.Parameter(torch.empty(saved.shape, dtype=parameter.dtype)))  # type: ignore[union-attr]
                resized = True
                if isinstance(module, nn.Linear):
                    module.out_features = outputs
    return resized


def _set_labels(head: AdapterHead, manifest: Manifest, problem_type: str | None) -> None:
    labels = manifest.labels or ("LABEL_0",)
    head.labels = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": problem_type if manifest.labels else "regression",
    }


def _check_fit(manifest: Manifest, adapter: Adapter) -> None:
    own, tensors = adapter.tensors(), manifest.tensors
    wrong = [f"missing: {name}" for name in sorted(own.keys() - tensors.keys())]
    wrong += [f"unexpected: {name}" for name in sorted(tensors.keys() - own.keys())]
    wrong += [
        f"{name}: shape {tensors[name].shape}, the backbone needs {tuple(own[name].shape)}"
        for name in sorted(own.keys() & tensors.keys())
        if tuple(own[name].shape) != tensors[name].shape
    ]
    if wrong:
        raise MismatchError(
            f"the adapter {adapter.name!r} does not fit this model", offenders=wrong
        )


def _copy(tensors: Mapping[str, Tensor], adapter: Adapter) -> None:
    with torch.no_grad():
        for name, tensor in adapter.tensors().items():
            tensor.copy_(tensors[name])
