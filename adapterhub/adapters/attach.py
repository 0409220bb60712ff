"""Attach adapters to a backbone and detach them.

The backbone stays the user's own object: same class, same `forward`, same state-dict keys. All its
parameters are frozen while an adapter is attached; only what the adapter declares is trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attachable import required_model
from adapterhub.adapters.build import build_adapter
from adapterhub.adapters.compatibility import check_backbone, check_size, check_values
from adapterhub.adapters.foundations import frozen_adapters
from adapterhub.adapters.model_methods import STRUCTURE_LOCK
from adapterhub.adapters.state import ModelState, bare, get_state
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.pooling import check_pooling, chosen_pooling
from adapterhub.backbones.quantized_layers import check_gradients
from adapterhub.backbones.token_embedding import checkpoint_vocabulary_size, token_embedding
from adapterhub.backbones.tokenizer import (
    TokenizerSnapshot,
    snapshot_of,
    tokenizer_snapshot,
)
from adapterhub.errors import AttachError, did_you_mean
from adapterhub.files.manifest import UNNAMED, Manifest
from adapterhub.files.native import Saved, adapter_folder, find_adapter
from adapterhub.hooks.head import default_pooling
from adapterhub.methods.common.base import METHODS, Method, TrainedSource
from adapterhub.methods.common.projections import PartialSitesError
from adapterhub.methods.common.spec import Spec, restore_methods, with_options

_Trained = tuple[Manifest, Mapping[str, Tensor]]


def attach(
    model: nn.Module,
    method: Spec,
    *,
    name: str | None = None,
    head: Sequence[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    pooling: str | None = None,
    on: Sequence[str] = (),
    partial: bool = False,
    **options: Any,
) -> Adapter:
    """Attach a new adapter to a model, and make it the active one.

    Initial values are drawn from torch's global generator.

    Args:
        model: the backbone, of transformers or any other module; other adapters may be attached.
        method: a spec (`"lora"`, `"lora(rank=16)"`, a mapping), a method object such as
            `adapterhub.LoRA(rank=16)`, or a list of these.
        name: the adapter's name; without one "default", and of further ones "default-2", ...
        head: the paths of the modules that are the head, trained and saved as a whole; of a model
            of transformers, it is known.
        tokenizer: the tokenizer, unless `load_backbone` loaded it with the model. Tokens that were
            added to it get rows of the embedding that belong to the adapter and train with it.
        pooling: what the task head reads of each text: the state of the first token (cls) or of the
            last one (last), their mean or max, or "model" for the choice of the model's class. By
            default that of `load_backbone`, else "model".
        on: names of adapters that were loaded with `load(..., frozen=True)`: they are active below
            the new one, in this order, whenever it is active, and are saved with it.
        partial: adapt only the layers that have the method's default sites, where it is refused
            because some lack them; the adapter's method names the sites.
        options: options of the method, if it is one and given by name: `rank=16`.

    Raises:
        ConfigError: an unknown method, option or pooling, or options beside several methods.
        SiteError: the backbone lacks a site that the method names; if the method does not fit at
            all, the error lists methods that do.
        AttachError: the name is taken, the model is no module, is compiled, or shares modules with
            another one with adapters, nothing would train, no gradient passes through
            quantized layers, or an adapter that the method is built from, or that it shall be on,
            is missing.
    """
    model, methods = required_model(model), with_options(method, options)
    built_from_others = any(method.sources() for method in methods)
    pooling = chosen_pooling(model) if pooling is None else check_pooling(pooling)
    build = build_from_sources if built_from_others else build_adapter
    with STRUCTURE_LOCK, bare(model, head) as state:
        snapshot = snapshot_for(model, tokenizer)
        how = pooling or default_pooling(state.anatomy)
        below = frozen_adapters(state.adapters, on)
        if partial:
            methods = with_found_sites(methods, state.anatomy)
        name = free_name(UNNAMED, state.adapters) if name is None else name
        adapter = build(state, methods, name, tokenizer=snapshot, pooling=how)
        adapter.on = below
        if adapter.placed or adapter.changed:  # a head alone needs no gradient of the backbone
            check_gradients(model)
        state.add(adapter)
    return adapter


def free_name(name: str, taken: Collection[str]) -> str:
    """Return a name, or the first of NAME-2, NAME-3 and so on that is not taken."""
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


def detach(model: nn.Module, name: str | None = None) -> None:
    """Detach one adapter, or all: bytes, keys, modules and `requires_grad` are as before.

    With the last adapter that uses them, tokens and chat templates that adapters brought are
    removed from the tokenizer. Tokens stay if the user has added others behind them, whose ids
    would change.

    Raises:
        AttachError: no adapter of that name is attached.
    """
    state = get_state(model)
    state.detach(*([name] if name is not None else state.adapters))


def snapshot_for(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> TokenizerSnapshot | None:
    """Return the snapshot of a model's tokenizer; attaching an adapter records it.

    `tokenizer` is given if `load_backbone` did not load it; its tokens beyond the checkpoint's
    embedding are new.
    """
    if tokenizer is None:
        return tokenizer_snapshot(model)
    size, embedding = checkpoint_vocabulary_size(model), token_embedding(model)
    limits = [size] if size is not None else [len(embedding)] if embedding is not None else []
    ids = len(tokenizer) if isinstance(tokenizer, PreTrainedTokenizerBase) else 0
    return snapshot_of(model, tokenizer, min([ids, *limits]))


def with_found_sites(methods: Sequence[Method], anatomy: Anatomy) -> tuple[Method, ...]:
    """Return methods that name the sites that were found, where some layers have none.

    Else such a method is refused: half of a model adapted is rarely what is meant. Files say what
    the adapter adapts, since its options name the sites.

    Returns:
        The methods; in place of a composition of which a part is such a method, its parts, if
        these can be written in a file on their own.
    """
    found: list[Method] = []
    for method in methods:
        parts = method.parts()
        named = tuple(_with_found(part, anatomy) for part in parts)
        whole = named == parts or any(METHODS.get(p.name) is not type(p) for p in named)
        found += [method] if whole else named
    return tuple(found)


def _with_found(method: Any, anatomy: Anatomy) -> Method:
    try:
        method.count(anatomy)
    except PartialSitesError as error:
        return replace(method, sites=error.found)  # type: ignore[no-any-return]
    return method  # type: ignore[no-any-return]


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
    saved = {
        n: _read_saved(adapter_folder(Path(n)), state) for n in names if n not in state.adapters
    }
    _refuse_foundations(names, state.adapters, saved)
    complete: list[Method] = []
    initial: dict[str, Tensor] = {}
    for method in methods:
        sources = [_trained_source(source, state.adapters, saved) for source in method.sources()]
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


def _read_saved(folder: Path, state: ModelState) -> _Trained:
    """Read an adapter of this backbone."""
    saved = Saved.at(folder)
    check_backbone(saved.manifest, state)
    check_size(saved.manifest, (), state)
    return saved.read()


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
    names: Sequence[str], attached: Mapping[str, Adapter], saved: Mapping[str, _Trained]
) -> None:
    """Refuse sources that get the outputs of adapters below them, which a copy would not."""
    on = [n for n in names if (attached[n].on if n in attached else saved[n][0].on)]
    if on:
        raise AttachError(
            "adapters that are on top of others cannot be copied into a new one",
            offenders=[repr(name) for name in on],
            expected="adapters of the bare backbone",
        )


def _trained_source(
    name: str, attached: Mapping[str, Adapter], saved: Mapping[str, _Trained]
) -> TrainedSource:
    if name in attached:
        adapter = attached[name]
        methods = tuple(method.inference_form() for method in adapter.methods)
        return TrainedSource(name, methods, adapter.saved_tensors())
    manifest, tensors = saved[name]
    methods = restore_methods(manifest.methods, f"the adapter {manifest.name!r}")
    return TrainedSource(manifest.name, methods, tensors)
