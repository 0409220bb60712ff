"""Put adapters on a backbone, take them off, choose which are active.

The backbone stays the user's own object: same class, same `forward`, same state-dict keys. All of
its parameters are frozen while an adapter is on it; what trains is what the adapter declares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.activate import activate_per_row
from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.build import build_adapter, check_adapter
from adapterhub.adapters.fusion_sources import resolve_sources
from adapterhub.adapters.state import (
    _STATE,
    Attachments,
    _fresh_state,
    attachments,
    refuse_in_route,
    state_of,
)
from adapterhub.backbones.quantized_training import prepare_quantized
from adapterhub.backbones.token_embedding import checkpoint_vocabulary_size, token_embedding
from adapterhub.backbones.tokenizer import remember_tokenizer, tokenizer_snapshot
from adapterhub.backbones.weights import is_sharded
from adapterhub.errors import AttachError
from adapterhub.files.manifest import NewToken, name_problems
from adapterhub.hooks.composition import Node
from adapterhub.hooks.new_tokens import tokens_of
from adapterhub.methods._base import Method
from adapterhub.methods._spec import Spec, parse_methods


def attach(
    model: PreTrainedModel,
    method: Spec,
    *,
    name: str = "default",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Adapter:
    """Put a new adapter on a model, and make it the active one.

    `method` is a spec (`"lora"`, `"lora(rank=16)"`, a mapping), a method object, or a list of
    these. Initial values are drawn from torch's global generator.

    Tokens that were added to the `tokenizer` get rows of the embedding that belong to the adapter
    and train with it. `load_backbone` remembers its tokenizer; that of another model is given here.

    Raises:
        ConfigError: an unknown method or option.
        SiteError: the backbone lacks a site that the method names; if the method does not fit at
            all, the error names those that do.
        AttachError: the name is taken, the model is compiled, nothing would train, or an adapter
            that the method is built of is not there.
    """
    if tokenizer is not None:
        bind_new(model, tokenizer)
    state = attachments(model)
    methods, fill = resolve_sources(parse_methods(method), state.adapters if state else {})
    return place(model, methods, name, prepare=fill)


def bind_new(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[NewToken] = ()
) -> None:
    """Remember a tokenizer that `load_backbone` did not make: what the checkpoint has no rows for,
    and `tokens`, is new."""
    known, table = checkpoint_vocabulary_size(model), token_embedding(model)
    limits = [known] if known is not None else [len(table)] if table is not None else []
    remember_tokenizer(
        model, tokenizer, min([len(tokenizer), *limits, *(token.id for token in tokens)])
    )


def place(
    model: PreTrainedModel,
    methods: Sequence[Method],
    name: str,
    prepare: Callable[[Adapter], None] = lambda adapter: None,
    tokens: tuple[NewToken, ...] | None = None,
    admit: Callable[[Attachments], None] = lambda state: None,
) -> Adapter:
    """`attach` for parsed methods. `admit` may refuse the model before anything is built; `prepare`
    may fill the adapter, or refuse it, before it touches the model. Without `tokens`, those that
    are new to the model's tokenizer."""
    _refuse_wrapped(model)
    state = attachments(model) or _fresh_state(model)
    refuse_in_route(state)
    if wrong := name_problems(name):  # said now, and not when training is over and it is saved
        raise AttachError(
            "an adapter cannot be called so",
            offenders=wrong,
            expected="any name of 1 to 200 printable characters that is no path out of a folder",
        )
    if name in state.adapters:
        raise AttachError(
            f"an adapter called {name!r} is on this model already",
            hint=f"attach(..., name=...), or detach(model, {name!r}) first",
        )
    before = state.rows
    activate_per_row(state, ((),))
    try:
        admit(state)
        new = tokens_of(tokenizer_snapshot(model)) if tokens is None else tokens
        adapter = build_adapter(state, state.anatomy, tuple(methods), name, new, next(state.serial))
        prepare(adapter)
        check_adapter(adapter)
    except BaseException:
        activate_per_row(state, before)
        raise
    _commit(state, adapter)
    return adapter


def _refuse_wrapped(model: PreTrainedModel) -> None:
    compiled = isinstance(model, torch._dynamo.OptimizedModule) or any(
        m._compiled_call_impl is not None for m in model.modules()
    )
    if compiled:
        raise AttachError(
            "the model is compiled: hooks added now would silently be ignored",
            hint="attach first, then torch.compile(model)",
        )
    if any(map(is_sharded, model.parameters())):
        raise AttachError(
            "the model is sharded: what is added now would differ between the processes",
            hint="attach first, then fully_shard(model)",
        )


def detach(model: PreTrainedModel, name: str | None = None) -> None:
    """Take an adapter off, or all of them: bytes, keys, modules and `requires_grad` are as before.

    Raises:
        AttachError: no adapter of that name is on the model.
    """
    state = state_of(model)
    if name is None:
        refuse_in_route(state)
        activate_per_row(state, ((),))
    for each in [name] if name is not None else list(state.adapters):
        state.detach(each)


def reattach(state: Attachments, adapters: Sequence[Adapter], rows: Sequence[Node]) -> None:
    """Put adapters back on the bare model that they were on, active as these rows say."""
    state.trainable = [(p, p.requires_grad) for p in state.model.parameters()]
    for adapter in adapters:
        _commit(state, adapter)
    activate_per_row(state, rows)


def _commit(state: Attachments, adapter: Adapter) -> None:
    setattr(state.model, _STATE, state)
    state.held += prepare_quantized(state.model)
    for parameter, _ in state.trainable:
        parameter.requires_grad_(False)
    state.adapters[adapter.name] = adapter
    adapter.inject()
    state.sync_attention()
    activate_per_row(state, (adapter.name,))
