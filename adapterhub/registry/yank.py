"""`ah.yank`: withdraw a published version."""

from __future__ import annotations

from pathlib import Path

from adapterhub.errors import ConfigError, printable
from adapterhub.registry.reference import parse_reference
from adapterhub.registry.store import Entry
from adapterhub.registry.stores import store_of

_MOST_REASON = 1000  # characters: it is shown on one line


def yank(reference: str, reason: str, *, registry: str | Path | None = None) -> Entry:
    """Exclude a version from searches and from references without a version.

    Args:
        reference: the version, such as `polite@v1`.
        reason: shown to everyone who still requests this version.
        registry: the folder of the local registry, if not the default one.

    Returns:
        The entry as it was before.

    Raises:
        ConfigError: the reference has no version, or the reason is not one line of text.
        RegistryError: the version does not exist.
    """
    parsed = parse_reference(reference)
    if parsed.version is None:
        raise ConfigError(f"{reference!r} has no version", hint=f"{reference}@v1")
    if not 0 < len(reason) <= _MOST_REASON or printable(reason) != reason or "\n" in reason:
        raise ConfigError(
            "invalid reason", expected=f"one line of at most {_MOST_REASON} printable characters"
        )
    store = store_of(parsed, registry)
    entry = store.resolve(parsed.name, parsed.version)
    store.yank(entry, reason)
    return entry
