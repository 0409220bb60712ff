"""Attach adapters to a backbone and detach them.

The backbone stays the user's own object: same class, same `forward`, same state-dict keys. All its
parameters are frozen while an adapter is attached; only the parameters of the adapter train.

An adapter is built from methods next to the model. The model does not change until the finished
adapter is added.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from adapterhub.adapters.activation import frozen_adapters
from adapterhub.adapters.adapter import (
    Adapter,
    AdapterHead,
    OwnedParameter,
    PlacedModule,
    parameter_holders,
)
from adapterhub.adapters.compatibility import check_backbone, check_size, check_values
from adapterhub.adapters.model_methods import STRUCTURE_LOCK
from adapterhub.adapters.state import ModelState, bare, get_state, required_backbone
from adapterhub.anatomy.backbone import Backbone, device_of, is_sharded, storage_problems
from adapterhub.anatomy.sites import Anatomy, dropped_modules
from adapterhub.backbones.pooling import check_pooling
from adapterhub.backbones.processor import TokenizerSnapshot, snapshot_of
from adapterhub.backbones.quantized import check_gradients
from adapterhub.backbones.tensor_parallel import tensor_parallel
from adapterhub.errors import AdapterhubError, AttachError, SiteError, did_you_mean
from adapterhub.files.manifest import UNNAMED, Manifest, NewToken
from adapterhub.files.native import Saved, adapter_folder, find_adapter
from adapterhub.files.schema import name_problems
from adapterhub.hooks.head import bypassed, default_pooling, head_pooling, without_variant_slots
from adapterhub.hooks.new_tokens import NewTokenRows, new_token_rows, tokens_of
from adapterhub.methods.common.base import (
    METHODS,
    Method,
    Placement,
    PlanStep,
    Spec,
    TrainedSource,
    Unfrozen,
    restore_methods,
    with_options,
)
from adapterhub.methods.common.projections import PartialSitesError
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
        tokens: new tokens that get rows; by default the tokens added to the tokenizer.
        tokenizer: the tokenizer; by default the one recorded for the model.
        pooling: the pooling that the head reads: cls, mean, last, max, or None for the default of
            the model's class.

    Raises:
        SiteError: a method does not fit the backbone (the error lists methods that do), or the
            model lacks a head for a pooling.
        AttachError: the name is invalid or taken, two methods of one kind are at one site, or the
            embedding has rows without a token.
    """
    _check_name(state, name)
    anatomy, backbone, model = state.anatomy, state.backbone, state.model
    if backbone.divided and (parallel := tensor_parallel(model)):
        parallel.draw_alike()
    tokenizer = tokenizer or backbone.tokenizer
    if tokens is None:
        tokens = tokens_of(tokenizer)
    key = f"{_slug(name)}-{next(state.serial)}"  # distinguishes names with equal slugs
    pooled = head_pooling(anatomy, pooling, f"{key}-pooling")
    dropped = dropped_modules(anatomy)
    unread = (*dropped, *(bypassed(anatomy) if pooled else ()))
    with undrawn(), _with_tokenizer(backbone, tokenizer):
        planned = [(p, step) for m in methods for p in m.parts() for step in _plan(m, p, anatomy)]
    steps = [(p, step) for p, step in planned if not _is_in(*_place(step, unread, dropped))]
    parameters = (path for path in anatomy.parameters() if not _is_in(path, unread))
    fresh = backbone.fresh
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
        new_tokens=_new_token_rows(backbone, tokens, key, changed),
        tokenizer=tokenizer,
        pooling=pooled,
    )
    _refuse_duplicates(adapter)
    return adapter


@contextmanager
def _with_tokenizer(backbone: Backbone, tokenizer: TokenizerSnapshot | None) -> Iterator[None]:
    """Record a tokenizer inside, since a method may start from a text."""
    before = backbone.tokenizer
    backbone.tokenizer = tokenizer
    try:
        yield
    finally:
        backbone.tokenizer = before


def _place(
    step: PlanStep, unread: Sequence[str], dropped: Sequence[str]
) -> tuple[str, Sequence[str]]:
    """Return the path that a step changes, and the modules where it would have no effect.

    `unread` lists modules with unused parameters, `dropped` modules with unused outputs.
    """
    if isinstance(step, Unfrozen):
        return step.path, unread
    return f"{step.site.host}.", dropped


def _is_in(path: str, modules: Iterable[str]) -> bool:
    return any(path.startswith(f"{module}.") for module in modules)


def _check_name(state: ModelState, name: str) -> None:
    if problems := name_problems(name):  # here, and not on saving after training
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
    """List the parameters that methods unfreeze, and newly initialized ones, which also train."""
    chosen: list[tuple[Method | None, Unfrozen]] = [
        (m, s) for m, s in steps if isinstance(s, Unfrozen)
    ]
    taken = {step.path for _, step in chosen}
    return chosen + [(None, Unfrozen(path)) for path in fresh if path not in taken]


def _new_token_rows(
    backbone: Backbone,
    tokens: tuple[NewToken, ...],
    key: str,
    changed: Iterable[OwnedParameter],
) -> NewTokenRows | None:
    """Create the rows of new tokens.

    Refuse rows that were added to the model, unless they belong to a token or the adapter has its
    own copies of whole tables.
    """
    table = backbone.token_embedding
    if table is None:
        return None
    known = backbone.checkpoint_vocabulary_size() or len(table)
    if tokens:
        return new_token_rows(backbone.pretrained, tokens, known, f"{key}-tokens")
    replaced = {(module, name) for each in changed for module, name in each.holders}
    kept = [h for h in backbone.token_tables() if h not in replaced]
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
        if _fits(type(method), anatomy):  # its defaults fit: the user's options are wrong
            raise
        fitting = [name for name, cls in sorted(METHODS.items()) if _fits(cls, anatomy)]
        raise SiteError(
            f"{method.name} does not fit a {anatomy.backbone.model_type} backbone: {error.problem}",
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
    """Refuse to train weights that are offloaded, quantized or of another unsupported dtype.

    Raises:
        SiteError: a step of the method part trains such weights.
    """
    paths = [step.path for step in steps if isinstance(step, Unfrozen)]
    if away := anatomy.backbone.offloaded(paths):
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
    """Refuse to train weights that accelerate reloads, unchanged, for each call."""
    heads = [f"{n}.{p}" for n, m in anatomy.head().items() for p, _ in m.named_parameters()]
    table = anatomy.backbone.token_embedding if tokens else None
    named = anatomy.parameters().items() if table is not None else ()
    rows = [path for path, parameter in named if parameter is table]
    if away := anatomy.backbone.offloaded([*fresh, *heads, *rows]):
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
    """Build adapters inside with empty copies of backbone parameters, which take no memory.

    `OwnedParameter.fill` gives them values later.
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
    labels = copy.deepcopy(anatomy.backbone.labels)
    count = getattr(anatomy.backbone.config, "num_labels", None)
    return AdapterHead(own, original, _named_labels(labels, count), dict(labels))


def _named_labels(labels: dict[str, Any], count: int | None) -> dict[str, Any]:
    """Return labels, with numbered names if there are none: PVT only counts its labels."""
    if labels["id2label"] is not None or not count:
        return dict(labels)
    names = {number: f"LABEL_{number}" for number in range(count)}
    return labels | {"id2label": names, "label2id": {name: n for n, name in names.items()}}


def _slug(name: str) -> str:
    """Convert an adapter's name to part of a module name, without dots."""
    return re.sub(r"[^A-Za-z0-9]", "_", name)


def _refuse_duplicates(adapter: Adapter) -> None:
    # Also if their tensors have other names: UniPELT's bottlenecks have gates.
    names = [f"{placed.site.id}.{placed.method.name}" for placed in adapter.placed]
    names += [name for _, _, name, _ in adapter.owned()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise AttachError(
            "two methods of one kind are at the same sites",
            offenders=twice[:5],
            hint="give them different sites or layers, or attach them as two adapters",
        )


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
    """Attach a new adapter to a model, and make it active.

    Initial values are drawn from torch's global generator.

    Args:
        model: the backbone, of transformers or any other module; other adapters may be attached.
        method: a spec (`"lora"`, `"lora(rank=16)"`, a mapping), a method object such as
            `adapterhub.LoRA(rank=16)`, or a list of these.
        name: the adapter's name; by default "default", then "default-2" and so on.
        head: the paths of the head's modules, which are trained and saved as a whole. The head of
            a model of transformers is known.
        tokenizer: the tokenizer, unless `load_backbone` loaded it with the model. Tokens added to
            it get embedding rows that belong to the adapter and train with it.
        pooling: the input of the task head for each text: the state of the first token (cls) or the
            last one (last), the mean or max of all, or "model" for the default of the model's
            class. By default the pooling of `load_backbone`, else "model".
        on: names of adapters loaded with `load(..., frozen=True)`. They are active below the new
            adapter, in this order, whenever it is active, and are saved with it.
        partial: adapt only the layers that have the method's default sites, if other layers lack
            them. The adapter's method then names the sites.
        options: options of a single method, by name: `rank=16`.

    Raises:
        ConfigError: an unknown method, option or pooling, or options with several methods.
        SiteError: the backbone lacks a site that the method names; if the method does not fit at
            all, the error lists methods that do.
        AttachError: the name is taken; the model is not a module, is compiled, or shares modules
            with another adapted model; nothing would train; no gradient passes through quantized
            layers; or an adapter that the method is built from, or is to be on, is missing.
    """
    backbone, methods = required_backbone(model), with_options(method, options)
    built_from_others = any(method.sources() for method in methods)
    pooling = backbone.pooling if pooling is None else check_pooling(pooling)
    build = build_from_sources if built_from_others else build_adapter
    with STRUCTURE_LOCK, bare(model, head) as state:
        snapshot = snapshot_for(backbone, tokenizer)
        chosen_pooling = pooling or default_pooling(state.anatomy)
        below = frozen_adapters(state.adapters, on)
        if partial:
            methods = with_found_sites(methods, state.anatomy)
        name = free_name(UNNAMED, state.adapters) if name is None else name
        adapter = build(state, methods, name, tokenizer=snapshot, pooling=chosen_pooling)
        adapter.on = below
        if backbone.quantization and (adapter.placed or adapter.changed):  # not for a head alone
            check_gradients(backbone)
        state.add(adapter)
    return adapter


def free_name(name: str, taken: Collection[str]) -> str:
    """Return a name, or the first free one of NAME-2, NAME-3 and so on."""
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


def detach(model: nn.Module, name: str | None = None) -> None:
    """Detach one adapter, or all, and restore bytes, keys, modules and `requires_grad`.

    The tokens and chat templates of adapters are removed from the tokenizer with the last adapter
    that uses them. Tokens stay if the user has added others after them, whose ids would change.

    Raises:
        AttachError: no adapter of that name is attached.
    """
    state = get_state(model)
    state.detach(*([name] if name is not None else state.adapters))


def snapshot_for(
    backbone: Backbone, tokenizer: PreTrainedTokenizerBase | None
) -> TokenizerSnapshot | None:
    """Return the snapshot of a model's tokenizer; attaching an adapter records it.

    Pass `tokenizer` if `load_backbone` did not load it. Its tokens beyond the checkpoint's
    embedding are new.
    """
    if tokenizer is None:
        recorded: TokenizerSnapshot | None = backbone.tokenizer
        return recorded
    size, embedding = backbone.checkpoint_vocabulary_size(), backbone.token_embedding
    limits = [size] if size is not None else [len(embedding)] if embedding is not None else []
    ids = len(tokenizer) if isinstance(tokenizer, PreTrainedTokenizerBase) else 0
    return snapshot_of(backbone, tokenizer, min([ids, *limits]))


def with_found_sites(methods: Sequence[Method], anatomy: Anatomy) -> tuple[Method, ...]:
    """Return methods that name the sites found, if some layers lack the default sites.

    Such a method is refused otherwise, since a half-adapted model is rarely intended. Files record
    the adapted sites, since the method's options name them.

    Returns:
        The methods. A composition with such a part is replaced by its parts, if files can hold
        these separately.
    """
    narrowed: list[Method] = []
    for method in methods:
        parts = method.parts()
        named = tuple(_with_found(part, anatomy) for part in parts)
        whole = named == parts or any(METHODS.get(p.name) is not type(p) for p in named)
        narrowed += [method] if whole else named
    return tuple(narrowed)


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
    """Build an adapter with copies of the trained adapters that its methods name.

    A source is an attached adapter or a folder.

    Raises:
        AttachError: a source is neither attached nor a folder with an adapter.
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
    """Refuse sources on top of other adapters: a copy would not get the outputs of those."""
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
