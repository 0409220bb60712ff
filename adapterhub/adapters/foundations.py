"""Adapters below others: `attach(model, method, on=[...])` trains one on top of frozen ones.

An adapter is active with those that it was trained on, in line: they come first, and it gets their
outputs (Pfeiffer et al. 2020, "MAD-X", section 4.3, https://arxiv.org/abs/2005.00052: a task
adapter on a language adapter). In a stack of several adapters on one foundation, it applies once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.backbones.pooling import max_positions
from adapterhub.errors import AttachError, ConfigError, MismatchError
from adapterhub.files.manifest import Manifest, without_heads
from adapterhub.files.native import Foundation
from adapterhub.hooks.composition import Average, Composition, adapter_names
from adapterhub.methods.common.site_module import EmbeddingModule

_LEAST_LEFT = 3  # positions: a text between a first and a last special token
_FRESH = ".fresh."  # in the names of parameters that the checkpoint lacked


def with_foundations(adapters: Mapping[str, Adapter], composition: Composition) -> Composition:
    """Return a composition with the adapters below those that it names."""
    if not any(adapters[name].on for name in adapter_names(composition)):
        return composition
    return _expanded(adapters, composition, frozenset())


def _expanded(
    adapters: Mapping[str, Adapter], composition: Composition, applied: frozenset[str]
) -> Composition:
    """Expand a composition that gets the outputs of the adapters in `applied`."""
    if isinstance(composition, Average):
        parts = [_expanded(adapters, part, applied) for part in composition.parts]
        return Average(parts, composition.weights)
    expanded: list[Composition] = []
    brought: set[str] = set()
    for part in _flat(composition):
        if isinstance(part, Average):
            expanded.append(_expanded(adapters, part, applied))
            continue
        if part in brought:
            continue
        below = [n for n in _names_below(adapters[part]) if n not in applied]
        expanded += (*below, part)
        brought.update(below)
        applied = applied.union(below, [part])
    return tuple(expanded)


def _names_below(adapter: Adapter) -> list[str]:
    return [below.name for below in adapters_below(adapter)]


def _flat(composition: Composition) -> Iterator[str | Average]:
    """Yield the names and averages of a stack, in which stacks may be nested."""
    if isinstance(composition, str | Average):
        yield composition
        return
    for part in composition:
        yield from _flat(part)


def adapters_below(adapter: Adapter) -> list[Adapter]:
    """List the adapters below one, the lowest first, each once."""
    chain = [each for below in adapter.on for each in (*adapters_below(below), below)]
    return list(dict.fromkeys(chain))


def virtual_tokens(adapter: Adapter) -> int:
    """Count the positions that an adapter takes in front of each text."""
    modules = [placed.module for placed in adapter.placed if placed.site.kind == "embed"]
    with torch.no_grad():
        return sum(
            len(module()) + module.skipped_positions
            for module in modules
            if isinstance(module, EmbeddingModule)
        )


def text_positions(model: PreTrainedModel, adapters: Iterable[Adapter] = ()) -> int:
    """Return the positions of a model that are left to a text, and to what is written behind it.

    The virtual tokens of adapters, and of those below them, are in front of it.

    Raises:
        ConfigError: none is left.
    """
    positions = max_positions(model)
    chain = dict.fromkeys(each for a in adapters for each in (*adapters_below(a), a))
    taken = {each: count for each in chain if (count := virtual_tokens(each))}
    left = positions - sum(taken.values())
    if left < _LEAST_LEFT and taken:
        raise ConfigError(
            f"virtual tokens leave {max(left, 0):,} of the {positions:,} positions of the backbone",
            offenders=[f"{each.name}: {count:,} virtual tokens" for each, count in taken.items()],
            expected=f"at most {max(positions - _LEAST_LEFT, 0):,}: a text has some tokens, too",
            hint="--method 'prompt(length=20)'",
        )
    return left


def frozen_adapters(adapters: Mapping[str, Adapter], names: Iterable[str]) -> tuple[Adapter, ...]:
    """Return the adapters that a new one shall be on.

    Raises:
        AttachError: one is not attached, or is not frozen.
    """
    names = tuple(dict.fromkeys(names))
    wrong = [name for name in names if name not in adapters or not adapters[name].foundation]
    if wrong:
        frozen = [name for name, each in adapters.items() if each.foundation]
        raise AttachError(
            "an adapter can only be on top of saved adapters that are loaded frozen",
            offenders=[
                f"{name!r} is {'not frozen' if name in adapters else 'not attached'}"
                for name in wrong
            ],
            expected=f"one of {', '.join(map(repr, frozen))}" if frozen else "",
            hint=f"ah.load(model, REFERENCE, name={wrong[0]!r}, frozen=True)",
        )
    return tuple(adapters[name] for name in names)


def attached_foundation(adapters: Mapping[str, Adapter], foundation: Foundation) -> Adapter | None:
    """Return the frozen adapter with the same digest, if one is attached."""
    for adapter in adapters.values():
        if adapter.foundation and adapter.foundation.ref.digest == foundation.ref.digest:
            return adapter
    return None


def frozen_part(manifest: Manifest) -> Manifest:
    """Return the part of an adapter that others can be on: without its head and what that reads.

    The task head, and layers above the last one that the checkpoint lacked, such as a pooler, are
    those of the adapter on top.

    Raises:
        MismatchError: nothing is left, or it has new tokens, or parameters inside of the layers
            that the checkpoint of the backbone lacked.
    """
    fresh = {name for name in manifest.tensors if _FRESH in name}
    part = without_heads(manifest)
    left = {name: info for name, info in part.tensors.items() if name not in fresh}
    problems = [f"newly initialized: {n}" for n in sorted(fresh) if re.match(r"[a-z_]+\.\d+\.", n)]
    problems += [f"new token: {token.content!r}" for token in manifest.tokens]
    problems += [] if left else ["it has a task head only"]
    if problems:
        raise MismatchError(
            f"no adapter can be on top of {manifest.name!r}",
            offenders=problems[:5],
            expected="an adapter that changes layers of the backbone, without new tokens",
        )
    return replace(part, tensors=left)


def freeze(adapter: Adapter, foundation: Foundation) -> None:
    """Make an adapter with the tensors of `frozen_part` a foundation of others."""
    adapter.foundation = foundation
    adapter.changed = [changed for changed in adapter.changed if changed.method is not None]
    for parameter in adapter.parameters():
        parameter.requires_grad_(False)


def refuse_below(adapters: Mapping[str, Adapter], removed: Sequence[Adapter]) -> None:
    """Refuse to detach adapters that others are on.

    Raises:
        AttachError: which are.
    """
    above = [a for a in adapters.values() if a not in removed and set(a.on) & set(removed)]
    if above:
        raise AttachError(
            f"{', '.join(repr(a.name) for a in removed)} cannot be detached: others are on it",
            offenders=[repr(adapter.name) for adapter in above],
            hint=f"detach(model, {above[0].name!r}) first",
        )


def with_brought(adapters: Mapping[str, Adapter], removed: Sequence[Adapter]) -> list[Adapter]:
    """Return adapters to detach, and those that were only brought along for them."""
    going = list(removed)
    while True:
        needed = {below for each in adapters.values() if each not in going for below in each.on}
        more = [
            below
            for each in going
            for below in each.on
            if below.brought and below not in needed and below not in going
        ]
        if not more:
            return going
        going += dict.fromkeys(more)
