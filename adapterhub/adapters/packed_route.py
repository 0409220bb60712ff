"""Routes of packed rows: each token of one row of several texts goes through its text's adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adapterhub.adapters.activation import PerRowActivation, changes_shared_state
from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.foundations import adapters_below
from adapterhub.adapters.route import disabled
from adapterhub.adapters.state import ModelState, get_state
from adapterhub.hooks.composition import BatchPlan
from adapterhub.hooks.keyvalue import KeyValueSlot
from adapterhub.hooks.prompt import PromptSlot
from adapterhub.hooks.row_stacks import PrefixSpan, TokenPlan
from adapterhub.hooks.slot import Slot
from adapterhub.methods._site_module import (
    EmbeddingModule,
    InputModule,
    KeyValueModule,
    OutputModule,
)

_KEPT = 8  # routes of one model: a batch of texts stays the same for many steps


class TokenRun(NamedTuple):
    """Consecutive tokens of a packed row that belong to one text.

    `adapter` is None without one; `first` is the place of the first token in its text, in which
    virtual tokens come first.
    """

    adapter: str | None
    tokens: int
    first: int


@dataclass(frozen=True)
class PackedAdapter:
    """What an adapter puts in front of its texts: the tokens of its prefix, and of its prompt.

    `prefix` counts the virtual tokens without a position, `prompt` are embeddings, (length, d).
    """

    adapter: Adapter
    prefix: int
    prompt: Tensor | None

    @property
    def virtual(self) -> int:
        """The number of virtual tokens."""
        return self.prefix + (0 if self.prompt is None else len(self.prompt))


def unpackable(adapter: Adapter) -> str:
    """Return why an adapter cannot be applied to packed tokens; "" if it can."""
    if changes_shared_state(adapter) or adapter.changed:
        return "it changes what all texts share"
    if adapter.head or adapter.pooling or adapters_below(adapter):
        return "it has a head, or adapters below it"
    modules = [placed.module for placed in adapter.placed]
    known = (OutputModule, InputModule, KeyValueModule, EmbeddingModule)
    other = next((m for m in modules if not isinstance(m, known)), None)
    if other is not None:
        return f"{type(other).__name__} reads more than the tokens of one text"
    if any(module.token_sets for module in modules):
        return "it changes tokens by their places in a text, which packed rows do not show"
    outputs = adapter.model.get_output_embeddings()
    hosts = {adapter.model.get_submodule(placed.site.host) for placed in adapter.placed}
    if outputs in hosts:
        return "it changes the output embeddings, which see the last tokens alone"
    return _prefix_problem(adapter)


def _prefix_problem(adapter: Adapter) -> str:
    prefixes = [p for p in adapter.placed if isinstance(p.module, KeyValueModule)]
    virtual = prefixes or any(isinstance(p.module, EmbeddingModule) for p in adapter.placed)
    config: Any = adapter.model.config.get_text_config()
    if virtual and _slides(config):
        return "its virtual tokens would leave the sliding window"
    if not prefixes:
        return ""
    lengths = {len(each.module()[0]) for each in prefixes}
    if len(lengths) > 1 or len(prefixes) != config.num_hidden_layers:
        return "its prefixes are not of one length, one in each layer"
    return ""


def _slides(config: Any) -> bool:
    """Return whether a layer attends to fewer tokens than a text may have."""
    window = getattr(config, "sliding_window", None)
    if not window or window >= getattr(config, "max_position_embeddings", 1 << 30):
        return False
    kinds = getattr(config, "layer_types", None)
    return kinds is None or any("full" not in kind for kind in kinds)


@torch.no_grad()
def packed_adapter(adapter: Adapter) -> PackedAdapter:
    """Return what an adapter that can be packed puts in front of its texts."""
    modules = [placed.module for placed in adapter.placed]
    prefix = next((len(m()[0]) for m in modules if isinstance(m, KeyValueModule)), 0)
    prompts = [m() for m in modules if isinstance(m, EmbeddingModule)]
    return PackedAdapter(adapter, prefix, torch.cat(prompts) if prompts else None)


class PackedActivation(PerRowActivation):
    """One adapter, or none, for each token of a packed row.

    `spans` are the tokens that are virtual ones of prefixes, by adapter: their places in the row,
    and their numbers in the prefix.
    """

    plan_class = TokenPlan

    def __init__(
        self,
        state: ModelState,
        runs: Sequence[TokenRun],
        spans: Mapping[str, Sequence[tuple[int, int, int]]],
    ) -> None:
        of_runs = [() if run.adapter is None else run.adapter for run in runs]
        each = [name for name, run in zip(of_runs, runs, strict=True) for _ in range(run.tokens)]
        super().__init__(state.model, state.adapters, each)
        self.spans = spans

    def prepare(self) -> None:
        """Plan the tokens in each slot, once."""
        if not self.table:
            super().prepare()

    def _plan_of(self, slot: Slot, keys: Mapping[str, tuple[str, ...]]) -> BatchPlan | None:
        if not isinstance(slot, KeyValueSlot):
            return None if isinstance(slot, PromptSlot) else self._plan(keys)
        spans = [
            PrefixSpan(key, *span)
            for name, some in keys.items()
            for key in some
            for span in self.spans.get(name, ())
        ]
        return TokenPlan(((),), spans=spans) if spans else None

    def close(self) -> None:
        """Keep the plans: the same texts follow."""


@dataclass
class PackedRoutes:
    """The routes of one model's packed rows.

    Attributes:
        model: the model.
        prefixes: the virtual tokens without positions, by adapter.
    """

    model: PreTrainedModel
    prefixes: dict[str, int] = field(default_factory=dict)
    _kept: dict[Any, PackedActivation] = field(default_factory=dict)

    def open(self, runs: Sequence[TokenRun]) -> AbstractContextManager[None]:
        """Return a context in which the tokens of a packed row go through these adapters."""
        names = {run.adapter for run in runs if run.adapter is not None}
        if not names:
            return disabled(self.model)
        state = get_state(self.model)
        spans: dict[str, list[tuple[int, int, int]]] = {}
        start = 0
        for run in runs:
            inside = self.prefixes.get(run.adapter or "", 0) - run.first
            if inside > 0:
                spans.setdefault(str(run.adapter), []).append(
                    (start, run.first, min(inside, run.tokens))
                )
            start += run.tokens
        adapters = frozenset(state.adapters[name] for name in names)
        key = (
            tuple((run.adapter, run.tokens) for run in runs),
            tuple((name, *each) for name, each in spans.items()),
            adapters,
        )
        activation = self._kept.pop(key, None) or PackedActivation(state, runs, spans)
        attached = set(state.adapters.values())
        others = [(k, kept) for k, kept in self._kept.items() if attached.issuperset(k[-1])]
        self._kept = dict([*others[1 - _KEPT :], (key, activation)])
        return state.route(activation)
