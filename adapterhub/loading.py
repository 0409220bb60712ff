"""Put a saved adapter on a backbone: all of it or nothing, and only on the backbone that it was
made for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.adapter import HEAD, Adapter, Head, Notes
from adapterhub.attachment import place
from adapterhub.errors import MismatchError
from adapterhub.files.manifest import Manifest
from adapterhub.files.native import read_adapter
from adapterhub.methods.spec import parse
from adapterhub.sources import check_backbone


def load(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    name: str | None = None,
    any_backbone: bool = False,
) -> Adapter:
    """Put the adapter of a folder on a model, with its head and labels, and make it the active one.

    `name` replaces the name that it was saved under. `any_backbone` skips the check of the
    fingerprint: the adapter was trained on other weights, and what it computes here is up to you.

    Raises:
        FileError: the files are broken. MismatchError: the files are sound, but for another
            backbone; every tensor that does not fit is listed. AttachError: the name is taken.
    """
    manifest, tensors = read_adapter(Path(folder))

    def fill(adapter: Adapter) -> None:
        if not any_backbone:
            check_backbone(manifest, adapter)
        _fit_head(manifest, tensors, adapter)
        _copy(tensors, adapter)
        adapter.notes = _notes(manifest)

    with torch.random.fork_rng(
        devices=[]
    ):  # the initial values are overwritten: leave the generator alone
        return place(model, parse(manifest.methods), name or manifest.name, prepare=fill)


def _notes(manifest: Manifest) -> Notes:
    return Notes(manifest.task, manifest.tokenizer, dict(manifest.training), dict(manifest.metrics))


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
