"""Adapters in memory: resolved by reference, loaded once, the least recently used evicted first.

`ServedModels` plans the models that an adapter needs, and `PlannedAdapter` attaches it to them.

A separate thread pulls adapters, verifies them and loads their models. Changes to a model in use
are made by the engine between batches. Adapters are identified by their digest, so a result of one
digest is never returned for another, and a reference resolves to one digest at a time. A request
keeps the adapter that its reference resolved to when it was made. That adapter stays in memory
until the last of its requests has ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from adapterhub.adapters.activation import changes_shared_state
from adapterhub.adapters.adapter import Adapter, HeldModules
from adapterhub.adapters.route import activate
from adapterhub.adapters.state import find_state
from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.end_tokens import with_stops
from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.pooling import vector_length
from adapterhub.backbones.task_models import TASK_MODELS, TEXT_TO_IMAGE
from adapterhub.config.user_folders import expanded
from adapterhub.data.options import DataOptions
from adapterhub.errors import (
    BackboneError,
    ConfigError,
    FileError,
    MismatchError,
    NotPublishedError,
    RegistryError,
    ServingError,
    YankedError,
    one_line,
    warn_user,
)
from adapterhub.files.manifest import ONE_HEAD
from adapterhub.inference.open import (
    AdapterSource,
    PulledAdapter,
    predictor_of,
    read_source,
)
from adapterhub.inference.record import TrainingRecord, task_and_kind
from adapterhub.methods.common.base import restore_methods
from adapterhub.methods.common.site_module import EmbeddingModule
from adapterhub.registry.local import registry_at, store_of
from adapterhub.registry.pull import fetch_folder, read_reference
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Entry, choose_version
from adapterhub.serving.shared_backbone import (
    UNMEASURED,
    BatchLimits,
    ClassModel,
    NotSharedError,
    ServedAdapter,
    SharedBody,
    SharedTensors,
    StateHead,
)
from adapterhub.training.loading import make_ready

T = TypeVar("T")
_FEATURES, _EMBEDDING = "features", "embedding"  # kinds of models without a head
_FRESH = ".fresh."  # part of the names of parameters that the backbone's checkpoint lacks


class BareBackbone(Enum):
    """The backbone without an adapter."""

    VECTORS = "vectors"
    TEXTS = "texts"


Source = AdapterSource | BareBackbone


class BetweenBatches(Protocol):
    """Runs a function while no batch is computed."""

    def __call__(self, function: Callable[[], T]) -> Future[T]:
        """Return a future of its result."""


@dataclass(frozen=True)
class ModelUse:
    """The model that computes an adapter.

    Attributes:
        reference: the adapter, with its version; "" for the bare backbone.
        model: the class of the model and a number for each.
        shared: whether its rows share batches with other adapters.
        reason: why they do not.
        bytes: the size of the adapter.
    """

    reference: str
    model: str
    shared: bool
    reason: str
    bytes: int


class ServedAdapters:
    """The adapters of an engine.

    Args:
        models: the models that hold the adapters.
        registry: the registry, if not the user's own.
        among: the id or fingerprint of the backbone that registry names are resolved for.
        signed: whether a signature by a trusted key is required.
        memory: the most bytes of adapters to keep, not counting pinned adapters and those in use.
        between_batches: runs a function while no batch is computed.
        on_detach: called between batches with each adapter that was removed.
    """

    def __init__(
        self,
        models: ServedModels,
        registry: str | Path | None,
        among: str | None,
        signed: bool,
        memory: int,
        between_batches: BetweenBatches,
        on_detach: Callable[[ServedAdapter], None] = lambda _: None,
    ) -> None:
        self.models, self.signed = models, signed
        self.registry, self.among = registry, among
        self._registry: Registry | None = None
        self.memory, self.between_batches = memory, between_batches
        self.load_seconds = 0.0
        self.on_detach = on_detach
        self.counts: Counter[str] = Counter()  # loads, evictions, refreshes, failed_refreshes
        self.lock = threading.RLock()
        self._by_source: dict[Source, Future[ServedAdapter]] = {}
        self._by_name: dict[str, ServedAdapter] = {}
        self._pinned: set[Source] = set()
        self._loader = ThreadPoolExecutor(1, "adapterhub-load")

    def find(self, source: Source) -> Future[ServedAdapter]:
        """Return the adapter of a reference, loaded or being loaded."""
        with self.lock:
            loading = self._by_source.get(source)
            if loading is not None and not (loading.done() and _is_gone(loading)):
                return loading
            loading = self._by_source[source] = self._loader.submit(self._load, source)
        loading.add_done_callback(lambda each: self._forget_failed(source, each))
        return loading

    def loaded(self) -> dict[Source, ServedAdapter]:
        """Return the adapters in memory, by the references used to request them."""
        with self.lock:
            return {s: f.result() for s, f in self._by_source.items() if not _is_gone(f)}

    def _forget_failed(self, source: Source, loading: Future[ServedAdapter]) -> None:
        """Forget a reference that does not resolve, so that clients' names do not accumulate."""
        with self.lock:
            if not _is_loaded(loading) and self._by_source.get(source) is loading:
                del self._by_source[source]

    def begin_use(self, served: ServedAdapter) -> bool:
        """Keep an adapter in memory until `end_use`; return False if it was already removed."""
        with self.lock:
            if served.gone:
                return False
            served.users += 1
            served.used = time.monotonic()
            return True

    def end_use(self, served: ServedAdapter) -> None:
        """Release an adapter from one request."""
        with self.lock:
            served.users -= 1
            leaves = served.stale and not served.users
        if leaves:
            self.between_batches(self._evict).add_done_callback(_ignore)

    def pin(self, source: Source) -> None:
        """Load the adapter of a reference, and keep it in memory."""
        self._pinned.add(source)
        self.find(source).result().pinned = True

    def uses(self) -> list[ModelUse]:
        """List the model that computes each adapter."""
        numbers: dict[int, int] = {}
        return [
            ModelUse(
                each.reference,
                f"{type(each.predictor.model if each.reason else each.model.model).__name__} "
                f"{numbers.setdefault(id(each.model), len(numbers) + 1)}",
                not each.reason,
                each.reason,
                each.bytes,
            )
            for each in self.in_memory()
        ]

    def in_memory(self) -> list[ServedAdapter]:
        """List each adapter once, even if several references resolve to it."""
        with self.lock:
            served = [each.result() for each in self._by_source.values() if _is_loaded(each)]
            return [*{id(each): each for each in (*served, *self._by_name.values())}.values()]

    def refresh(self) -> int:
        """Resolve each reference again, and load the versions that are new.

        New requests do not get a yanked version. While the registry cannot be read, its adapters
        stay loaded.

        Returns:
            The number of references that have moved. If a new version cannot be loaded, the old one
            stays, with a warning.
        """
        with self.lock:
            futures = [(s, f) for s, f in self._by_source.items() if isinstance(s, AdapterSource)]
        loaded = [(source, loading) for source, loading in futures if _is_loaded(loading)]
        try:
            published = self.published() if loaded else {}
        except (RegistryError, FileError) as error:
            self.counts["failed_refreshes"] += 1
            warn_user(f"the registry is not read: {error.problem}")
            published = None
        moved = [
            self._loader.submit(self._refreshed, source, loading)
            for source, loading in loaded
            if self._may_have_moved(source, loading.result(), published)
        ]
        return sum(each.result() for each in moved)

    def published(self) -> dict[str, list[Entry]]:
        """Return the versions of each registry name, for the backbone if one was named.

        Raises:
            RegistryError: it cannot be read.
        """
        self._registry = self._registry or registry_at(self.registry)
        entries: dict[str, list[Entry]] = {}
        for path, contents in self._registry.everything(self.among).items():
            own = [e for e in contents.entries if self.among in (None, e.backbone, e.fingerprint)]
            if own:
                entries.setdefault(path.rpartition("/")[2], []).extend(own)
        return entries

    def _may_have_moved(
        self, source: AdapterSource, old: ServedAdapter, published: dict[str, list[Entry]] | None
    ) -> bool:
        """Return whether a reference must be resolved again because it may have moved."""
        reference = read_reference(source.reference, self.registry, signed=self.signed)
        if reference.kind != "local":
            return True
        if published is None:
            return False
        try:
            entries = published.get(reference.name, [])
            entry = choose_version(entries, reference.name, reference.version)
        except RegistryError:
            return True
        return entry.yanked is not None or entry.digest != old.digest

    def close(self) -> None:
        """Stop loading adapters."""
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _refreshed(self, source: AdapterSource, before: Future[ServedAdapter]) -> bool:
        old = before.result()
        if old.gone:
            return False  # the next request looks it up
        new: ServedAdapter | None = None
        try:
            if self._digest_now(source) == old.digest:
                return False
            new = self._load(source)
            if new is old:  # a store without digests
                return False
        except YankedError as error:
            warn_user(f"{old.reference} is not served any more: {error.problem}")
        except Exception as error:
            self.counts["failed_refreshes"] += 1
            warn_user(f"{source.reference} stays at {old.reference}: {error}")
            return False
        self._exchange(source, old, new)
        return True

    def _exchange(
        self, source: AdapterSource, old: ServedAdapter, new: ServedAdapter | None
    ) -> None:
        """Point a reference at another adapter, or at no loaded one."""
        with self.lock:
            if new is None:
                self._by_source.pop(source, None)
            else:
                new.pinned = new.pinned or source in self._pinned
                self._by_source[source] = Future()
                self._by_source[source].set_result(new)
            others = [f.result() for f in self._by_source.values() if _is_loaded(f)]
            old.stale = not any(each is old for each in others)
            old.pinned = old.pinned and not old.stale
        self.counts["refreshes"] += 1
        self.between_batches(self._evict).add_done_callback(_ignore)

    def _digest_now(self, source: AdapterSource) -> str:
        """Return the digest that a reference resolves to, without fetching files if possible.

        Raises:
            YankedError: it was yanked.
            RegistryError: it cannot be resolved.
        """
        reference = read_reference(source.reference, self.registry, signed=self.signed)
        if reference.kind == "folder":
            return fetch_folder(expanded(reference.name), signed=self.signed).own().digest
        store = store_of(reference, self.registry)
        entry = self._of_backbone(
            source,
            lambda among: store.resolve(reference.name, reference.version, backbone=among),
        )
        if entry.yanked is not None:
            raise YankedError(f"{entry.reference} was yanked: {one_line(entry.yanked)}")
        return entry.digest

    def _load(self, source: Source) -> ServedAdapter:
        """Resolve a reference, and load its adapter unless it is in memory."""
        if source is BareBackbone.TEXTS:
            return self.models.bare_generator()
        if source is BareBackbone.VECTORS:
            bare = self.models.bare()
            self.between_batches(bare.model.measure).result()
            return bare
        pulled = self._of_backbone(
            source,
            lambda among: read_source(
                source,
                self.models.backbone,
                self.registry,
                signed=self.signed,
                refuse_yanked=True,
                among=among,
            ),
        )
        # Equal bytes under another reference make another adapter: answers name their reference.
        reference = sha256(pulled.reference.encode()).hexdigest()[:8]
        name = "-".join(filter(None, (pulled.digest, reference, source.head, source.task)))
        with self.lock:
            if (served := self._by_name.get(name)) is not None:
                served.stale = False
                return served
        began = time.monotonic()
        try:
            return self._attached(self.models.plan(pulled, name))
        except NotSharedError as error:
            return self._attached(self.models.plan_apart(pulled, name, error.problem))
        finally:
            self.load_seconds += time.monotonic() - began

    def _of_backbone(self, source: AdapterSource, look_up: Callable[[str | None], T]) -> T:
        """Look up a name for the named backbone first, then for all backbones."""
        reference = read_reference(source.reference, self.registry, signed=self.signed)
        if self.among is not None and reference.kind == "local":
            with contextlib.suppress(NotPublishedError):  # the final error names the backbone
                return look_up(self.among)
        return look_up(None)

    def _attached(self, planned: PlannedAdapter) -> ServedAdapter:
        def attach() -> ServedAdapter:
            planned.model.measure()
            served = planned.attach()
            served.used = time.monotonic()
            with self.lock:
                self._by_name[served.name] = served
                self.counts["loads"] += 1
            self._evict(served)
            return served

        return self.between_batches(attach).result()

    def _evict(self, new: ServedAdapter | None = None) -> None:
        """Remove adapters without a reference, and the least recently used ones."""
        for served in self._leaving(new):
            served.model.detach(served)
            self.models.forget(served)
            self.on_detach(served)
            self.counts["evictions"] += 1

    def _leaving(self, new: ServedAdapter | None) -> Sequence[ServedAdapter]:
        with self.lock:
            loaded = sorted(self._by_name.values(), key=lambda each: (not each.stale, each.used))
            size, leaving = sum(each.bytes for each in loaded), []
            for each in loaded:
                unused = not (each.users or each.pinned or each is new)
                if unused and (each.stale or size > self.memory):
                    size -= each.bytes
                    each.gone = True
                    leaving.append(each)
                    del self._by_name[each.name]
            self._by_source = {
                s: f for s, f in self._by_source.items() if not (f.done() and _is_gone(f))
            }
            return leaving


def _is_loaded(loading: Future[ServedAdapter]) -> bool:
    return loading.done() and not loading.cancelled() and loading.exception() is None


def _is_gone(loading: Future[ServedAdapter]) -> bool:
    """Return whether to resolve a reference again: it failed, or its adapter was removed."""
    return not _is_loaded(loading) or loading.result().gone


def _ignore(done: Future[Any]) -> None:
    """Retrieve a result, so that its error is not reported as unhandled."""
    if not done.cancelled():
        done.exception()


@dataclass(frozen=True)
class PlannedAdapter:
    """An adapter whose models are loaded; `attach` adds it to them.

    `name` is its name on them. `reason` explains why it does not share the body.
    """

    pulled: PulledAdapter
    name: str
    model: SharedBody | ClassModel
    reason: str = ""
    head: StateHead | None = None
    max_length: int | None = None
    held: list[HeldModules] = field(default_factory=list)

    def attach(self) -> ServedAdapter:
        """Attach the adapter, inactive. Called between batches.

        Raises:
            NotSharedError: it cannot share the body.
            MismatchError: it does not fit the backbone.
        """
        if isinstance(self.model, ClassModel):
            adapter = self._inactive(self.model.model)
            return self._served([adapter], adapter.labels)
        attached: list[Adapter] = []
        try:
            if self.head is not None:
                self.head.replace_states(self.model)
                attached.append(self._inactive(self.head.model, modules=False))
            labels = attached[0].labels if attached else ()
            if has_modules(self.pulled):
                attached.append(self._inactive(self.model.model, head=False))
                if changes_shared_state(attached[-1]):
                    raise NotSharedError("it changes what all rows of a batch share")
            return self._served(attached, labels)
        except BaseException:
            for each in attached:
                each.detach()
            raise

    def _inactive(self, model: PreTrainedModel, **part: bool) -> Adapter:
        """Attach a part of the adapter, and leave the model bare where no route is open.

        Weights are compared once with each backbone record: nothing changes them here, and the
        models of a body share the same weights.
        """
        trained_on = repr(self.pulled.manifest.backbone)
        known = self.model.trained_on
        any_backbone = trained_on in known
        adapter = self.pulled.attach_to(model, self.name, any_backbone=any_backbone, **part)
        activate(model)
        if isinstance(self.model, SharedBody):
            self.held.append(adapter.hold())
        known.add(trained_on)
        return adapter

    def _served(self, attached: Sequence[Adapter], labels: tuple[str, ...]) -> ServedAdapter:
        model = self.head.model if self.head else self.model.model
        on_model = any(each.model is self.model.model for each in attached)
        return ServedAdapter(
            reference=self.pulled.reference,
            digest=self.pulled.digest or "",
            model=self.model,
            predictor=predictor_of(
                model,
                labels,
                self.model.tokenizer,
                self.pulled.record,
                attached,
                self.max_length,
            ),
            name=self.name,
            row=self.name if on_model else None,
            reason=self.reason,
            head=self.head,
            bytes=sum(t.nbytes for a in attached for t in a.tensors().values())
            + sum(each.bytes for each in self.held),
            kinds=frozenset().union(*(each.kinds for each in self.held)),
            virtual=sum(map(_virtual_tokens, attached)),
            ends=_ends(model, attached),
            alone=bool(self.pulled.needs_own_model),
        )


@torch.no_grad()
def _virtual_tokens(adapter: Adapter) -> int:
    placed = (each.module for each in adapter.placed if isinstance(each.module, EmbeddingModule))
    return sum(len(module()) for module in placed)


def _ends(model: PreTrainedModel, attached: Sequence[Adapter]) -> tuple[int, ...]:
    """Return the tokens that stop generation while the adapters are active."""
    state = find_state(model)
    own = Backbone.of(model).stops if state is None else state.own_ends
    return tuple(with_stops(own, [stop for each in attached for stop in each.stops]))


def has_modules(pulled: PulledAdapter) -> bool:
    """Return whether an adapter has more than a head."""
    return any(not name.startswith(ONE_HEAD) for name in pulled.manifest.tensors)


class ServedModels:
    """All loaded models, and the placement of adapters on them.

    `backbone` is the source of the backbone for all adapters; by default each adapter's record
    names it. `dtype` and `quantize` apply to all models; by default each adapter uses the values of
    its training. `batch_tokens` is the most tokens computed at once; None: measure it. `max_length`
    is the longest input; None: the limit of each backbone.
    """

    def __init__(
        self,
        backbone: str | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        batch_tokens: int | None = None,
        max_length: int | None = None,
    ) -> None:
        self.max_length = max_length
        self.backbone, self.dtype, self.quantize = backbone, dtype, quantize
        self.measured = batch_tokens is not None
        self.limits = BatchLimits.of_tokens(batch_tokens or UNMEASURED)
        self.fingerprints: set[str] = set()  # of the backbones of all planned adapters
        self.bodies: dict[Hashable, SharedBody | str] = {}  # a text explains why there is no body
        self.classes: dict[tuple[Hashable, ...], ClassModel] = {}
        self.tensors: dict[Hashable, SharedTensors] = {}

    def plan(self, pulled: PulledAdapter, name: str) -> PlannedAdapter:
        """Load the models that an adapter needs, unless they are loaded.

        Raises:
            BackboneError: its backbone cannot be loaded, and no other one is served.
            MismatchError: its backbone cannot be loaded, and another one is served.
            ServingError: it generates images.
        """
        backbone = pulled.manifest.backbone
        try:
            planned = self._planned(pulled, name)
        except BackboneError as error:
            if not self.fingerprints or backbone.fingerprint in self.fingerprints:
                raise
            raise MismatchError(
                f"{pulled.reference} was trained on a backbone that this server does not have",
                offenders=[f"served: {each}" for each in sorted(self.fingerprints)],
                expected=f"{backbone.id}, {backbone.fingerprint}",
                hint="a separate server for that backbone",
            ) from error
        self.fingerprints.add(backbone.fingerprint)
        return planned

    def _planned(self, pulled: PulledAdapter, name: str) -> PlannedAdapter:
        if pulled.record.kind == TEXT_TO_IMAGE:
            raise ServingError(
                f"{pulled.reference} makes images, which this server does not answer with",
                hint='adapterhub predict ADAPTER "a prompt" --output picture.png',
            )
        if reason := _apart(pulled):
            return self.plan_apart(pulled, name, reason)
        body = self._body(pulled)
        if isinstance(body, str):
            return self.plan_apart(pulled, name, body)
        head = self._head(body, pulled)
        if isinstance(head, str):
            return self.plan_apart(pulled, name, head)
        return PlannedAdapter(pulled, name, body, head=head, max_length=self.max_length)

    def plan_apart(self, pulled: PulledAdapter, name: str, reason: str) -> PlannedAdapter:
        """Load a model of the adapter's class, unless it is loaded.

        Raises:
            BackboneError: it cannot be loaded.
        """
        alone = name if pulled.needs_own_model else None
        auto, *form = pulled.model_class
        key = (pulled.location, auto, tuple(form), alone)
        if key not in self.classes:
            model, tokenizer = self._loaded(pulled)
            self._tensors(self._form(pulled)).share(model)
            self.classes[key] = ClassModel(model, tokenizer, self.limits)
        own = self.classes[key]
        return PlannedAdapter(pulled, name, own, reason, max_length=self.max_length)

    def forget(self, served: ServedAdapter) -> None:
        """Drop the separate model of an adapter that was removed."""
        if served.alone:
            self.classes = {k: m for k, m in self.classes.items() if m is not served.model}

    def bare(self) -> ServedAdapter:
        """Return the backbone without an adapter, for text embeddings.

        Raises:
            ConfigError: no backbone was named for all adapters.
            BackboneError: it cannot be loaded.
        """
        backbone = self._named_backbone()
        form = ((backbone, None), *self._stored_form(None, None))
        if form not in self.bodies:
            model, tokenizer = load_backbone(
                backbone, task=_FEATURES, dtype=self.dtype, quantize=self.quantize
            )
            make_ready(model)
            self.bodies[form] = self._new_body(form, model, tokenizer)
        body = self.bodies[form]
        if isinstance(body, str):
            raise ConfigError(f"{backbone} does not give vectors: {body}")
        task, kind = task_and_kind(_FEATURES)
        length = vector_length(body.model, body.tokenizer)
        record = TrainingRecord(task, DataOptions(), length, kind=kind)
        predictor = predictor_of(body.model, (), body.tokenizer, record, (), length)
        return ServedAdapter("", "", body, predictor, pinned=True)

    def bare_generator(self) -> ServedAdapter:
        """Return the backbone without an adapter, for text generation.

        Raises:
            ConfigError: no backbone was named for all adapters.
            BackboneError: it cannot be loaded, or does not generate texts.
        """
        backbone = self._named_backbone()
        location = (backbone, None)
        for kind in _GENERATORS:
            auto = TASK_MODELS[kind].auto
            for (place, name, _, alone), own in self.classes.items():
                if (place, name, alone) == (location, auto, None):
                    return _bare(own, kind)
        form: Any = {"dtype": self.dtype, "quantize": self.quantize}
        try:
            kind, loaded = _GENERATORS[0], load_backbone(backbone, task=_GENERATORS[0], **form)
        except BackboneError:
            kind, loaded = _GENERATORS[1], load_backbone(backbone, task=_GENERATORS[1], **form)
        model, tokenizer = loaded
        make_ready(model)
        self._tensors((location, *self._stored_form(None, None))).share(model)
        task, _ = task_and_kind(kind)
        key = (location, TASK_MODELS[kind].auto, (task.pooling, None, None), None)
        self.classes[key] = ClassModel(model, tokenizer, self.limits)
        return _bare(self.classes[key], kind)

    def _named_backbone(self) -> str:
        if self.backbone is None:
            raise ConfigError(
                "the backbone without an adapter, and none is named",
                hint='Engine("sentence-transformers/all-MiniLM-L6-v2")',
            )
        return self.backbone

    def _body(self, pulled: PulledAdapter) -> SharedBody | str:
        form = self._form(pulled)
        if form not in self.bodies:
            model, tokenizer = self._loaded(pulled, _FEATURES)
            if Backbone.of(model).fresh:  # an untrained pooler: load the backbone without it
                model, tokenizer = self._loaded(pulled, _EMBEDDING)
            self.bodies[form] = self._new_body(form, model, tokenizer)
        return self.bodies[form]

    def _new_body(self, form: Hashable, model: Any, tokenizer: Any) -> SharedBody | str:
        if model.config.is_encoder_decoder:
            return "an encoder-decoder has no states of the text alone"
        if Backbone.of(model).fresh:
            return "its checkpoint lacks parameters of the backbone"
        self._tensors(form).share(model)
        return SharedBody(model, tokenizer, self.limits, self.measured)

    def _head(self, body: SharedBody, pulled: PulledAdapter) -> StateHead | str | None:
        if pulled.manifest.head is None:
            return None
        auto = TASK_MODELS[pulled.record.kind].auto
        if auto not in body.heads:
            model, _ = self._loaded(pulled)
            self._tensors(self._form(pulled)).share(model)
            body.heads[auto] = StateHead(model)
        head = body.heads[auto]
        return head.problem or head

    def _loaded(self, pulled: PulledAdapter, kind: str | None = None) -> tuple[Any, Any]:
        return pulled.load_model(self.backbone, kind, self.dtype, self.quantize)

    def _form(self, pulled: PulledAdapter) -> Hashable:
        """Return the identity of a backbone's weights: its source, dtype and quantization."""
        return (pulled.location, *self._stored_form(*pulled.stored_form))

    def _stored_form(self, dtype: str | None, quantize: str | None) -> tuple[Any, Any]:
        """Return the dtype and quantization, overridden by the values for all models."""
        if self.dtype or self.quantize:
            dtype, quantize = self.dtype, self.quantize
        return dtype or (None if quantize else "fp32"), quantize

    def _tensors(self, form: Hashable) -> SharedTensors:
        return self.tensors.setdefault(form, SharedTensors())


def _bare(model: ClassModel, kind: str) -> ServedAdapter:
    """Return a model without an adapter, for text generation."""
    task, kind = task_and_kind(kind)
    record = TrainingRecord(task, DataOptions(), kind=kind)
    predictor = predictor_of(model.model, (), model.tokenizer, record)
    return ServedAdapter("", "", model, predictor, ends=_ends(model.model, ()), pinned=True)


_GENERATORS = ("causal-lm", "seq2seq")  # kinds of models that generate texts


def _apart(pulled: PulledAdapter) -> str:
    """Return why the files of an adapter rule out sharing the body; "" if they do not."""
    kind = pulled.record.kind
    if reason := pulled.needs_own_model:
        return reason
    if not TASK_MODELS[kind].reads_states:
        return f"{kind} needs more than the states of a text"
    methods = restore_methods(pulled.manifest.methods, f"the adapter {pulled.manifest.name!r}")
    if any(part.trains_backbone for method in methods for part in method.parts()):
        return "it trains parameters of the backbone"
    if any(_FRESH in name for name in pulled.manifest.tensors):
        return "it has parameters that the checkpoint of the backbone lacks"
    if not TASK_MODELS[kind].has_head and not has_modules(pulled):
        return "it has no tensors"
    return ""
