"""Choose the store that a reference points into."""

from __future__ import annotations

from pathlib import Path

from adapterhub.errors import ConfigError
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.reference import Reference
from adapterhub.registry.store import Store


def store_of(
    reference: Reference, registry: str | Path | None = None, *, allow_pickle: bool = False
) -> Store:
    """Open the store that a reference points into.

    Args:
        reference: the adapter's reference.
        registry: the folder of the local registry, if not the default one.
        allow_pickle: accept other libraries' adapters as pickles.

    Raises:
        ConfigError: the reference is a folder.
    """
    if reference.kind == "local":
        return LocalRegistry(registry)
    if reference.kind == "folder":
        raise ConfigError(f"{reference} is a folder, not a published adapter")
    from adapterhub.registry.hub import HubStore  # huggingface_hub is slow to import

    return HubStore(endpoint=reference.host, allow_pickle=allow_pickle)
