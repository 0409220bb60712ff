"""The mirror: content missing from this hub is fetched from another one, stored and served.

`Mirror.add` and `Mirror.follow` run for each request that reads, `Mirror.file` before a file is
sent. They wait for mirror_store.py, which works in threads of its pool. A slow upstream therefore
does not delay other requests, and concurrent requests for one item share one fetch.

If the upstream fails, the stored copy is served.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from anyio.to_thread import run_sync
from sqlalchemy import Connection, update

from adapterhub.hub.accounts import Visitor
from adapterhub.hub.blobs import BlobInfo
from adapterhub.hub.database import grants, now_text
from adapterhub.hub.mirror_store import Copies
from adapterhub.hub.repositories import HubRepository
from adapterhub.hub.state import Hub
from adapterhub.web.errors import RETRY_SECONDS, HubRefusal

log = logging.getLogger("adapterhub.hub")

_ABSENT_SECONDS = 60.0  # before an item missing upstream is requested again
_THREADS = 8  # for metadata, and as many for files
_MOST_FAILED = 10_000
_Result = TypeVar("_Result")


class Mirror:
    """Fetches the content that requests need from the upstream of a hub.

    Args:
        hub: the hub, whose options name the upstream; without one, nothing is fetched.

    Raises:
        ConfigError: the hub mirrors another upstream, or the upstream's token is missing.
    """

    def __init__(self, hub: Hub) -> None:
        self.hub, self._copies = hub, Copies(hub)
        self._running: dict[Hashable, Future[object]] = {}
        self._failed: dict[Hashable, tuple[float, HubRefusal]] = {}
        self._lock = threading.RLock()
        self._asking = ThreadPoolExecutor(_THREADS, "upstream")
        self._fetching = ThreadPoolExecutor(_THREADS, "upstream-files")
        self._used: set[tuple[int, str]] = set()

    async def add(self, type: str, name: str, visitor: Visitor) -> bool:
        """Mirror a missing repository for a permitted reader; return whether it was requested.

        Raises:
            MissingRepositoryError: the upstream lacks it, too.
            HubRefusal: the upstream does not respond, or not as a hub.
        """
        copies, open_reading = self._copies, self.hub.options.open_reading
        may_read = visitor.scope is None and (visitor.user or open_reading)
        if copies.upstream is None or not may_read or not await run_sync(copies.is_foreign, name):
            return False
        await self._once(("repository", type, name.casefold()), partial(copies.add, type, name))
        return True

    async def follow(self, repository: HubRepository, revision: str) -> None:
        """Update a mirrored repository, and fetch the requested commit.

        Raises:
            HubRefusal: the commit is not here, and the upstream does not provide it.
        """
        if self._copies.is_due(repository):
            try:
                await self._once(("refs", repository.id), partial(self._copies.refresh, repository))
            except HubRefusal as error:
                message = getattr(error.__cause__, "problem", error.problem)
                log.warning("cached files of %s are served: %s", repository.name, message)
        if oid := await run_sync(self._copies.unknown_commit, repository, revision):
            await self._once(
                ("commit", repository.id, oid), partial(self._copies.add_commit, repository, oid)
            )

    async def file(self, repository: HubRepository, commit: str, path: str, blob: BlobInfo) -> str:
        """Return the sha256 of a file once it is here; concurrent requests share one download.

        Raises:
            HubRefusal: it is not here, and the upstream does not provide it, or the disk is full.
        """
        sha256 = await run_sync(self._copies.kept, repository, blob)
        if not sha256:
            fetch = partial(self._copies.fetch_file, repository, commit, path, blob)
            sha256 = await self._once(("file", repository.id, blob.key), fetch, files=True)
        self._used.add((repository.id, sha256))
        return sha256

    def note_use(self, connection: Connection) -> None:
        """Record which files were served; the least recently used are evicted first."""
        used, self._used = self._used, set()
        for repository, sha256 in used:
            own = (grants.c.repository == repository, grants.c.sha256 == sha256)
            connection.execute(update(grants).where(*own).values(granted=now_text()))

    @property
    def has_notes(self) -> bool:
        """Whether `note_use` has anything to write."""
        return bool(self._used)

    def close(self) -> None:
        """Cancel running fetches and discard their data."""
        self._copies.is_closed = True
        for pool in (self._asking, self._fetching):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _once(
        self, key: Hashable, work: Callable[[], _Result], *, files: bool = False
    ) -> _Result:
        """Return the result of work that runs once for all concurrent callers.

        It continues when they disconnect. A failure is not retried at once.
        """
        with self._lock:
            until, error = self._failed.get(key, (0.0, None))
            if error is not None and time.monotonic() < until:
                raise error.with_traceback(None)
            future = self._running.get(key)
            if future is None:
                future = (self._fetching if files else self._asking).submit(work)
                self._running[key] = future
                future.add_done_callback(partial(self._done, key))
        result: _Result = await asyncio.shield(asyncio.wrap_future(future))  # type: ignore[arg-type]
        return result

    def _done(self, key: Hashable, future: Future[object]) -> None:
        with self._lock:
            self._running.pop(key, None)
            self._failed.pop(key, None)
            error = None if future.cancelled() else future.exception()
            if isinstance(error, HubRefusal):
                seconds = _ABSENT_SECONDS if error.status == 404 else RETRY_SECONDS
                if len(self._failed) >= _MOST_FAILED:
                    self._failed.clear()
                self._failed[key] = (time.monotonic() + seconds, error)
