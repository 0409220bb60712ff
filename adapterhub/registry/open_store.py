"""Resolve a reference to a folder or a store.

A bare name is the folder of that name in the working directory if it contains an adapter. Otherwise
it is in the local registry; if the registry lacks it, the error lists the contents of the folder.
It is always in the registry

 - with a version or a tag (`name@v1`), or if the registry is named (`--registry`);
 - if signatures are required: a stranger's folder must not stand for the published adapter.

Lock files name published versions only, and hubs are never folders.
"""

from __future__ import annotations

import os
from pathlib import Path

from adapterhub.config.user_folders import is_folder
from adapterhub.errors import ConfigError, warn_user
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.reference import (
    Reference,
    holds_adapter,
    is_bucket,
    is_name,
    is_remote,
    parse_reference,
)
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Store
from adapterhub.registry.trust import current_trust


def read_reference(
    location: str | Path | Reference,
    registry: str | Path | None = None,
    *,
    signed: bool = False,
) -> Reference:
    """Parse a path or a reference; an existing folder may be written without a leading ./.

    `signed` tells that the caller requires a signature.

    Raises:
        ConfigError: a text that has none of the four forms.
    """
    if isinstance(location, Reference):
        return location
    if isinstance(location, Path):
        return Reference("folder", str(location))
    # A folder in the current one never stands for a hub: a stranger's project may have hf:a/b.
    if not is_remote(location) and is_folder(location):
        if "/" in location or os.sep in location:
            return Reference("folder", location)
        if registry is None and "@" not in location and _is_folder(location, signed):
            return Reference("folder", f"./{location}")
    return parse_reference(location)


def named_reference(text: str, registry: str | Path | None = None) -> tuple[str, Reference]:
    """Parse `NAME=ADAPTER` or `ADAPTER`, whose name is then "".

    A folder whose path contains a `=`, such as a sweep's, is an ADAPTER.

    Raises:
        ConfigError: the adapter is not a reference.
    """
    name, equals, rest = text.partition("=")
    if not equals or is_folder(text) or "/" in name or "\\" in name:
        return "", read_reference(text, registry)
    return name, read_reference(rest, registry)


def _is_folder(name: str, signed: bool) -> bool:
    """Return whether a bare name stands for the existing folder of that name; see the module."""
    folder = Path(name)
    if not is_name(name):  # such as "my run", which is not valid in a registry
        return True
    published = registry_at(None).has(name)
    if not holds_adapter(folder):
        return not published  # raises the error of a folder without an adapter
    if current_trust(signed=signed).required:
        return False
    if published:
        warn_user(
            f"{name!r} is the folder ./{name} here; write {name}@VERSION for the published one"
        )
    return True


def registry_at(location: str | Path | None) -> Registry:
    """Open a user's own registry: a folder, a bucket, or a web server's folder.

    None is `$ADAPTERHUB_REGISTRY` or, by default, the folder in the user's data.

    Raises:
        ConfigError: the library for buckets is missing, or the URL is not valid.
    """
    named = location if location is not None else os.environ.get("ADAPTERHUB_REGISTRY")
    if is_bucket(named):
        from adapterhub.registry.bucket import Bucket

        return Registry(Bucket(str(named)))
    if str(named).startswith(("https://", "http://")):
        from adapterhub.registry.http_storage import WebsiteRegistry  # httpx2 is slow to import

        return WebsiteRegistry(str(named))
    return LocalRegistry(location)


def store_of(
    reference: Reference, registry: str | Path | None = None, *, allow_pickle: bool = False
) -> Store:
    """Open the store that a reference points into.

    `allow_pickle` accepts other libraries' adapters as pickles.

    Raises:
        ConfigError: the reference is a folder.
    """
    if reference.kind == "local":
        return registry_at(registry)
    if reference.kind == "folder":
        raise ConfigError(f"{reference} is a folder, not a published adapter")
    from adapterhub.registry.hub import HubStore  # huggingface_hub is slow to import

    return HubStore(endpoint=reference.host, allow_pickle=allow_pickle)
