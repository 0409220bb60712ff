"""What a store of adapters can do, whatever it is made of.

A store keeps versions of adapters. A version is one adapter's files, and never changes; a tag is a
name for a version, and may move. What a folder, the Hub or a server keep them in is their own
affair: the same conformance suite holds for all.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from adapterhub.errors import ConfigError, RegistryError
from adapterhub.files.manifest import LOWER_IS_BETTER


@dataclass(frozen=True)
class Entry:
    """One published version of an adapter, as a search shows it.

    `reference` is what a user types to get it, `digest` the sha256 of its manifest, and so of all
    that the adapter computes with; `size` counts bytes, `parameters` trained numbers. `tags` name
    this version, and may move to another; `topics` say what it is about, and never change.
    """

    reference: str
    name: str
    version: str
    digest: str
    backbone: str
    fingerprint: str
    methods: tuple[str, ...]
    task: str | None
    metrics: dict[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    size: int = 0
    parameters: int = 0
    yanked: str | None = None
    description: str | None = None
    license: str | None = None
    language: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """What a search for text looks at, beside the card."""
        said = (self.name, self.backbone, self.task or "", self.description or "")
        return (*said, *self.methods, *self.tags, *self.topics, *self.language)


@dataclass(frozen=True)
class Query:
    """Which versions to find: each given field must hold; what is None or empty matches all.

    `backbone` is an id or a fingerprint, `text` starts of words in the name, task, backbone,
    methods, tags, topics, description or card; `tags` are tags or topics. Without `all_versions`
    only the newest of a name is found, and never one that was yanked. `sort` is a metric (best
    first), `size` (smallest first) or `name`.
    """

    text: str = ""
    backbone: str | None = None
    task: str | None = None
    method: str | None = None
    tags: tuple[str, ...] = ()
    metric: str | None = None
    sort: str = "name"
    all_versions: bool = False
    limit: int = 50


@dataclass(frozen=True)
class Publication:
    """What a publisher adds to an adapter's files. `beside` are files for other libraries, by name,
    that a hub keeps beside ours."""

    name: str
    version: str | None = None
    tags: tuple[str, ...] = ()
    visibility: Literal["public", "private"] = "public"
    beside: Mapping[str, bytes] = field(default_factory=dict)


class Store(Protocol):
    """A place of published adapters."""

    def resolve(
        self, name: str, version: str | None = None, *, backbone: str | None = None
    ) -> Entry:
        """The version that is meant: the newest that was not yanked, unless one is named by its
        number or by a tag. `backbone`, an id or fingerprint, decides between backbones.

        Raises:
            RegistryError: nothing of that name or version, or one on several backbones.
        """

    def get(self, entry: Entry, folder: Path | None = None) -> Path:
        """The verified files of a version, in `folder` or where the store keeps them.

        Raises:
            RegistryError: the store cannot be reached. FileError: what came is not what was
                published. OutputError: `folder` cannot be written.
        """

    def put(self, folder: Path, publication: Publication) -> Entry:
        """Publish an adapter's folder. The bytes that are there already publish as the same
        version.

        Raises:
            RegistryError: the version is taken by other bytes, or the store refuses the writer.
            FileError: the folder holds no sound adapter.
        """

    def search(self, query: Query) -> list[Entry]:
        """The versions that a query finds."""

    def versions(self, name: str, *, backbone: str | None = None) -> Sequence[Entry]:
        """All versions of a name, oldest first, yanked ones too.

        Raises:
            RegistryError: nothing of that name.
        """

    def yank(self, entry: Entry, reason: str) -> None:
        """Take a version out of searches and of what a bare name means. Who pinned it gets it
        still, with the reason."""


def chosen(found: Sequence[Entry], name: str, version: str | None) -> Entry:
    """Of all versions of a name, oldest first: the newest that stands, or the one that is named.

    Raises:
        RegistryError: there is none.
    """
    standing = [entry for entry in found if entry.yanked is None]
    if version is None and standing:
        return standing[-1]
    number = version_number(version or "")
    for entry in found:
        if version in entry.tags or (
            number is not None and number == version_number(entry.version)
        ):
            return entry
    raise RegistryError(
        f"{name!r} has no version {version}" if version else f"all versions of {name!r} are yanked",
        offenders=[f"{e.version} was yanked: {e.yanked}" for e in found if e.yanked is not None],
        expected=", ".join(
            (*(e.version for e in found), *sorted({t for e in found for t in e.tags}))
        ),
    )


def free_version(name: str, version: str | None, known: Sequence[Entry]) -> str:
    """The version that new bytes are published as: the one that is asked for, or the next.

    Raises:
        ConfigError: it is no version. RegistryError: other bytes have it.
    """
    taken = {version_number(entry.version) or 0 for entry in known}
    if version is None:
        return f"v{max(taken, default=0) + 1}"
    number = version_number(version)
    if number is None:
        raise ConfigError(f"{version!r} is no version", expected="v1, v2, ...")
    if number in taken:
        raise RegistryError(
            f"{name}@v{number} is published already, with other bytes",
            expected="a version is never changed",
            hint=f"publish it as v{max(taken) + 1}, or without a version",
        )
    return f"v{number}"


def version_number(version: str) -> int | None:
    """The number of a version: 3 for `v3` or `3`, None for a tag."""
    match = re.fullmatch(r"v?([1-9][0-9]{0,8})", version)
    return int(match[1]) if match else None


def is_fingerprint(backbone: str) -> bool:
    """Whether a text is the fingerprint of a backbone rather than its id."""
    return re.fullmatch(r"[a-z0-9]+-[0-9a-f]{64}", backbone) is not None


def ranked(entries: Sequence[Entry], query: Query) -> list[Entry]:
    """Of some entries those that a query finds, in its order; for stores without an index."""
    found = [entry for entry in entries if _fits(entry, query)]
    if query.sort in ("name", "size"):
        return sorted(found, key=lambda entry: getattr(entry, query.sort))[: query.limit]
    having = [entry for entry in found if query.sort in entry.metrics]
    sign = 1 if query.sort in LOWER_IS_BETTER else -1
    return sorted(having, key=lambda entry: sign * entry.metrics[query.sort])[: query.limit]


def words_in(text: str) -> set[str]:
    """The words of a text, without case and accents."""
    if not text.isascii():
        parts = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in parts if not unicodedata.combining(c))
    return set(re.findall(r"[^\W_]+", text.casefold()))


def _fits(entry: Entry, query: Query) -> bool:
    have = words_in(" ".join(entry.words))
    return all(
        (
            entry.yanked is None,
            query.backbone in (None, entry.backbone, entry.fingerprint),
            query.task in (None, entry.task),
            query.method is None or query.method in entry.methods,
            set(query.tags) <= {*entry.tags, *entry.topics},
            query.metric is None or query.metric in entry.metrics,
            all(any(w.startswith(start) for w in have) for start in words_in(query.text)),
        )
    )
