"""Adapters that are built from other trained adapters (AdapterFusion)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.build import build_adapter
from adapterhub.adapters.compatibility import check_backbone, check_size, check_values
from adapterhub.adapters.state import ModelState
from adapterhub.backbones.tokenizer import TokenizerSnapshot
from adapterhub.errors import AttachError, did_you_mean
from adapterhub.files.manifest import Manifest
from adapterhub.files.native import adapter_folder, find_adapter, read_manifest, read_tensors
from adapterhub.methods._base import Method, TrainedSource
from adapterhub.methods._spec import restore_methods

Saved = tuple[Manifest, Mapping[str, Tensor]]


def build_from_sources(
    state: ModelState,
    methods: Sequence[Method],
    name: str,
    tokenizer: TokenizerSnapshot | None = None,
    pooling: str | None = None,
) -> Adapter:
    """Build an adapter that copies in the trained adapters which its methods name.

    A source is an attached adapter or a folder.

    Raises:
        AttachError: a source that is neither attached nor a folder with an adapter.
        FileError: the files of a source are broken.
        MismatchError: a source was trained on a different backbone.
    """
    names = [source for method in methods for source in method.sources()]
    _refuse_missing(names, state.adapters)
    saved = {n: _read(adapter_folder(Path(n)), state) for n in names if n not in state.adapters}
    _refuse_foundations(names, state.adapters, saved)
    complete: list[Method] = []
    initial: dict[str, Tensor] = {}
    for method in methods:
        sources = [_source(source, state.adapters, saved) for source in method.sources()]
        built, tensors = method.built_from(sources) if sources else (method, {})
        complete.append(built)
        initial |= tensors
    adapter = build_adapter(state, complete, name, tokenizer=tokenizer, pooling=pooling)
    check_values(initial, adapter)
    own = adapter.tensors()
    with torch.no_grad():
        for tensor_name, tensor in initial.items():
            own[tensor_name].copy_(tensor)
    return adapter


def _read(folder: Path, state: ModelState) -> Saved:
    """Read an adapter of this backbone."""
    manifest = read_manifest(folder)
    check_backbone(manifest, state)
    check_size(manifest, (), state)
    return manifest, read_tensors(folder, manifest)


def _refuse_missing(names: Sequence[str], attached: Mapping[str, Adapter]) -> None:
    missing = [name for name in names if not (name in attached or find_adapter(Path(name)))]
    if missing:
        raise AttachError(
            "no such adapter is attached, nor saved in a folder",
            offenders=[f"{name!r}{did_you_mean(name, attached)}" for name in missing],
            expected=f"one of {', '.join(map(repr, attached))}, or a folder" if attached else "",
            hint="ah.load(model, FOLDER, name=...) first, or give the folder",
        )


def _refuse_foundations(
    names: Sequence[str], attached: Mapping[str, Adapter], saved: Mapping[str, Saved]
) -> None:
    """Refuse sources that get the outputs of adapters below them, which a copy would not."""
    on = [n for n in names if (attached[n].on if n in attached else saved[n][0].on)]
    if on:
        raise AttachError(
            "adapters that are on top of others cannot be copied into a new one",
            offenders=[repr(name) for name in on],
            expected="adapters of the bare backbone",
        )


def _source(
    name: str, attached: Mapping[str, Adapter], saved: Mapping[str, Saved]
) -> TrainedSource:
    if name in attached:
        adapter = attached[name]
        methods = tuple(method.inference_form() for method in adapter.methods)
        return TrainedSource(name, methods, adapter.saved_tensors())
    manifest, tensors = saved[name]
    methods = restore_methods(manifest.methods, f"the adapter {manifest.name!r}")
    return TrainedSource(manifest.name, methods, tensors)
