"""Put adapters on a backbone, take them off, choose which are active.

The backbone stays the user's own object: same class, same `forward`, same state-dict keys. All of
its parameters are frozen while an adapter is on it; what trains is what the adapter declares.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapterhub.adapter import Adapter
from adapterhub.attention import route_attention
from adapterhub.backbones.anatomy import Anatomy
from adapterhub.backbones.families import anatomy_of
from adapterhub.backbones.fingerprint import fingerprint_of
from adapterhub.backbones.load import FRESH, origin_of, rows_of, table_of
from adapterhub.backbones.quantized import free_layout, hold_layout
from adapterhub.backbones.tokenizer import bind, bound
from adapterhub.backbones.weights import is_sharded, packed_hosts
from adapterhub.building import build_adapter, check_adapter
from adapterhub.composing import check, clear, compose, is_stack
from adapterhub.composition import Average, Node, names_in, node_of
from adapterhub.errors import AttachError, did_you_mean
from adapterhub.files.manifest import NewToken, name_problems
from adapterhub.methods.base import Method
from adapterhub.methods.spec import Spec, parse
from adapterhub.parts import has_prefix
from adapterhub.sources import build
from adapterhub.vocabulary import tokens_of

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
        adapter.unseat()
        self.sync_attention()
        if not self.adapters:
            for parameter, flag in self.trainable:
                parameter.requires_grad_(flag)
            free_layout(self.held)
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
        fresh: frozenset[str] = getattr(self.model, FRESH, frozenset())
        table, rows = table_of(self.model), rows_of(self.model)
        named = (
            # Only the rows of the checkpoint: some may have been added since.
            (path, own.get(id(p), p)[: rows if p is table else None])
            for path, p in self.anatomy.parameters().items()
            if path not in fresh
        )
        codes = torch.empty(1, 1, device="meta")
        packed = ((f"{host}.weight", codes) for host in packed_hosts(self.anatomy))
        return fingerprint_of(itertools.chain(named, packed), origin_of(self.model))


def reattach(state: Attachments, adapters: Sequence[Adapter], rows: Sequence[Node]) -> None:
    """Put adapters back on the bare model that they were on, active as these rows say."""
    state.trainable = [(p, p.requires_grad) for p in state.model.parameters()]
    for adapter in adapters:
        _commit(state, adapter)
    set_rows(state, rows)


def attachments(model: PreTrainedModel) -> Attachments | None:
    """What is on a model, or None."""
    return getattr(model, _STATE, None)


def backbone_fingerprint(model: PreTrainedModel) -> str:
    """The identity of a model's backbone, with or without adapters on it."""
    return (attachments(model) or _fresh_state(model)).fingerprint()


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
    methods, fill = build(parse(method), state.adapters if state else {})
    return place(model, methods, name, prepare=fill)


def bind_new(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[NewToken] = ()
) -> None:
    """Remember a tokenizer that `load_backbone` did not make: what the checkpoint has no rows for,
    and `tokens`, is new."""
    known, table = rows_of(model), table_of(model)
    limits = [known] if known is not None else [len(table)] if table is not None else []
    bind(model, tokenizer, min([len(tokenizer), *limits, *(token.id for token in tokens)]))


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
    set_rows(state, ((),))
    try:
        admit(state)
        new = tokens_of(bound(model)) if tokens is None else tokens
        adapter = build_adapter(state, state.anatomy, tuple(methods), name, new, next(state.serial))
        prepare(adapter)
        check_adapter(adapter)
    except BaseException:
        set_rows(state, before)
        raise
    _commit(state, adapter)
    return adapter


def _commit(state: Attachments, adapter: Adapter) -> None:
    setattr(state.model, _STATE, state)
    state.held += hold_layout(state.model)
    for parameter, _ in state.trainable:
        parameter.requires_grad_(False)
    state.adapters[adapter.name] = adapter
    adapter.seat()
    state.sync_attention()
    set_rows(state, (adapter.name,))


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


def set_rows(state: Attachments, rows: Sequence[Node]) -> None:
    """Let each row of a batch go through its composition; a single one is that of all rows.

    Raises:
        AttachError: a name that is not on the model, or adapters that cannot act together; what was
            active still is.
    """
    known_names(state, [name for node in rows for name in names_in(node)])
    stack = [state.adapters[name] for name in names_in(rows[0])] if is_stack(rows) else None
    if stack is None:
        check(state.model, state.adapters, rows)
    else:
        _refuse_shared(stack)
    clear(state.model, state.adapters.values())
    for adapter in state.adapters.values():
        adapter.switch(on=False)
    if stack is None:
        compose(state.model, state.adapters, rows)
    else:
        for adapter in stack:
            adapter.switch(on=True)
    state.rows = tuple(rows)


def _refuse_shared(chosen: list[Adapter]) -> None:
    seen: dict[int, str] = {}
    for adapter in chosen:
        for changed in adapter.changed:
            other = seen.setdefault(id(changed.original), adapter.name)
            if other != adapter.name:
                raise AttachError(
                    f"{other!r} and {adapter.name!r} both hold their own {changed.name}",
                    expected="at most one active adapter that changes a backbone parameter",
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


def activate(model: PreTrainedModel, *parts: str | Average) -> None:
    """Make exactly these adapters active, in this order; without names, none: the bare backbone.

    `activate(model, "a", "b")` is a stack: b maps what a gave. `Average(["a", "b"])` is their mean
    (see there), and may stand in the place of a name. What trains does not change. The head is that
    of the last one that has one; of an average it is the mean of the heads' outputs.

    Raises:
        AttachError: a name that is not on the model, two adapters that change one parameter, or
            an average of what has none. What was active still is.
    """
    state = state_of(model)
    refuse_in_route(state)
    set_rows(state, (node_of(parts),))


def detach(model: PreTrainedModel, name: str | None = None) -> None:
    """Take an adapter off, or all of them: bytes, keys, modules and `requires_grad` are as before.

    Raises:
        AttachError: no adapter of that name is on the model.
    """
    state = state_of(model)
    if name is None:
        refuse_in_route(state)
        set_rows(state, ((),))
    for each in [name] if name is not None else list(state.adapters):
        state.detach(each)
