"""The content of a registry for its pages: versions with manifest, card and signatures.

Files are read once, and tensors are never read. Unreadable versions are kept with their error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

from adapterhub.config.options import from_file
from adapterhub.errors import AdapterhubError, FileError
from adapterhub.files.card import CARD_FILE, MAX_CARD_BYTES
from adapterhub.files.manifest import MAX_MANIFEST_BYTES, Manifest
from adapterhub.files.native import MANIFEST_FILE
from adapterhub.files.shown_table import ERRORS, ScoreError, recorded_errors
from adapterhub.registry.registry import Registry, line_of
from adapterhub.registry.store import Entry, Reference
from adapterhub.registry.trust import CheckedSignature, Trust, checked_signatures, signed_subject
from adapterhub.registry.version_files import Contents

_DATASET = "dataset:"  # prefix of a data set in a topic


@dataclass(frozen=True)
class MainScore:
    """The main score of a version: its metric, value and error."""

    metric: str
    value: float
    error: ScoreError | None = None


@dataclass(frozen=True)
class PublishedVersion:
    """A version with the content of its page.

    Attributes:
        entry: its entry in the registry.
        manifest: its manifest without tensor shapes, which are long.
        card: the text of its card.
        signatures: its signatures, after verification.
        unchecked: why they could not be verified; "" if they were.
        manifest_size: the bytes of its manifest.
    """

    entry: Entry
    manifest: Manifest
    card: str = ""
    signatures: tuple[CheckedSignature, ...] = ()
    unchecked: str = ""
    manifest_size: int = 0

    @property
    def signers(self) -> tuple[str, ...]:
        """The ids of the keys with a valid signature."""
        return tuple(dict.fromkeys(c.signature.signer.id for c in self.signatures if c.is_valid))

    @property
    def score(self) -> MainScore | None:
        """The main metric of its task, or else its first metric."""
        metrics = self.manifest.metrics
        chosen = "mean" if self.manifest.heads else _main_metric(self.manifest.task)
        name = chosen if chosen in metrics else min(metrics, default=None)
        if name is None:
            return None
        return MainScore(name, metrics[name], self.errors.get(name))

    @property
    def errors(self) -> dict[str, ScoreError]:
        """The errors of its scores, where they are recorded."""
        return recorded_errors(self.manifest.training.get(ERRORS))


@dataclass(frozen=True)
class PublishedName:
    """The versions of a name for one backbone, oldest first, and the errors of broken versions."""

    folder: str
    name: str
    versions: tuple[PublishedVersion, ...]
    broken: dict[str, str]

    @property
    def current(self) -> PublishedVersion:
        """The newest version that was not yanked, or the newest if all were."""
        available = [each for each in self.versions if each.entry.yanked is None]
        return (available or self.versions)[-1]


def read_published(registry: Registry, found: Mapping[str, Contents]) -> Iterator[PublishedName]:
    """Read the readable versions of the names found in a registry."""
    read = partial(_name, registry)
    if registry.storage.readers == 1:
        yield from map(read, found.items())
        return
    with ThreadPoolExecutor(registry.storage.readers) as pool:
        yield from pool.map(read, found.items())


def datasets_of(entry: Entry) -> tuple[str, ...]:
    """Return the data sets named by the topics of a version."""
    return tuple(t.removeprefix(_DATASET) for t in entry.topics if t.startswith(_DATASET))


def topics_of(entry: Entry) -> tuple[str, ...]:
    """Return the tags and topics of a version that do not name a data set."""
    return (*entry.tags, *(topic for topic in entry.topics if not topic.startswith(_DATASET)))


def _name(registry: Registry, item: tuple[str, Contents]) -> PublishedName:
    path, contents = item
    versions, broken = [], {v: line_of(error) for v, error in contents.broken.items()}
    for entry in contents.entries:
        try:
            versions.append(_version(registry, f"{path}/{entry.version}", entry))
        except AdapterhubError as error:
            broken[entry.version] = line_of(error)
    folder, _, name = path.partition("/")
    return PublishedName(folder, name, tuple(versions), broken)


def _version(registry: Registry, path: str, entry: Entry) -> PublishedVersion:
    stored = registry.storage.read(f"{path}/{MANIFEST_FILE}", MAX_MANIFEST_BYTES)
    if stored is None or hashlib.sha256(stored.data).hexdigest() != entry.digest:
        raise FileError(f"{path}/{MANIFEST_FILE} has changed while it was read")
    signatures, unchecked = _signatures(registry, entry)
    return version_to_show(stored.data, entry, _card(registry, path), signatures, unchecked)


def version_to_show(
    manifest: bytes,
    entry: Entry,
    card: str,
    signatures: tuple[CheckedSignature, ...] = (),
    unchecked: str = "",
) -> PublishedVersion:
    """Return a version for its page, given its verified manifest.

    Raises:
        FileError: the manifest is invalid.
    """
    # The digest identifies the listed bytes, so they need no further check.
    fields = json.loads(manifest)
    del fields["sha256"]
    fields["tensors"] = {}
    parsed, offenders = from_file(Manifest, fields)
    if parsed is None:
        raise FileError(f"the manifest of {entry.reference} cannot be read", offenders=offenders)
    return PublishedVersion(entry, parsed, card, signatures, unchecked, len(manifest))


def _card(registry: Registry, path: str) -> str:
    try:
        stored = registry.storage.read(f"{path}/{CARD_FILE}", MAX_CARD_BYTES)
    except FileError:  # the card is optional
        return ""
    return stored.data.decode("utf-8", "replace") if stored else ""


def _signatures(registry: Registry, entry: Entry) -> tuple[tuple[CheckedSignature, ...], str]:
    """Verify the signatures of a version, ignoring locally trusted keys: the page is for others."""
    reference = Reference("local", entry.name, entry.version)
    subject = signed_subject(reference, entry.digest, entry.name, entry.version)
    try:
        found = registry.signatures(entry)
        return tuple(checked_signatures(found, subject, Trust())), ""
    except AdapterhubError as error:
        return (), line_of(error)


@cache
def _main_metric(task: str | None) -> str | None:
    from adapterhub.tasks import TASKS

    return TASKS[task]().main_metric if task in TASKS else None
