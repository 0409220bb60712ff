"""`ah.search`: find adapters in a local registry or on a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.reference import Reference, parse_reference
from adapterhub.registry.store import Entry, Query, Store
from adapterhub.registry.stores import store_of


def search(
    text: str = "",
    *,
    registry: str | Path | None = None,
    hub: bool | str = False,
    **fields: Any,
) -> list[Entry]:
    """Find the adapters that match a query, in a local registry or on a hub.

    Args:
        text: words or prefixes of words to find.
        registry: the folder of the local registry, if not the default one.
        hub: True to search the Hub instead, or the URL of a self-hosted hub.
        fields: the other fields of `Query`.

    Raises:
        RegistryError: the hub cannot be reached, or the folder of the registry does not exist.
        ConfigError: `hub` is not a valid URL.
    """
    return _store(registry, hub).search(Query(text, **fields))


def _store(registry: str | Path | None, hub: bool | str) -> Store:
    if isinstance(hub, str):
        return store_of(parse_reference(f"{hub.rstrip('/')}/owner/name"))
    return store_of(Reference("hub", "")) if hub else LocalRegistry(registry)
