"""Attach adapters to a backbone and detach them.

The backbone stays the user's own object: same class, same `forward`, same state-dict keys. All its
parameters are frozen while an adapter is attached; only what the adapter declares is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attachable import require_model
from adapterhub.adapters.build import build_adapter
from adapterhub.adapters.fusion_sources import build_from_sources
from adapterhub.adapters.state import bare, get_state, refuse_in_route
from adapterhub.backbones.token_embedding import checkpoint_vocabulary_size, token_embedding
from adapterhub.backbones.tokenizer import remember_tokenizer
from adapterhub.files.manifest import NewToken
from adapterhub.methods._spec import Spec, parse_methods


def attach(
    model: PreTrainedModel,
    method: Spec,
    *,
    name: str = "default",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Adapter:
    """Attach a new adapter to a model, and make it the active one.

    Initial values are drawn from torch's global generator.

    Args:
        model: the backbone; other adapters may be attached.
        method: a spec (`"lora"`, `"lora(rank=16)"`, a mapping), a method object, or a list.
        name: the adapter's name.
        tokenizer: the tokenizer, unless `load_backbone` loaded it with the model. Tokens that were
            added to it get rows of the embedding that belong to the adapter and train with it.

    Raises:
        ConfigError: an unknown method or option.
        SiteError: the backbone lacks a site that the method names; if the method does not fit at
            all, the error lists methods that do.
        AttachError: the name is taken, the model is not one of transformers, is compiled, or shares
            modules with another one with adapters, nothing would train, or an adapter that the
            method is built from is missing.
    """
    require_model(model)
    if tokenizer is not None:
        remember_added_tokens(model, tokenizer)
    methods = parse_methods(method)
    built_from_others = any(method.sources() for method in methods)
    build = build_from_sources if built_from_others else build_adapter
    with bare(model) as state:
        adapter = build(state, methods, name)
        state.add(adapter)
    return adapter


def detach(model: PreTrainedModel, name: str | None = None) -> None:
    """Detach one adapter, or all: bytes, keys, modules and `requires_grad` are as before.

    Raises:
        AttachError: no adapter of that name is attached.
    """
    state = get_state(model)
    if name is None:
        refuse_in_route(state)
        state.activate(())
    for each in [name] if name is not None else list(state.adapters):
        state.detach(each)


def remember_added_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[NewToken] = ()
) -> None:
    """Remember a tokenizer that `load_backbone` did not load, and which of its tokens are new.

    Args:
        model: the backbone.
        tokenizer: its tokenizer; tokens beyond the checkpoint's embedding are new.
        tokens: further new tokens, of an adapter's manifest.
    """
    size, embedding = checkpoint_vocabulary_size(model), token_embedding(model)
    limits = [size] if size is not None else [len(embedding)] if embedding is not None else []
    first_new = min([len(tokenizer), *limits, *(token.id for token in tokens)])
    remember_tokenizer(model, tokenizer, first_new)
