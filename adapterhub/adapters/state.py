"""What is attached to a model, and what the model was before."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.parts import has_prefix
from adapterhub.anatomy.build import anatomy_of
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.fingerprint import fingerprint_of
from adapterhub.backbones.identity import origin_of
from adapterhub.backbones.newly_initialized import newly_initialized
from adapterhub.backbones.quantized_training import restore_quantized
from adapterhub.backbones.token_embedding import checkpoint_vocabulary_size, token_embedding
from adapterhub.backbones.weights import packed_hosts
from adapterhub.errors import AttachError, did_you_mean
from adapterhub.hooks.attention import route_attention
from adapterhub.hooks.composition import Node, is_stack, names_in

_STATE = "_adapterhub"


@dataclass(eq=False)
class Attachments:
    """What is on one model: its adapters, and what the model was before the first of them."""

    model: PreTrainedModel
    anatomy: Anatomy
    trainable: list[tuple[nn.Parameter, bool]]
    adapters: dict[str, Adapter] = field(default_factory=dict)
    serial: Any = field(default_factory=itertools.count)
    rows: tuple[Node, ...] = ((),)
    routes: int = 0
    held: list[nn.Module] = field(default_factory=list)

    def detach(self, name: str) -> None:
        """Take one adapter off; with the last one the model is as it was."""
        known_names(self, [name])
        refuse_in_route(self)
        if name in {n for node in self.rows for n in names_in(node)} and not is_stack(self.rows):
            raise AttachError(
                f"{name!r} is a part of the active average",
                hint="activate(model) first: then no adapter is active",
            )
        adapter = self.adapters.pop(name)
        self.rows = (tuple(n for n in names_in(self.rows[0]) if n != name),)
        adapter.eject()
        self.sync_attention()
        if not self.adapters:
            for parameter, flag in self.trainable:
                parameter.requires_grad_(flag)
            restore_quantized(self.held)
            delattr(self.model, _STATE)

    def sync_attention(self) -> None:
        """Let attention know prefixes while one sits on the model, and only then."""
        route_attention(self.model, on=has_prefix(self.model))

    def originals(self) -> dict[int, nn.Parameter]:
        """The backbone's own parameters, by the id of that which an adapter has for it."""
        return {id(c.own): c.original for a in self.adapters.values() for c in a.changed}

    def fingerprint(self) -> str:
        """The identity of the backbone as it was before any adapter."""
        own = self.originals()
        fresh = newly_initialized(self.model)
        table, rows = token_embedding(self.model), checkpoint_vocabulary_size(self.model)
        named = (
            # Only the rows of the checkpoint: some may have been added since.
            (path, own.get(id(p), p)[: rows if p is table else None])
            for path, p in self.anatomy.parameters().items()
            if path not in fresh
        )
        codes = torch.empty(1, 1, device="meta")
        packed = ((f"{host}.weight", codes) for host in packed_hosts(self.anatomy))
        return fingerprint_of(itertools.chain(named, packed), origin_of(self.model))


def attachments(model: PreTrainedModel) -> Attachments | None:
    """What is on a model, or None."""
    return getattr(model, _STATE, None)


def backbone_fingerprint(model: PreTrainedModel) -> str:
    """The identity of a model's backbone, with or without adapters on it."""
    return (attachments(model) or _fresh_state(model)).fingerprint()


def _fresh_state(model: PreTrainedModel) -> Attachments:
    return Attachments(model, anatomy_of(model), [(p, p.requires_grad) for p in model.parameters()])


def known_names(state: Attachments, names: Iterable[str]) -> None:
    """Refuse names that are not on the model.

    Raises:
        AttachError: which are not, and which are.
    """
    wrong = [name for name in dict.fromkeys(names) if name not in state.adapters]
    if wrong:
        near = [f"{name!r}{did_you_mean(name, state.adapters)}" for name in wrong]
        raise AttachError(
            f"no adapter called {', '.join(near)} is on this model",
            expected=f"one of {', '.join(map(repr, state.adapters)) or 'none: the model is bare'}",
        )


def refuse_in_route(state: Attachments) -> None:
    """Refuse a change of adapters while a route is on.

    Raises:
        AttachError: a route is on.
    """
    if state.routes:
        raise AttachError(
            "a route is on: what is attached and active cannot change inside of it",
            hint="leave the `with route(...)` block first",
        )


def state_of(model: PreTrainedModel) -> Attachments:
    """What is on a model.

    Raises:
        AttachError: nothing is.
    """
    state = attachments(model)
    if state is None:
        raise AttachError("no adapter is on this model", hint='attach(model, "lora")')
    return state
