"""Attach adapters to a backbone and detach them.

The backbone stays the user's own object: same class, same `forward`, same state-dict keys. All its
parameters are frozen while an adapter is attached; only what the adapter declares is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attachable import require_model
from adapterhub.adapters.build import build_adapter
from adapterhub.adapters.foundations import frozen_adapters
from adapterhub.adapters.fusion_sources import build_from_sources
from adapterhub.adapters.passes import STRUCTURE_LOCK
from adapterhub.adapters.state import bare, get_state
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.pooling import check_pooling, chosen_pooling
from adapterhub.backbones.quantized_layers import check_gradients
from adapterhub.backbones.token_embedding import checkpoint_vocabulary_size, token_embedding
from adapterhub.backbones.tokenizer import (
    TokenizerSnapshot,
    snapshot_of,
    tokenizer_snapshot,
)
from adapterhub.hooks.pooling import default_pooling
from adapterhub.methods._base import METHODS, Method
from adapterhub.methods._sites import PartialSitesError
from adapterhub.methods._spec import Spec, with_options


def attach(
    model: PreTrainedModel,
    method: Spec,
    *,
    name: str = "default",
    tokenizer: PreTrainedTokenizerBase | None = None,
    pooling: str | None = None,
    on: Sequence[str] = (),
    partial: bool = False,
    **options: Any,
) -> Adapter:
    """Attach a new adapter to a model, and make it the active one.

    Initial values are drawn from torch's global generator.

    Args:
        model: the backbone; other adapters may be attached.
        method: a spec (`"lora"`, `"lora(rank=16)"`, a mapping), a method object such as
            `adapterhub.LoRA(rank=16)`, or a list of these.
        name: the adapter's name.
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
        AttachError: the name is taken, the model is not one of transformers, is compiled, or shares
            modules with another one with adapters, nothing would train, no gradient passes through
            quantized layers, or an adapter that the method is built from, or that it shall be on,
            is missing.
    """
    require_model(model)
    methods = with_options(method, options)
    built_from_others = any(method.sources() for method in methods)
    pooling = chosen_pooling(model) if pooling is None else check_pooling(pooling)
    build = build_from_sources if built_from_others else build_adapter
    with STRUCTURE_LOCK, bare(model) as state:
        snapshot = snapshot_for(model, tokenizer)
        how = pooling or default_pooling(state.anatomy)
        below = frozen_adapters(state.adapters, on)
        if partial:
            methods = with_found_sites(methods, state.anatomy)
        adapter = build(state, methods, name, tokenizer=snapshot, pooling=how)
        adapter.on = below
        if adapter.placed or adapter.changed:  # a head alone needs no gradient of the backbone
            check_gradients(model)
        state.add(adapter)
    return adapter


def detach(model: PreTrainedModel, name: str | None = None) -> None:
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

    Args:
        model: the backbone.
        tokenizer: its tokenizer, if `load_backbone` did not load it; tokens beyond the checkpoint's
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

    Args:
        methods: parsed methods.
        anatomy: the anatomy of the backbone.

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
