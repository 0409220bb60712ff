"""Put a saved adapter on a backbone: all of it or nothing, and only on the backbone that it was
made for."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.adapter import HEAD, Adapter, Head, Notes
from adapterhub.attachment import activate, attachments, place
from adapterhub.backbones.families import anatomy_of
from adapterhub.errors import MismatchError
from adapterhub.files.foreign import Foreign
from adapterhub.files.manifest import BackboneRef, Manifest
from adapterhub.files.native import read_adapter
from adapterhub.interchange.formats import Format, detect
from adapterhub.methods.spec import Spec, parse


def load(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    name: str | None = None,
    any_backbone: bool = False,
    allow_pickle: bool = False,
    head: bool = True,
) -> Adapter:
    """Put the adapter of a folder on a model, with its head and labels, and make it the active one.

    `name` replaces the name that it was saved under. `any_backbone` skips the check of the
    fingerprint: the adapter was trained on other weights, and what it computes here is up to you.
    A folder of another library is imported: it knows its backbone by name alone. `allow_pickle`
    opens its tensors where they are in a pickle, without running code. Without `head` the task head
    of the folder is left out, and the model keeps its own.

    Raises:
        FileError: the files are broken. MismatchError: the files are sound, but for another
            backbone; every tensor that does not fit is listed. AttachError: the name is taken.
    """
    if form := detect(Path(folder)):
        foreign = _read(form, Path(folder), model, allow_pickle, head)
        return load_foreign(model, foreign, name=name, any_backbone=any_backbone)
    manifest, tensors = read_adapter(Path(folder))
    if not head:
        manifest = replace(manifest, head=False, labels=())
        tensors = {n: t for n, t in tensors.items() if not n.startswith(f"{HEAD}.")}

    def fill(adapter: Adapter) -> None:
        if not any_backbone:
            _check_backbone(manifest, adapter)
        _fit_head(manifest, tensors, adapter)
        _copy(tensors, adapter)
        adapter.notes = _notes(manifest)

    return _place(model, manifest.methods, name or manifest.name, fill)


def load_foreign(
    model: PreTrainedModel,
    foreign: Foreign,
    *,
    name: str | None = None,
    any_backbone: bool = False,
) -> Adapter:
    """Put a translated adapter on the model that it was translated for.

    Raises:
        MismatchError: it names another backbone (unless `any_backbone`), or does not fit.
    """
    backbone = BackboneRef(foreign.backbone or "", foreign.revision, "", model.config.model_type)
    manifest = Manifest(
        name=name or foreign.name,
        methods=tuple({n: dict(o) for n, o in spec.items()} for spec in foreign.methods),
        backbone=backbone,
        task=foreign.task,
        labels=foreign.labels,
        head=foreign.head,
    )
    notes = [*foreign.notes, *([] if any_backbone else _check_name(foreign, model))]
    for note in notes:
        warnings.warn(note, stacklevel=3)

    def fill(adapter: Adapter) -> None:
        _fit_head(manifest, foreign.tensors, adapter)
        _copy(foreign.tensors, adapter)
        adapter.notes = Notes(foreign.task, training={"imported": foreign.format})

    return _place(model, manifest.methods, manifest.name, fill)


def _place(
    model: PreTrainedModel, methods: Spec, name: str, fill: Callable[[Adapter], None]
) -> Adapter:
    # The initial values are overwritten: leave the generator alone.
    with torch.random.fork_rng(devices=[]):
        return place(model, parse(methods), name, prepare=fill)


def _read(
    form: Format, folder: Path, model: PreTrainedModel, allow_pickle: bool, head: bool
) -> Foreign:
    """Translate for the bare backbone: other adapters may hold parameters of theirs in it."""
    state = attachments(model)
    active = [a.name for a in state.adapters.values() if a.active] if state else []
    if state:
        activate(model)
    try:
        anatomy = state.anatomy if state else anatomy_of(model)
        return form.read(folder, anatomy, allow_pickle=allow_pickle, head=head)
    finally:
        if state:
            activate(model, *active)


def _check_name(foreign: Foreign, model: PreTrainedModel) -> list[str]:
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


def _notes(manifest: Manifest) -> Notes:
    return Notes(manifest.task, manifest.tokenizer, dict(manifest.training), dict(manifest.metrics))


def _check_backbone(manifest: Manifest, adapter: Adapter) -> None:
    found, wanted = adapter.manifest().backbone, manifest.backbone
    at = f" at {wanted.revision}" if wanted.revision else ""
    if found.fingerprint != wanted.fingerprint:
        raise MismatchError(
            f"the adapter {manifest.name!r} was trained on another backbone",
            offenders=[f"this model: {found.id}, {found.fingerprint}"],
            expected=f"{wanted.id}{at}, {wanted.fingerprint}",
            hint=f"load_backbone({wanted.id!r}), or load(..., any_backbone=True)",
        )


def _fit_head(manifest: Manifest, tensors: Mapping[str, Tensor], adapter: Adapter) -> None:
    """Give the adapter a head of the saved size and its labels."""
    if not manifest.head:
        adapter.head = None
    elif adapter.head is None:
        raise MismatchError(
            f"the adapter {manifest.name!r} has a task head, the model has none",
            hint=f"load_backbone({manifest.backbone.id!r}, task={manifest.task!r}, "
            f"labels={list(manifest.labels)!r})",
        )
    else:
        outputs = len(manifest.labels) or 1
        for child, module in adapter.head.own.items():
            _resize(
                module, f"{HEAD}.{child}", tensors, adapter.model.config.num_labels or 0, outputs
            )
        _set_labels(adapter.head, manifest)


def _resize(
    head: nn.Module, prefix: str, tensors: Mapping[str, Tensor], old: int, outputs: int
) -> None:
    """Replace the output layer of a head, the one of `old` rows, by one of the saved number of
    rows."""
    for path, module in head.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            saved = tensors.get(".".join(p for p in (prefix, path, name) if p))
            fits = saved is not None and saved.shape == (outputs, *parameter.shape[1:])
            if fits and parameter.shape[0] == old != outputs:
                setattr(module, name, nn.Parameter(torch.empty(saved.shape, dtype=parameter.dtype)))  # type: ignore[union-attr]
                if isinstance(module, nn.Linear):
                    module.out_features = outputs


def _set_labels(head: Head, manifest: Manifest) -> None:
    labels = manifest.labels or ("LABEL_0",)
    head.labels = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": "single_label_classification" if manifest.labels else "regression",
    }


def _copy(tensors: Mapping[str, Tensor], adapter: Adapter) -> None:
    own = adapter.tensors()
    wrong = [f"missing: {name}" for name in sorted(own.keys() - tensors.keys())]
    wrong += [f"unexpected: {name}" for name in sorted(tensors.keys() - own.keys())]
    wrong += [
        f"{name}: shape {tuple(tensors[name].shape)}, the backbone needs {tuple(own[name].shape)}"
        for name in sorted(own.keys() & tensors.keys())
        if own[name].shape != tensors[name].shape
    ]
    if wrong:
        raise MismatchError(
            f"the adapter {adapter.name!r} does not fit this model", offenders=wrong
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
