"""Import a registry into a hub, and export a hub to a registry.

`adapterhub registry copy` does both with any hub. Here the hub runs in this process during the copy
and accepts a token that is valid only in this process.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from sqlalchemy import select

from adapterhub.errors import ConfigError
from adapterhub.hub.accounts import require_owner
from adapterhub.hub.database import listings, namespaces, repositories
from adapterhub.hub.repositories import versions_of
from adapterhub.hub.server import HubApp, known_hosts
from adapterhub.hub.state import Hub
from adapterhub.registry.copying import CopyReport, copy_registry, place
from adapterhub.registry.tokens import VARIABLE


def import_registry(
    hub: Hub, registry: str, owner: str, note: Callable[[str], None] = lambda line: None
) -> CopyReport:
    """Copy all versions of a registry to repositories of an owner.

    Raises:
        ConfigError: the owner does not exist.
        RegistryError: the registry cannot be read.
    """
    with _answering(hub, owner) as address:
        return copy_registry(registry, f"{address}/{owner}", note=note)


def export_registry(
    hub: Hub, registry: str, owner: str | None, note: Callable[[str], None] = lambda line: None
) -> CopyReport:
    """Copy all versions of an owner to a registry, where names have no owners.

    Raises:
        ConfigError: the owner does not exist, or there are several and none is chosen.
        RegistryError: the registry cannot be written.
    """
    chosen = owner or _only_owner(hub)
    with _answering(hub, chosen) as address:
        report = copy_registry(f"{address}/{chosen}", registry, note=note)
    report.refused |= _missing(hub, chosen, registry, report.refused)
    return report


def _missing(hub: Hub, owner: str, registry: str, known: Collection[str]) -> dict[str, str]:
    """Compare an owner's versions in the database with a copy; return the missing ones."""
    there = {
        (entry.name, entry.version): entry
        for entries in place(registry, reading=True).names().values()
        for entry in entries
    }
    missing = {}
    with hub.database.reading() as connection:
        own = select(repositories.c.id, repositories.c.name).where(
            repositories.c.namespace == require_owner(connection, owner).id,
            repositories.c.type == "models",
        )
        for row in connection.execute(own.order_by(repositories.c.name)):
            for version in versions_of(connection, row.id, hub.blobs.read):
                copy = there.get((row.name.partition("/")[2], version.name))
                reference = f"{row.name}@{version.name}"
                if not version.digest or any(each.endswith(f"/{reference}") for each in known):
                    continue
                if copy is None or copy.digest != version.digest:
                    missing[reference] = f"{registry} does not have it"
                elif copy.yanked != version.yanked:
                    missing[reference] = f"it is not yanked in {registry}"
    return missing


def _only_owner(hub: Hub) -> str:
    with hub.database.reading() as connection:
        owners = connection.execute(
            select(namespaces.c.name)
            .join(listings, listings.c.namespace == namespaces.c.id)
            .where(listings.c.entry.is_not(None))
            .distinct()
            .order_by(namespaces.c.name)
        ).scalars()
        names: list[str] = list(owners)
    if len(names) != 1:
        raise ConfigError(
            f"adapters of {len(names)} owners are on this hub, and a registry's names have none",
            expected=", ".join(names) or "an adapter",
            hint="--owner NAME, and a registry for each",
        )
    return names[0]


@contextmanager
def _answering(hub: Hub, owner: str) -> Iterator[str]:
    """Serve the hub on a free port of this machine, for this process only."""
    with hub.database.reading() as connection:
        require_owner(connection, owner)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    hub.options = replace(hub.options, hosts=known_hosts("127.0.0.1", port), public_url=None)
    before = os.environ.get(VARIABLE)
    with hub.operator_token() as token:
        os.environ[VARIABLE] = f"{address}={token}"
        try:
            with answering_in_thread(HubApp(hub), listening):
                yield address
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before


@contextmanager
def answering_in_thread(app: object, listening: socket.socket) -> Iterator[None]:
    """Serve requests on an open socket in a thread, until the context ends."""
    import uvicorn

    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        lifespan="on",
        log_level="critical",
        access_log=False,
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.005)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
