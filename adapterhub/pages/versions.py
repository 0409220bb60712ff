"""The content of a registry for its pages: versions, and the rows of lists of them.

A version has its manifest, card and signatures; a list has a row for each version that is found.

Files are read once, and tensors are never read. Unreadable versions are kept with their error.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from adapterhub.config.options import from_file
from adapterhub.errors import AdapterhubError, FileError
from adapterhub.files.card import CARD_FILE, MAX_CARD_BYTES
from adapterhub.files.manifest import MAX_MANIFEST_BYTES, Manifest
from adapterhub.files.native import MANIFEST_FILE
from adapterhub.files.shown_table import ERRORS, ScoreError, ShownTable, TableCell, recorded_errors
from adapterhub.pages.page import lower_is_better, number_text
from adapterhub.registry.registry import Registry, line_of
from adapterhub.registry.store import Entry, Reference, folder_of_id, unportable
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


def read_published(registry: Registry, contents: Mapping[str, Contents]) -> Iterator[PublishedName]:
    """Read the readable versions of the names found in a registry."""
    read = partial(_name, registry)
    if registry.storage.readers == 1:
        yield from map(read, contents.items())
        return
    with ThreadPoolExecutor(registry.storage.readers) as pool:
        yield from pool.map(read, contents.items())


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
        signatures = registry.signatures(entry)
        return tuple(checked_signatures(signatures, subject, Trust())), ""
    except AdapterhubError as error:
        return (), line_of(error)


@cache
def _main_metric(task: str | None) -> str | None:
    from adapterhub.tasks import TASKS

    return TASKS[task]().main_metric if task in TASKS else None


_TITLES = ("adapter", "backbone", "task", "method", "score", "trained", "size", "published", "tags")
_MOST_TEXT = 160  # characters of a description covered by the search


@dataclass(frozen=True)
class ListedVersion:
    """A version as shown in lists.

    Attributes:
        entry: its entry in the registry's list.
        score: its main score.
        signers: the ids of the keys with a valid signature.
        is_current: whether it is the newest version of its name that was not yanked.
    """

    entry: Entry
    score: MainScore | None
    signers: tuple[str, ...]
    is_current: bool


def listed_versions(name: PublishedName) -> list[ListedVersion]:
    """Return the versions of a name that match a search, the newest first."""
    return [
        ListedVersion(v.entry, v.score, v.signers, v is name.current)
        for v in reversed(name.versions)
        if v.entry.yanked is None
    ]


FIELDS: dict[str, tuple[str, Callable[[ListedVersion], Iterable[str]]]] = {
    "backbone": ("Backbone", lambda each: (each.entry.backbone,)),
    "task": ("Task", lambda each: filter(None, (each.entry.task,))),
    "method": ("Method", lambda each: each.entry.methods),
    "language": ("Language", lambda each: each.entry.language),
    "dataset": ("Dataset", lambda each: datasets_of(each.entry)),
    "tag": ("Tag", lambda each: topics_of(each.entry)),
    "signer": ("Signer", lambda each: each.signers),
}
"""A search filter: the name in the form, its title, and the values of a version."""


def field_values(field: str, versions: Iterable[ListedVersion]) -> list[str]:
    """Return the values of a field, the most frequent first."""
    read = FIELDS[field][1]
    counts = Counter(value for each in versions for value in read(each))
    return [value for value, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def newest_first(versions: Iterable[ListedVersion]) -> list[ListedVersion]:
    """Sort versions by date, the newest first; those without a date come last."""
    return sorted(versions, key=lambda v: (v.entry.published or "", v.entry.name), reverse=True)


def listing(
    versions: Sequence[ListedVersion], root: str, path_of: Callable[[Entry], str] | None = None
) -> ShownTable:
    """Return a table of versions; `root` is the path from the page to the root of the site.

    `path_of` returns the path of a version's page, by default the path of a file of the site.
    """
    return ShownTable(_TITLES, [_cells(v, root, path_of or adapter_page_path) for v in versions])


def _cells(each: ListedVersion, root: str, path_of: Callable[[Entry], str]) -> list[TableCell]:
    entry, score = each.entry, each.score
    at = "" if each.is_current else f"@{entry.version}"
    return [
        TableCell(f"{entry.name}{at}", link=root + path_of(entry)),
        TableCell(entry.backbone),
        TableCell(entry.task or "-"),
        TableCell(" + ".join(entry.methods) or "-"),
        TableCell(score_words(score), score.value if score else None),
        TableCell(f"{entry.parameters:,}", entry.parameters),
        TableCell(size_text(entry.size), entry.size),
        TableCell((entry.published or "-")[:10]),
        TableCell(", ".join(topics_of(entry))),
    ]


def score_words(score: MainScore | None) -> str:
    """Format a main score with the name of its metric."""
    return f"{score.metric} {number_text(score.value)}" if score else "-"


def size_text(size: int) -> str:
    """Format a number of bytes for lists."""
    if size < 1000:
        return f"{size} B"
    return f"{size / 1e3:.0f} kB" if size < 1e6 else f"{size / 1e6:.2f} MB"


def adapter_page_path(entry: Entry) -> str:
    """Return the path of an adapter's page, relative to the root of a site."""
    return f"adapters/{folder_of_id(entry.backbone)}/{entry.name}.html"


def file_part(text: str) -> str:
    """Return a path component for untrusted text; different texts get different components."""
    part = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60]
    if part == text and part and not unportable(part):
        return part
    return f"{part or 'x'}-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]}"


def rows_script(versions: Sequence[ListedVersion]) -> str:
    """Return the script that passes the rows to `filter.js`: texts once, and their indices.

    The versions of a name are consecutive, the newest first.
    """
    places: dict[str, int] = {}

    def at(text: str) -> int:
        return places.setdefault(text, len(places))

    def number(text: str | None) -> int:
        return -1 if not text else at(text)

    rows = [_row(each, at, number) for each in versions]
    values = {field: [at(value) for value in field_values(field, versions)] for field in FIELDS}
    data = {"strings": [*places], "rows": rows, "values": values}
    # ASCII only, and without <, which an HTML parser might read as the end of a script.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"adapterhubRows({text});\n"


def _row(
    each: ListedVersion, at: Callable[[str], int], number: Callable[[str | None], int]
) -> list[Any]:
    entry, score = each.entry, each.score
    return [
        entry.name,
        entry.version,
        number(entry.backbone),
        number(entry.task),
        [at(method) for method in entry.methods],
        number(score.metric if score else None),
        float(f"{score.value:.6g}") if score else None,
        entry.parameters,
        entry.size,
        (entry.published or "")[:10],
        [at(tag) for tag in topics_of(entry)],
        [at(dataset) for dataset in datasets_of(entry)],
        [at(language) for language in entry.language],
        [at(signer) for signer in each.signers],
        (entry.description or "")[:_MOST_TEXT],
        int(score is not None and lower_is_better(score.metric)),
        int(each.is_current),
    ]
