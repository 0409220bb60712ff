"""Which adapters are in memory: found by reference, loaded once, the least recently used leave.

A thread of its own pulls adapters, verifies them and loads their models; what changes a model that
others compute with is done by the engine between batches. What a digest gave is never given for
another one: adapters are known by their digest, and a reference means one at a time. A request
keeps the adapter that its reference meant when it was made, which stays until the last of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

from adapterhub.config.user_folders import expanded
from adapterhub.errors import (
    FileError,
    NotPublishedError,
    RegistryError,
    YankedError,
    one_line,
    warn_user,
)
from adapterhub.inference.open import AdapterSource, read_source
from adapterhub.registry.published_files import digest_of
from adapterhub.registry.pull import fetch_folder
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Entry, choose_version
from adapterhub.registry.stores import read_reference, registry_at, store_of
from adapterhub.serving.models import NotSharedError, PlannedAdapter, ServedAdapter, ServedModels

T = TypeVar("T")


class BareBackbone(Enum):
    """The backbone without an adapter."""

    VECTORS = "vectors"
    TEXTS = "texts"


Source = AdapterSource | BareBackbone


class BetweenBatches(Protocol):
    """Runs a function when no batch is computed."""

    def __call__(self, function: Callable[[], T]) -> Future[T]:
        """Return its result, later."""


@dataclass(frozen=True)
class ModelUse:
    """Which model computes an adapter.

    Attributes:
        reference: the adapter, with its version; "" is the backbone without one.
        model: the class of the model, and a number for each.
        shared: whether its rows share batches with those of other adapters.
        reason: why not.
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
        models: the models that they are placed on.
        registry: the registry, if not the user's own.
        among: the id or fingerprint of the backbone whose adapters names of the registry mean.
        signed: whether a signature by a trusted key is required.
        memory: the most bytes of adapters that are kept, besides those in use and pinned ones.
        between_batches: runs a function when no batch is computed.
        on_detach: called between batches with an adapter that has left.
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
        """Return what a reference means, loaded or being loaded."""
        with self.lock:
            found = self._by_source.get(source)
            if found is not None and not (found.done() and _is_gone(found)):
                return found
            found = self._by_source[source] = self._loader.submit(self._load, source)
        found.add_done_callback(lambda each: self._forget_failed(source, each))
        return found

    def loaded(self) -> dict[Source, ServedAdapter]:
        """Return what is in memory, by the references that it was asked for with."""
        with self.lock:
            return {s: f.result() for s, f in self._by_source.items() if not _is_gone(f)}

    def _forget_failed(self, source: Source, found: Future[ServedAdapter]) -> None:
        """Forget a reference that means nothing: names of clients do not gather."""
        with self.lock:
            if not _is_loaded(found) and self._by_source.get(source) is found:
                del self._by_source[source]

    def begin_use(self, served: ServedAdapter) -> bool:
        """Keep an adapter in memory until `end_use`; return False if it has left it."""
        with self.lock:
            if served.gone:
                return False
            served.users += 1
            served.used = time.monotonic()
            return True

    def end_use(self, served: ServedAdapter) -> None:
        """Let an adapter leave memory, as far as one request is concerned."""
        with self.lock:
            served.users -= 1
            leaves = served.stale and not served.users
        if leaves:
            self.between_batches(self._evict).add_done_callback(_ignore)

    def pin(self, source: Source) -> None:
        """Keep what a reference means in memory, and load it."""
        self._pinned.add(source)
        self.find(source).result().pinned = True

    def uses(self) -> list[ModelUse]:
        """List which model computes which adapter."""
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
        """List the adapters, each once, whatever references mean it."""
        with self.lock:
            served = [each.result() for each in self._by_source.values() if _is_loaded(each)]
            return [*{id(each): each for each in (*served, *self._by_name.values())}.values()]

    def refresh(self) -> int:
        """Look up again what each reference means, and load what has moved.

        A version that was yanked is not given to new requests. While the registry cannot be read,
        its adapters stay.

        Returns:
            How many have moved. One that cannot be loaded stays what it was, with a warning.
        """
        with self.lock:
            known = [(s, f) for s, f in self._by_source.items() if isinstance(s, AdapterSource)]
        loaded = [(source, found) for source, found in known if _is_loaded(found)]
        try:
            published = self.published() if loaded else {}
        except (RegistryError, FileError) as error:
            self.counts["failed_refreshes"] += 1
            warn_user(f"the registry is not read: {error.problem}")
            published = None
        moved = [
            self._loader.submit(self._refreshed, source, found)
            for source, found in loaded
            if self._may_have_moved(source, found.result(), published)
        ]
        return sum(each.result() for each in moved)

    def published(self) -> dict[str, list[Entry]]:
        """Return the versions of each name of the registry, for the backbone if one is named.

        Raises:
            RegistryError: it cannot be read.
        """
        self._registry = self._registry or registry_at(self.registry)
        found: dict[str, list[Entry]] = {}
        for path, contents in self._registry.everything(self.among).items():
            own = [e for e in contents.entries if self.among in (None, e.backbone, e.fingerprint)]
            if own:
                found.setdefault(path.rpartition("/")[2], []).extend(own)
        return found

    def _may_have_moved(
        self, source: AdapterSource, old: ServedAdapter, published: dict[str, list[Entry]] | None
    ) -> bool:
        """Return whether a reference is to be looked up again: it may mean another version."""
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
        """Load nothing more."""
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
        """Let a reference mean another adapter from now on, or none that is loaded."""
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
        """Return the digest of what a reference means now, without its files where it can be.

        Raises:
            YankedError: it was withdrawn.
            RegistryError: it cannot be resolved.
        """
        reference = read_reference(source.reference, self.registry, signed=self.signed)
        if reference.kind == "folder":
            return digest_of(fetch_folder(expanded(reference.name), signed=self.signed).folder)
        store = store_of(reference, self.registry)
        entry = self._of_backbone(
            source,
            lambda among: store.resolve(reference.name, reference.version, backbone=among),
        )
        if entry.yanked is not None:
            raise YankedError(f"{entry.reference} was yanked: {one_line(entry.yanked)}")
        return entry.digest

    def _load(self, source: Source) -> ServedAdapter:
        """Return what a reference means now; load it unless that is in memory."""
        if source is BareBackbone.TEXTS:
            return self.models.bare_writer()
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
        pulled = replace(pulled, digest=pulled.digest or digest_of(pulled.fetched.folder))
        # The same bytes under another reference are another adapter: an answer names the own one.
        asked = sha256(pulled.reference.encode()).hexdigest()[:8]
        name = "-".join(filter(None, (pulled.digest, asked, source.head, source.task)))
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
        """Look a name up among the adapters of one backbone, if one is named, then among all."""
        reference = read_reference(source.reference, self.registry, signed=self.signed)
        if self.among is not None and reference.kind == "local":
            with contextlib.suppress(NotPublishedError):  # an error says for which backbone it is
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
        """Remove adapters that no reference means, and the least recently used ones."""
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


def _is_loaded(found: Future[ServedAdapter]) -> bool:
    return found.done() and not found.cancelled() and found.exception() is None


def _is_gone(found: Future[ServedAdapter]) -> bool:
    """Return whether a reference is to be looked up again: it failed, or its adapter has left."""
    return not _is_loaded(found) or found.result().gone


def _ignore(done: Future[Any]) -> None:
    """Look at a result, so that its error is not one that nobody saw."""
    if not done.cancelled():
        done.exception()
