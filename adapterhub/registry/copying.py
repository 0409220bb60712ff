"""`adapterhub registry copy`: copy the versions of one registry or owner to another, unchanged.

A copy has the bytes, number, tags, yank and signatures of its original, and in a user's own
registry also the date. Versions that exist already, by digest, are skipped, so an interrupted copy
resumes. Nothing is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from adapterhub.errors import AdapterhubError, ConfigError, FileError, RegistryError
from adapterhub.registry.local import registry_at, store_of
from adapterhub.registry.registry import Registry, line_of
from adapterhub.registry.store import (
    NAME_RULE,
    Entry,
    Publication,
    Store,
    is_name,
    parse_reference,
    version_number,
)

if TYPE_CHECKING:
    from adapterhub.registry.hub import HubStore

_AT_ONCE = 8  # names that are copied concurrently
_Key = tuple[str, str]  # backbone and name, without the owner


@dataclass
class CopyReport:
    """The copied and existing versions, by reference, and why others were not copied."""

    copied: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unchanged: int = 0
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """A user's own registry, or the repositories of one owner on a hub."""

    store: Store
    owner: str = ""

    def names(self, damaged: dict[str, str] | None = None) -> dict[_Key, Sequence[Entry]]:
        """Return all versions of each name, oldest first, including yanked ones.

        `damaged` receives the unreadable versions of a hub, with the reason.
        """
        if isinstance(self.store, Registry):
            by_name: dict[_Key, list[Entry]] = {}
            for contents in self.store.everything().values():
                for entry in contents.entries:
                    by_name.setdefault((entry.backbone, entry.name), []).append(entry)
            return {key: by_name[key] for key in sorted(by_name)}
        named: dict[_Key, Sequence[Entry]] = {}
        hub = cast("HubStore", self.store)
        for name, entries, unreadable in hub.everything_of(self.owner):
            (damaged if damaged is not None else {}).update(unreadable)
            if own := [entry for entry in entries if entry.fingerprint]:
                named[own[-1].backbone, name.partition("/")[2]] = own
        return named

    def signers(self, entry: Entry) -> set[str]:
        """Return the ids of the keys that signed a version, even after publication."""
        if isinstance(self.store, Registry):
            return {*entry.signers}
        return {signature.signer.id for signature in self.store.signatures(entry)}

    def full_name(self, name: str) -> str:
        """Return the name of an adapter in the store."""
        return f"{self.owner}/{name}" if self.owner else name


def copy_registry(
    source: str,
    target: str,
    *,
    allow_findings: Iterable[str] = (),
    note: Callable[[str], None] = lambda line: None,
) -> CopyReport:
    """Copy all versions of a registry, or of an owner on a hub, to another.

    Args:
        source: a folder, a bucket's URL, the URL of a registry on a web server, or `hf:OWNER` or
            `https://host/OWNER` for the repositories of an owner on a hub.
        target: the same, without web servers; a new repository on a hub is private.
        allow_findings: codes, from the report, of texts that look private but are not.
        note: receives a line for each version that is copied.

    Returns:
        The versions that were copied, and those that were not.

    Raises:
        ConfigError: `source` or `target` is not a place, or both are the same.
        RegistryError: one of them cannot be reached.
    """
    origin, destination = place(source, reading=True), place(target)
    if source.rstrip("/") == target.rstrip("/"):
        raise ConfigError(f"{source} would be copied to itself")
    there, report = destination.names() if _lists(destination.store) else {}, CopyReport()

    def copy(key: _Key, entries: Sequence[Entry]) -> None:
        known = {entry.digest: entry for entry in there.get(key, ())}
        for entry in entries:
            try:
                done = _copy(origin, destination, entry, key[1], known, tuple(allow_findings))
            except AdapterhubError as error:
                report.refused[entry.reference] = line_of(error)
                continue
            if done is None:
                report.unchanged += 1
                continue
            (report.changed if entry.digest in known else report.copied).append(entry.reference)
            note(f"{entry.reference}: {done}")

    store = destination.store
    indexing = store.indexing_at_the_end() if isinstance(store, Registry) else nullcontext()
    with indexing, ThreadPoolExecutor(_AT_ONCE) as pool:
        for each in [pool.submit(copy, *item) for item in origin.names(report.refused).items()]:
            each.result()
    return report


def place(text: str, *, reading: bool = False) -> Place:
    """Open the place that a text names: a user's own registry, or an owner on a hub.

    Raises:
        ConfigError: it is neither.
    """
    if text.startswith(("https://", "http://")):
        if reading and _lists(site := registry_at(text)):
            return Place(site)
        owner = text.rstrip("/").rpartition("/")[2]
    elif text.startswith("hf:"):
        owner = text.removeprefix("hf:").strip("/")
    else:
        return Place(registry_at(text))
    if not is_name(owner):
        raise ConfigError(f"{text!r} names no owner of repositories on a hub", expected=NAME_RULE)
    return Place(store_of(parse_reference(f"{text.rstrip('/')}/name")), owner)


def _lists(store: Store) -> bool:
    """Return whether a registry can list its contents: not a new folder, nor a hub's address."""
    if not isinstance(store, Registry):
        return True
    try:
        store.storage.folders()
    except (FileError, RegistryError):
        return False
    return True


def _copy(
    origin: Place,
    destination: Place,
    entry: Entry,
    name: str,
    known: dict[str, Entry],
    allowed: tuple[str, ...],
) -> str | None:
    """Copy one version, or its later changes; return the action, None if there was none."""
    copy, store = known.get(entry.digest), destination.store
    tags = tuple(tag for tag in entry.tags if copy is None or tag not in copy.tags)
    done = []
    if copy is None or tags:
        is_numbered = version_number(entry.version) is not None  # otherwise it is a hub's commit
        version = entry.version if is_numbered and not copy else None
        publication = Publication(
            destination.full_name(name), version, tags, "private",
            allowed=allowed, published=entry.published,
        )  # fmt: skip
        new = store.put(origin.store.get(entry), publication)
        done.append(f"tagged {', '.join(tags)}" if copy else "copied")
        if copy is None and (added := origin.store.signatures(entry)):
            store.add_signatures(new, added)
        copy = copy or new
    if entry.digest in known and origin.signers(entry) - destination.signers(copy):
        store.add_signatures(copy, origin.store.signatures(entry))
        done.append("signed")
    if entry.yanked is not None and copy.yanked is None:
        store.yank(copy, entry.yanked)
        done.append("yanked")
    return ", ".join(done) or None
