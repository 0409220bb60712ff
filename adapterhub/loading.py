"""Put a saved adapter on a backbone: all of it or nothing, and only on the backbone that it was
made for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapter import HEAD, LISTING, Adapter, Head, Notes
from adapterhub.attachment import Attachments, bind_new, place
from adapterhub.backbones.tokenizer import Bound, bound
from adapterhub.errors import MismatchError
from adapterhub.files.manifest import Manifest, TensorInfo
from adapterhub.files.native import read_manifest, read_tensors
from adapterhub.methods.base import Method
from adapterhub.methods.spec import restore
from adapterhub.vocabulary import teach

SMALL = 1 << 22  # numbers; 16 MiB of fp32


def load(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    name: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    any_backbone: bool = False,
    any_tokenizer: bool = False,
) -> Adapter:
    """Put the adapter of a folder on a model, with its head and labels, and make it the active one.

    `name` replaces the name that it was saved under. `tokenizer` is the model's, where
    `load_backbone` did not make both: it gets the adapter's new tokens and chat template (detaching
    puts the old template back). `any_backbone` skips the check of the fingerprint, `any_tokenizer`
    that of the tokenizer: the adapter was trained with others, and what it computes is up to you.

    Raises:
        FileError: the files are broken. MismatchError: the files are sound, but for another
            backbone or tokenizer; every tensor that does not fit is listed. AttachError: the name
            is taken.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    methods = restore(manifest.methods, f"the adapter {manifest.name!r}")

    def admit(state: Attachments) -> None:
        if not any_backbone:
            _check_backbone(manifest, state)
        _check_size(manifest, methods, state)

    def fill(adapter: Adapter) -> None:
        _fit_head(manifest, adapter)
        _check_fit(manifest, adapter)
        _copy(read_tensors(folder, manifest), adapter)
        adapter.notes = _notes(manifest)
        if known := bound(model):
            teach(known, manifest.tokens)

    if tokenizer is not None:
        bind_new(model, tokenizer, manifest.tokens)
    known = bound(model)
    if known and not any_tokenizer:
        _check_tokenizer(manifest, known)
    with torch.random.fork_rng(
        devices=[]
    ):  # the initial values are overwritten: leave the generator alone
        adapter = place(model, methods, name or manifest.name, fill, manifest.tokens, admit=admit)
    if known and manifest.chat_template:
        adapter.set_template(known.tokenizer, manifest.chat_template)
    return adapter


def _notes(manifest: Manifest) -> Notes:
    return Notes(
        manifest.task,
        manifest.tokenizer,
        manifest.chat_template,
        dict(manifest.training),
        dict(manifest.metrics),
        listing={name: getattr(manifest, name) for name in LISTING},
    )


def _check_backbone(manifest: Manifest, state: Attachments) -> None:
    found, wanted = state.fingerprint(), manifest.backbone
    at = f" at {wanted.revision}" if wanted.revision else ""
    if found != wanted.fingerprint:
        raise MismatchError(
            f"the adapter {manifest.name!r} was trained on another backbone",
            offenders=[f"this model: {state.model.config._name_or_path}, {found}"],
            expected=f"{wanted.id}{at}, {wanted.fingerprint}",
            hint=f"load_backbone({wanted.id!r}), or load(..., any_backbone=True)",
        )


def _check_tokenizer(manifest: Manifest, known: Bound) -> None:
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


def _set_labels(head: Head, manifest: Manifest, problem_type: str | None) -> None:
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
