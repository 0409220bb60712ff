"""Build an adapter from methods for one backbone. The model itself is not changed."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.parts import (
    LABEL_FIELDS,
    AdapterHead,
    OwnedParameter,
    PlacedModule,
    parameter_holders,
)
from adapterhub.adapters.state import ModelState
from adapterhub.anatomy.layer_groups import dropped_modules
from adapterhub.anatomy.own_modules import is_view
from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.newly_initialized import newly_initialized
from adapterhub.backbones.tensor_parallel import tensor_parallel
from adapterhub.backbones.token_embedding import (
    checkpoint_vocabulary_size,
    token_embedding,
    token_tables,
)
from adapterhub.backbones.tokenizer import (
    TokenizerSnapshot,
    record_snapshot,
    tokenizer_snapshot,
)
from adapterhub.backbones.weights import device_of, is_sharded, offloaded, storage_problems
from adapterhub.errors import AdapterhubError, AttachError, SiteError
from adapterhub.files.manifest import NewToken, name_problems
from adapterhub.hooks.head import bypassed, head_pooling, without_variant_slots
from adapterhub.hooks.new_tokens import NewTokenRows, new_token_rows, tokens_of
from adapterhub.methods.common.base import METHODS, Method, Placement, PlanStep, Unfrozen
from adapterhub.methods.common.site_module import SiteModule, undrawn

_EMPTY: ContextVar[bool] = ContextVar("empty_copies", default=False)


def build_adapter(
    state: ModelState,
    methods: Sequence[Method],
    name: str,
    tokens: tuple[NewToken, ...] | None = None,
    tokenizer: TokenizerSnapshot | None = None,
    pooling: str | None = None,
) -> Adapter:
    """Build a new adapter next to a model; `state.add` attaches it.

    Args:
        state: the model's state.
        methods: parsed methods.
        name: the adapter's name.
        tokens: new tokens that get rows; by default those that were added to the tokenizer.
        tokenizer: the tokenizer; by default the one that is recorded for the model.
        pooling: what the head reads: cls, mean, last, max, or None for the class's own choice.

    Raises:
        SiteError: a method does not fit the backbone; the error lists methods that do. Or the model
            has no head for a pooling.
        AttachError: the name is invalid or taken, two methods of one kind are at one site, or the
            embedding has rows without a token.
    """
    _check_name(state, name)
    anatomy, model = state.anatomy, state.model
    if parallel := tensor_parallel(model):
        parallel.draw_alike()
    tokenizer = tokenizer or tokenizer_snapshot(model)
    if tokens is None:
        tokens = tokens_of(tokenizer)
    key = f"{_slug(name)}-{next(state.serial)}"  # apart from names that look alike as module names
    pooled = head_pooling(anatomy, pooling, f"{key}-pooling")
    dropped = dropped_modules(anatomy)
    unread = (*dropped, *(bypassed(anatomy) if pooled else ()))
    with undrawn(), _with_tokenizer(model, tokenizer):
        planned = [(p, step) for m in methods for p in m.parts() for step in _plan(m, p, anatomy)]
    steps = [(p, step) for p, step in planned if not _is_in(*_place(step, unread, dropped))]
    parameters = (path for path in anatomy.parameters() if not _is_in(path, unread))
    fresh = newly_initialized(model)
    new = sorted(fresh.intersection(parameters)) if fresh else []
    _refuse_offloaded(anatomy, new, tokens)
    changed = list(_own_copies(_unfrozen(steps, new), anatomy))
    adapter = Adapter(
        name,
        tuple(methods),
        model,
        anatomy,
        placed=list(_placed(steps, anatomy, key)),
        changed=changed,
        head=_own_head(anatomy),
        state=state,
        new_tokens=_new_token_rows(model, tokens, key, changed),
        tokenizer=tokenizer,
        pooling=pooled,
    )
    _refuse_duplicates(adapter)
    return adapter


@contextmanager
def _with_tokenizer(model: PreTrainedModel, tokenizer: TokenizerSnapshot | None) -> Iterator[None]:
    """Record a tokenizer inside: a method may start from a text."""
    before = tokenizer_snapshot(model)
    record_snapshot(model, tokenizer)
    try:
        yield
    finally:
        record_snapshot(model, before)


def _place(
    step: PlanStep, unread: Sequence[str], dropped: Sequence[str]
) -> tuple[str, Sequence[str]]:
    """Return the path that a step changes, and the modules in which it would change nothing.

    `unread` are modules whose parameters nothing reads, `dropped` those whose outputs nothing
    reads.
    """
    if isinstance(step, Unfrozen):
        return step.path, unread
    return f"{step.site.host}.", dropped


def _is_in(path: str, modules: Iterable[str]) -> bool:
    return any(path.startswith(f"{module}.") for module in modules)


def _check_name(state: ModelState, name: str) -> None:
    if problems := name_problems(name):  # now, and not when training is over and it is saved
        raise AttachError(
            "invalid adapter name",
            offenders=problems,
            expected="1 to 200 printable characters, and no path that leaves a folder",
        )
    if name in state.adapters:
        raise AttachError(
            f"an adapter named {name!r} is already attached to this model",
            hint=f"attach(..., name=...), or detach(model, {name!r}) first",
        )


def _placed(
    steps: Iterable[tuple[Method, PlanStep]], anatomy: Anatomy, key: str
) -> Iterator[PlacedModule]:
    for part, step in steps:
        if isinstance(step, Placement):
            module_key = f"{key}-{step.site.role.replace('.', '_')}-{part.name}"
            yield PlacedModule(part, step.site, _moved(step, anatomy), module_key)


def _unfrozen(
    steps: Iterable[tuple[Method, PlanStep]], fresh: Iterable[str]
) -> list[tuple[Method | None, Unfrozen]]:
    """List what methods unfreeze, and newly initialized parameters, which train too."""
    chosen: list[tuple[Method | None, Unfrozen]] = [
        (m, s) for m, s in steps if isinstance(s, Unfrozen)
    ]
    taken = {step.path for _, step in chosen}
    return chosen + [(None, Unfrozen(path)) for path in fresh if path not in taken]


def _new_token_rows(
    model: PreTrainedModel,
    tokens: tuple[NewToken, ...],
    key: str,
    changed: Iterable[OwnedParameter],
) -> NewTokenRows | None:
    """Make the rows of new tokens.

    Refuses rows that were added to the model, unless they belong to a token, or the adapter has
    whole tables of its own.
    """
    table = token_embedding(model)
    if table is None:
        return None
    known = checkpoint_vocabulary_size(model) or len(table)
    if tokens:
        return new_token_rows(model, tokens, known, f"{key}-tokens")
    replaced = {(module, name) for each in changed for module, name in each.holders}
    kept = [h for h in token_tables(model) if h not in replaced]
    if len(table) > known and kept:
        raise AttachError(
            f"the embedding has {len(table)} rows, its checkpoint {known}: which tokens are new?",
            hint="attach(..., tokenizer=tokenizer), with the tokenizer that they were added to",
        )
    return None


def _plan(method: Method, part: Method, anatomy: Anatomy) -> list[PlanStep]:
    try:
        steps = list(part.plan(anatomy))
        refuse_untrainable(part, steps, anatomy)
        return steps
    except SiteError as error:
        if _fits(type(method), anatomy):  # its defaults do: the user's options are wrong
            raise
        fitting = [name for name, cls in sorted(METHODS.items()) if _fits(cls, anatomy)]
        raise SiteError(
            f"{method.name} does not fit a {anatomy.model.config.model_type} backbone: "
            f"{error.problem}",
            offenders=error.offenders,
            expected=error.expected,
            hint=f"{error.hint}; or " * bool(error.hint)
            + f"one of the methods that fit: {', '.join(fitting)}",
        ) from error


def _fits(cls: type[Method], anatomy: Anatomy) -> bool:
    try:
        example = cls.example()
        example.count(anatomy)
        for part in (p for p in example.parts() if p.trains_backbone):
            refuse_untrainable(part, part.plan(anatomy), anatomy)
    except AdapterhubError:
        return False
    return True


def refuse_untrainable(part: Method, steps: Iterable[PlanStep], anatomy: Anatomy) -> None:
    """Refuse to train offloaded or quantized weights, and those of other dtypes.

    Raises:
        SiteError: steps of a part of a method that train some.
    """
    paths = [step.path for step in steps if isinstance(step, Unfrozen)]
    if away := offloaded(anatomy.model, paths):
        problem = f"{part.name} trains weights that are offloaded on this backbone"
        raise SiteError(problem, offenders=away, expected="weights that stay on a device")
    named = anatomy.parameters(every_use=True) if paths else {}
    if wrong := storage_problems(named, (path for path in paths if not is_sharded(named[path]))):
        problem = f"{part.name} trains weights that cannot be trained as they are stored"
        raise SiteError(
            problem,
            offenders=wrong,
            expected="weights in fp32, bf16 or fp16; model.float() casts those of other dtypes",
        )


def _refuse_offloaded(anatomy: Anatomy, fresh: list[str], tokens: tuple[NewToken, ...]) -> None:
    """Refuse to train weights that accelerate loads again, unchanged, for each call."""
    model = anatomy.model
    heads = [f"{n}.{p}" for n, m in anatomy.head().items() for p, _ in m.named_parameters()]
    table = token_embedding(model) if tokens else None
    named = anatomy.parameters().items() if table is not None else ()
    rows = [path for path, parameter in named if parameter is table]
    if away := offloaded(model, [*fresh, *heads, *rows]):
        raise AttachError(
            "parameters that train (the head, newly initialized ones, rows of new tokens) are "
            "offloaded",
            offenders=away,
            expected="modules that stay on a device",
            hint=f"device_map={{..., {away[0].rpartition('.')[0]!r}: DEVICE}}",
        )


def _moved(placement: Placement, anatomy: Anatomy) -> SiteModule:
    """Move a module to the device of its host, in fp32, and to the model's training mode."""
    model = anatomy.model
    host = model.get_submodule(placement.site.host)
    device = device_of(host) or device_of(model)
    placement.module.train(model.training)
    return placement.module.to(device=device, dtype=torch.float32)


@contextmanager
def empty_copies(empty: bool = True) -> Iterator[None]:
    """Build adapters inside whose copies of backbone parameters have no values, nor take memory.

    `OwnedParameter.fill` gives them values, when they are needed.
    """
    token = _EMPTY.set(empty)
    try:
        yield
    finally:
        _EMPTY.reset(token)


def _own_copies(
    unfrozen: Sequence[tuple[Method | None, Unfrozen]], anatomy: Anatomy
) -> Iterable[OwnedParameter]:
    if not unfrozen:
        return
    parameters = anatomy.parameters(every_use=True)
    holders = parameter_holders(anatomy.model)
    for method, step in unfrozen:
        original = parameters[step.path]
        site, _, parameter_name = anatomy.key(step.path).rpartition(".")
        file_name = f"{site}.{method.name if method else 'fresh'}.{parameter_name}"
        device = "meta" if _EMPTY.get() else original.device
        own = nn.Parameter(original.detach().to(device, torch.float32, copy=True))
        used_by = everywhere = tuple(holders[id(original)])
        if step.untied:
            host, _, attribute = step.path.rpartition(".")
            used_by = ((anatomy.model.get_submodule(host), attribute),)
        untied = len(used_by) < len(everywhere)
        yield OwnedParameter(
            method, file_name, own, original, used_by, step.stage, step.rate, untied
        )


def _own_head(anatomy: Anatomy) -> AdapterHead | None:
    original = anatomy.head()
    if not original:
        return None
    own = {n: without_variant_slots(copy.deepcopy(m)) for n, m in original.items()}
    for module in own.values():
        module.float().requires_grad_(True)
    if is_view(anatomy.model):  # it has no names of classes
        unnamed: dict[str, Any] = dict.fromkeys(LABEL_FIELDS)
        return AdapterHead(own, original, unnamed, dict(unnamed))
    config = anatomy.model.config
    labels = {name: copy.deepcopy(getattr(config, name)) for name in LABEL_FIELDS}
    return AdapterHead(own, original, _named_labels(labels, config.num_labels), dict(labels))


def _named_labels(labels: dict[str, Any], count: int | None) -> dict[str, Any]:
    """Return labels with numbered names if there are none, as where PVT counts labels alone."""
    if labels["id2label"] is not None or not count:
        return dict(labels)
    names = {number: f"LABEL_{number}" for number in range(count)}
    return labels | {"id2label": names, "label2id": {name: n for n, name in names.items()}}


def _slug(name: str) -> str:
    """Write an adapter's name as part of a module name, which has no dots."""
    return re.sub(r"[^A-Za-z0-9]", "_", name)


def _refuse_duplicates(adapter: Adapter) -> None:
    # Also where their tensors have other names: UniPELT's bottlenecks have gates.
    names = [f"{placed.site.id}.{placed.method.name}" for placed in adapter.placed]
    names += [name for _, _, name, _ in adapter.owned()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise AttachError(
            "two methods of one kind are at the same sites",
            offenders=twice[:5],
            hint="give them different sites or layers, or attach them as two adapters",
        )
