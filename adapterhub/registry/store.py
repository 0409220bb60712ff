"""The interfaces of a store of adapters and of a registry's files, and rules common to all stores.

A store keeps versions of adapters. A version is one adapter's files and never changes; a tag is a
movable name for a version. The layout of the files is up to the store; tests/registry/test_store.py
runs one conformance suite against every implementation.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from adapterhub.errors import (
    ConfigError,
    NotPublishedError,
    RegistryError,
    YankedError,
    one_line,
    spelled_like,
)
from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.files.native import Saved
from adapterhub.files.signature import Signature

DATE_FORMAT = "%Y-%m-%dT%H:%M:%SZ"  # of `Entry.published`
SORTS = ("name", "size", "newest")  # values of `Query.sort`, in addition to metrics
MOST_VERSIONS = 999_999_999  # nine digits, see `version_number`


@dataclass(frozen=True)
class Entry:
    """One published version of an adapter, as listed in search results.

    Attributes:
        reference: the text that refers to this version.
        name: the name in the registry.
        version: the version, such as v3; on a hub a commit.
        digest: the sha256 of the manifest, which contains the sha256 of the tensors.
        backbone: the id of its backbone.
        fingerprint: the fingerprint of the backbone's weights.
        methods: the names of its methods.
        task: the kind of model, if it has a head.
        metrics: the scores of its training run.
        tags: names of this version, which may move to another.
        size: in bytes.
        parameters: the number of trained parameters.
        yanked: the reason for withdrawal; None if it was not withdrawn.
        description: one sentence.
        license: an identifier such as apache-2.0.
        language: language codes such as en.
        topics: search keywords; unlike tags they never change.
        published: a time in UTC; None where it is not recorded.
        signers: the ids of the keys that signed it, unchecked.
        data: the sha256 of the rows that it was trained and evaluated on.
        evaluation: the sha256 of the rows of its scores; older adapters do not have it.
        test: the sha256 of the rows of the scores that begin with `test_`.
    """

    def __repr__(self) -> str:
        scores = "".join(f", {n} {v:.4g}" for n, v in [*self.metrics.items()][:2])
        tags = f" ({', '.join(self.tags)})" if self.tags else ""
        what = f"{' + '.join(self.methods)} for {self.backbone}, {self.task or 'no head'}"
        return one_line(f"<Entry {self.reference}{tags}: {what}{scores}>", 240)

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
    published: str | None = None
    signers: tuple[str, ...] = field(default=(), compare=False)  # added without changing it
    data: str | None = None
    evaluation: str | None = None
    test: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The texts that a text search covers, in addition to the card."""
        texts = (self.name, self.backbone, self.task or "", self.description or "")
        return (*texts, *self.methods, *self.tags, *self.topics, *self.language)


@dataclass(frozen=True)
class Query:
    """Search criteria, combined with AND; a field that is None or empty matches everything.

    `backbone` is an id or a fingerprint. `text` holds prefixes of words in the name, task,
    backbone, methods, tags, topics, description or card. `tags` are tags or topics. Unless
    `all_versions` is set, only the newest version of each name is returned; yanked versions never
    are. `sort` is a metric (best first), `newest` (first), `size` (smallest first) or `name`.
    `owner` is the owner of repositories on a hub.
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
    owner: str = ""


@dataclass(frozen=True)
class Publication:
    """Options for the publication of an adapter's folder.

    `allowed` has the codes of findings, such as a text that looks like a password, that the
    publisher has read and accepts. `published` is the date of a copy, where a store keeps dates;
    otherwise it is now.
    """

    name: str
    version: str | None = None
    tags: tuple[str, ...] = ()
    visibility: Literal["public", "private"] = "public"
    allowed: tuple[str, ...] = ()
    published: str | None = None


class Store(Protocol):
    """A store of published adapters."""

    def resolve(
        self, name: str, version: str | None = None, *, backbone: str | None = None
    ) -> Entry:
        """Find the version that a name refers to; without one, the newest that is not yanked.

        The id or fingerprint of a backbone chooses between adapters of the same name.

        Raises:
            RegistryError: no such name or version, or the name exists for several backbones.
        """

    def get(self, entry: Entry, folder: Path | None = None) -> Path:
        """Return the folder with the verified files of a version.

        The files are copied to `folder` if it is given; otherwise the store's own copy is returned.

        Raises:
            RegistryError: the store cannot be reached.
            FileError: the files differ from the published ones.
            OutputError: `folder` cannot be written.
        """

    def put(self, folder: Path | Saved, publication: Publication) -> Entry:
        """Publish an adapter's folder; bytes that are already published keep their version.

        peft's files in the folder are published with it, and added to a version without them.

        Raises:
            RegistryError: the version is taken by other bytes, or the store denies write access.
            FileError: the folder holds no valid adapter.
        """

    def version_for(self, folder: Path | Saved, publication: Publication) -> tuple[str, bool]:
        """Return the version that `put` would return, and whether it is already published.

        Raises:
            ConfigError: the requested version, or a tag, is invalid.
            RegistryError: the version is taken by other bytes, or the store denies write access.
            FileError: the folder holds no valid adapter.
        """

    def search(self, query: Query) -> list[Entry]:
        """Return the versions that match a query, in its order."""

    def versions(self, name: str, *, backbone: str | None = None) -> Sequence[Entry]:
        """List all versions of a name, oldest first, including yanked ones.

        Raises:
            RegistryError: no adapter has this name.
        """

    def yank(self, entry: Entry, reason: str) -> None:
        """Exclude a version from searches and from references without a version.

        References to exactly this version still work, with a warning that gives the reason.
        """

    def tag(self, entry: Entry, tag: str) -> None:
        """Let a tag name a version, whether it exists or not.

        Raises:
            ConfigError: the tag is invalid.
            RegistryError: the version was deleted, or the store denies it.
        """

    def untag(self, entry: Entry, tag: str) -> None:
        """Remove a tag of the name of a version.

        Raises:
            RegistryError: the store denies it.
        """

    def delete(self, name: str, version: str, *, backbone: str | None = None) -> None:
        """Delete a version permanently; its number is not used again.

        Args:
            name: the adapter's name.
            version: the version number.
            backbone: a backbone's id or fingerprint, to choose between adapters of a name.

        Raises:
            ConfigError: the store does not support deletion.
            RegistryError: no such version, or the store denies it.
        """

    def signatures(self, entry: Entry) -> Sequence[Signature]:
        """List signatures that are not in the folder that `get` returns, unchecked.

        Raises:
            RegistryError: the store cannot be reached.
            FileError: the signature file is broken.
        """

    def add_signatures(self, entry: Entry, signatures: Sequence[Signature]) -> None:
        """Add signatures to a published version; its other files do not change.

        Raises:
            RegistryError: the store denies write access.
            OutputError: there are too many signatures.
        """


class ConflictError(Exception):
    """Another writer was first: the file exists, or has changed."""


@dataclass(frozen=True)
class Stored:
    """The bytes of a file, and the tag that changes with them, if the storage has tags."""

    data: bytes
    tag: str = ""


class Storage(Protocol):
    """The files of a registry: in a folder, a bucket, or a dict in tests.

    Paths are relative to the registry, with slashes: BACKBONE/NAME/v1/adapter.json.

    Attributes:
        location: the folder or the URL.
        is_atomic: whether a version appears in one step; otherwise its manifest is written last,
            and a version without one is an unfinished upload.
        readers: the number of files read concurrently.
    """

    location: str
    is_atomic: bool
    readers: int

    def exists(self) -> bool:
        """Return whether there is anything to read.

        Raises:
            RegistryError: it should exist and does not, or cannot be reached.
        """

    def folders(self, prefix: str = "") -> list[str]:
        """List the paths of the folders directly below a prefix, sorted; hidden ones excepted."""

    def files(self, prefix: str = "") -> dict[str, str]:
        """Return the tags of the files below a prefix by path, sorted.

        The prefix is "", `BACKBONE/` or `BACKBONE/NAME/`.

        Raises:
            FileError: a link is in the way.
            RegistryError: the storage cannot be read.
        """

    def read(self, path: str, most: int, tag: str = "") -> Stored | None:
        """Read a file of at most `most` bytes; None if it does not exist.

        Given the tag of the file in a listing, a cached copy with this tag may be returned.

        Raises:
            FileError: it is larger than `most` bytes, or not a regular file.
            RegistryError: the storage cannot be read.
        """

    def reread(self, path: str, most: int) -> Stored | None:
        """Read a file like `read`; use a cached copy while it is current.

        Raises:
            FileError: it is larger than `most` bytes, or not a regular file.
            RegistryError: the storage cannot be read.
        """

    def create(self, path: str, source: Saved, digest: str, date: bytes) -> None:
        """Create a version from the files of an adapter; an interruption leaves none.

        `digest` is the sha256 of its manifest, `date` the contents of the date file.

        Raises:
            FileError: the folder does not hold this adapter.
            OutputError: the storage cannot be written.
            RegistryError: the same, for a bucket.
        """

    def check_room(self, size: int) -> None:
        """Refuse files that do not fit, before they are read; a bucket has no limit.

        Raises:
            OutputError: there is not enough space.
        """
        return None

    def replace(self, path: str, data: bytes, old: Stored | None) -> None:
        """Replace a file if it is still `old`; `old` is None if the file did not exist.

        Raises:
            ConflictError: another writer was first.
            OutputError: the storage cannot be written.
            RegistryError: the same, for a bucket.
        """

    def remove(self, path: str) -> None:
        """Remove a version so that no reader sees a partial one."""

    def get(self, path: str, digest: str, folder: Path | None) -> Path:
        """Return a local folder with the verified files of a version.

        It is `folder`, which is new, or the storage's own folder or cached copy. `digest` is the
        sha256 of the published manifest.

        Raises:
            FileError: the files differ from the published ones.
            OutputError: `folder` exists or cannot be written.
            RegistryError: the storage cannot be read.
        """

    def check(self, path: str, digest: str) -> None:
        """Read all files of a version as they are stored now.

        Raises:
            FileError: one is missing or damaged.
            RegistryError: the storage cannot be read.
        """

    def writing(self, path: str) -> AbstractContextManager[None]:
        """Exclude other writers of the name at a path, where the storage can."""


def choose_version(entries: Sequence[Entry], name: str, version: str | None) -> Entry:
    """Choose a version by its number or tag, or the newest one that is not yanked.

    `entries` are all versions of the name, oldest first.

    Raises:
        RegistryError: no such version, or all versions are yanked.
    """
    available = [entry for entry in entries if entry.yanked is None]
    if version is None and available:
        return available[-1]
    number = version_number(version or "")
    for entry in entries:
        if version in entry.tags or (
            number is not None and number == version_number(entry.version)
        ):
            return entry
    tags = sorted({tag for entry in entries for tag in entry.tags})
    kind = NotPublishedError if version or not entries else YankedError
    raise kind(
        f"{name!r} has no version {version}" if version else f"all versions of {name!r} are yanked",
        offenders=[f"{e.version} was yanked: {e.yanked}" for e in entries if e.yanked is not None],
        expected=", ".join((*(entry.version for entry in entries), *tags)),
    )


def free_version(name: str, version: str | None, entries: Sequence[Entry], highest: int = 0) -> str:
    """Return the version to publish new bytes as: the requested one, or the next number.

    `highest` is the highest version ever published, if the store records it; the numbers below that
    no entry has belong to deleted versions.

    Raises:
        ConfigError: `version` is not a version number.
        RegistryError: `version` is already published with other bytes, or may have been.
    """
    taken = {version_number(entry.version) or 0 for entry in entries}
    next_free = max(taken | {highest}) + 1
    if version is None and next_free <= MOST_VERSIONS:
        return f"v{next_free}"
    if version is None:
        raise RegistryError(
            f"no version number is left for {name}: its highest version is v{next_free - 1}",
            hint="publish it under another name",
        )
    number = version_number(version)
    if number is None:
        raise ConfigError(f"invalid version {version!r}", expected="v1, v2, ...")
    if number in taken:
        raise RegistryError(
            f"{name}@v{number} is already published with other bytes",
            expected="a version never changes",
            hint=f"publish it as v{next_free}, or without a version",
        )
    if number <= highest:
        raise RegistryError(
            f"{name}@v{number} cannot be published: the highest version so far is v{highest}",
            expected="a new number, as that of a deleted version is not used again",
            hint=f"publish it as v{next_free}, or without a version",
        )
    return f"v{number}"


def version_number(version: str) -> int | None:
    """Parse a version number: 3 for `v3` or `3`, None for a tag."""
    match = re.fullmatch(r"v?([1-9][0-9]{0,8})", version)
    return int(match[1]) if match else None


def is_version_folder(name: str) -> bool:
    """Return whether a name is the name of a version's folder: v1, v2, ..."""
    return name.startswith("v") and version_number(name) is not None


def is_fingerprint(backbone: str) -> bool:
    """Return whether a text is a backbone's fingerprint rather than its id."""
    return re.fullmatch(r"[a-z0-9]+-[0-9a-f]{64}", backbone) is not None


def filter_entries(
    entries: Iterable[Entry], query: Query, words_of: Callable[[Entry], str] | None = None
) -> list[Entry]:
    """Filter and sort entries by a query; `words_of` returns `word_text` of an entry."""
    words_of = words_of or (lambda entry: word_text(entry.words))
    prefixes = word_text([query.text]).split()
    matches = [
        entry
        for entry in entries
        if _matches(entry, query)
        and (not prefixes or all(f" {prefix}" in words_of(entry) for prefix in prefixes))
    ]
    if query.sort not in SORTS:
        matches = [entry for entry in matches if query.sort in entry.metrics]
    keys: dict[str, Callable[[Entry], Any]] = {
        "name": lambda entry: entry.name,
        "size": lambda entry: entry.size,
        "newest": lambda entry: entry.published or "",  # UTC: in the order of the texts
    }
    key = keys.get(query.sort, lambda entry: entry.metrics[query.sort])
    rising = query.sort in ("name", "size", *LOWER_IS_BETTER)
    return sorted(matches, key=key, reverse=not rising)[: query.limit]


def word_text(texts: Iterable[str]) -> str:
    """Return the words of texts, each with a space in front, case-folded and without accents."""
    text = " ".join(texts)
    if not text.isascii():
        parts = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in parts if not unicodedata.combining(c))
    words = dict.fromkeys(re.findall(r"[^\W_]+", text.casefold()))
    return "".join(f" {word}" for word in words)


def _matches(entry: Entry, query: Query) -> bool:
    """Return whether an entry matches a query, apart from the words."""
    return all(
        (
            entry.yanked is None,
            query.backbone in (None, entry.backbone, entry.fingerprint),
            query.task is None or spelled_like(query.task, [entry.task or ""]) == entry.task,
            query.method is None or spelled_like(query.method, entry.methods) in entry.methods,
            set(query.tags) <= {*entry.tags, *entry.topics},
            query.metric is None or query.metric in entry.metrics,
        )
    )
