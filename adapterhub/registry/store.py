"""References to adapters, the interfaces of a store and of a registry's files, and common rules.

A reference names an adapter, in all commands and functions:

    ./folder    ../x   /abs   ~/x        a folder on this machine
    name[@version]                       the local registry; `read_reference` finds folders too
    hf:owner/name[@revision]             the Hugging Face Hub
    https://host/owner/name[@revision]   a self-hosted hub; http only for the local host

In the local registry a version is a number (`3` or `v3`) or a tag; a revision is a commit, branch
or tag.

A store keeps versions of adapters. A version is one adapter's files and never changes; a tag is a
movable name for a version. The layout of the files is up to the store; tests/registry/test_store.py
runs one conformance suite against every implementation.

Names of folders in a local registry are valid and distinct on every file system. The folder of a
backbone is its id with `/` written as `--`, which Hub ids cannot contain. Names of local backbones
end in `--` and the start of their fingerprint, and are used unchanged. An id that would share its
folder with another one is refused.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from adapterhub.errors import (
    ConfigError,
    NotPublishedError,
    RegistryError,
    YankedError,
    one_line,
    spelled_like,
)
from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.files.native import PEFT_FILES, Saved, find_adapter
from adapterhub.files.run_folder import names_in
from adapterhub.files.signature import Signature

_MOST_FOLDERS = 2_000  # folders to inspect for a hint in an error
_MOST_FOUND = 3


def holds_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter, including those in runs or of other libraries."""
    return find_adapter(folder) is not None or (folder / PEFT_FILES[0]).is_file()


def nearby_adapters(name: str) -> list[str]:
    """Return the folders with an adapter of this or a similar name, here or one folder below."""
    folders = {path: Path(path).name for path in islice(_folders(), _MOST_FOLDERS)}
    similar = difflib.get_close_matches(name, {*folders.values()}, n=_MOST_FOUND, cutoff=0.75)
    paths = (path for near in similar for path in folders if folders[path] == near)
    return [*islice((path for path in paths if holds_adapter(Path(path))), _MOST_FOUND)]


def _folders() -> Iterator[str]:
    """Yield the folders here and one level below, as a user would type them."""
    here = _subfolders(Path())
    yield from (f"./{name}" for name in here)
    for name in here:
        yield from (f"{name}/{inner}" for inner in _subfolders(Path(name)))


def _subfolders(folder: Path) -> list[str]:
    return [name.removesuffix("/") for name in names_in(folder) if name.endswith("/")]


ReferenceKind = Literal["folder", "local", "hub", "server"]

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_VERSION = r"[A-Za-z0-9][A-Za-z0-9_./-]{0,199}"
_LOOKS_LIKE_FOLDER = re.compile(r"\.{1,2}([/\\]|$)|[/~\\]|[A-Za-z]:[/\\]")
_BUCKETS = ("s3", "gs", "az", "abfss")
_REMOTE = re.compile(r"hf:|[A-Za-z][A-Za-z0-9+.-]*://")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEFAULT_HUB = "https://huggingface.co"  # the host of hf:, and the only one known to support Xet
INDEX_FILE = "index.json"  # reserved: not allowed for a backbone's folder or an adapter
NAME_RULE = (
    "1 to 96 letters, digits and . _ -, starting with a letter or digit, not ending with a dot,"
    f" and not {INDEX_FILE}, nor a name that Windows reserves, such as con or nul.txt"
)
TAG = r"(?!v?[0-9]+$)[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
TAG_RULE = (
    "1 to 64 letters, digits and . _ -, starting with a letter or digit, and not a version number"
)
FORMS = "./folder, name[@version], hf:owner/name[@revision], https://host/owner/name[@revision]"


@dataclass(frozen=True)
class Reference:
    """The location of an adapter: `parse_reference(str(reference)) == reference`.

    `name` is a path for a folder and `owner/name` on a hub; `host` is the scheme and host of a
    self-hosted hub.
    """

    kind: ReferenceKind
    name: str
    version: str | None = None
    host: str | None = None

    def __str__(self) -> str:
        start = {"hub": "hf:", "server": f"{self.host}/"}.get(self.kind, "")
        return f"{start}{self.name}" + (f"@{self.version}" if self.version else "")


def is_loopback(hostname: str | None) -> bool:
    """Return whether a host is this machine, where http is as safe as https."""
    return hostname in _LOOPBACK


def is_remote(text: str) -> bool:
    """Return whether a text starts like a reference to a hub."""
    return _REMOTE.match(text) is not None


def is_bucket(location: object) -> bool:
    """Return whether a text is the URL of a bucket: s3://bucket/prefix, gs://..., az://..."""
    scheme, separator, _ = str(location).partition("://")
    return bool(separator) and scheme in _BUCKETS


def parse_reference(text: str) -> Reference:
    """Parse the text of a reference.

    Raises:
        ConfigError: the text has none of the four forms, or is ambiguous.
    """
    if not text or not text.isprintable() or text != text.strip():
        raise _error(text, "is not a reference")
    if _LOOKS_LIKE_FOLDER.match(text):
        return Reference("folder", text)
    if text.startswith("hf:"):
        return _parse_hub(text)
    if "://" in text:
        return _parse_server(text)
    return _parse_local(text)


def is_name(text: str) -> bool:
    """Return whether a text is a valid adapter name in a local registry."""
    is_word = ".." not in text and re.fullmatch(_NAME, text) is not None
    return is_word and not unportable(text) and not _is_reserved(text)


def is_repository(name: str) -> bool:
    """Return whether a text has the form `owner/name` of a repository on a hub."""
    return ".." not in name and re.fullmatch(rf"{_NAME}/{_NAME}", name) is not None


def is_version(text: str) -> bool:
    """Return whether a text may follow the @ of a reference: a version, tag, branch or commit."""
    return ".." not in text and re.fullmatch(_VERSION, text) is not None


def check_name(name: str) -> None:
    """Refuse a text that is not a valid adapter name in a local registry.

    Raises:
        ConfigError: the name has other characters, or is too long.
    """
    if not is_name(name):
        raise ConfigError(f"invalid adapter name {name!r}", expected=NAME_RULE, hint="--name NAME")


def check_tags(tags: Sequence[str]) -> None:
    """Refuse invalid tags.

    Raises:
        ConfigError: a tag has other characters, or is a version number or a reserved file name.
    """
    if invalid := [repr(tag) for tag in tags if not re.fullmatch(TAG, tag) or unportable(tag)]:
        raise ConfigError(
            "invalid tags",
            offenders=invalid,
            expected=f"{TAG_RULE}; not ending with a dot, and not a name that Windows reserves",
        )


def _parse_hub(text: str) -> Reference:
    name, version = _split(text, text.removeprefix("hf:"))
    if not is_repository(name):
        raise _error(text, "does not name a repository of the Hub", "hf:owner/name[@revision]")
    return Reference("hub", name, version)


def _parse_server(text: str) -> Reference:
    try:
        parts = urlsplit(text)
        hostname, host = parts.hostname, f"{parts.scheme}://{parts.netloc}"
        _ = parts.port  # raises ValueError unless it is a number
    except ValueError as error:
        raise _error(text, f"is not a valid URL: {error}") from None
    secure = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(hostname))
    if not hostname or not secure or not hostname.isascii():  # other spellings are ambiguous
        raise _error(text, "is not an https URL", "https://host/owner/name[@revision]")
    if parts.username is not None or parts.query or parts.fragment:
        # The part before @ may be a password: do not show it.
        shown = text.replace(f"{parts.netloc.rpartition('@')[0]}@", "")
        raise _error(shown, "has more than a host and a name", "https://host/owner/name")
    name, version = _split(text, parts.path.removeprefix("/"))
    if not is_repository(name):
        raise _error(text, "does not name an adapter", "https://host/owner/name[@revision]")
    return Reference("server", name, version, host)


def _parse_local(text: str) -> Reference:
    name, version = _split(text, text)
    if "/" in name or "\\" in name:
        hint = f"./{text} for a folder" + (
            f", hf:{text} for the Hub" if is_repository(name) else ""
        )
        raise _error(text, "could be a folder or a repository of the Hub", hint=hint)
    if not is_name(name):
        raise _error(text, "is not a valid adapter name", NAME_RULE)
    return Reference("local", name, version)


def _split(text: str, rest: str) -> tuple[str, str | None]:
    name, at, version = rest.partition("@")
    if at and not is_version(version):
        raise _error(text, f"has an invalid version after @: {version!r}")
    return name, version or None


def _error(text: str, problem: str, expected: str = FORMS, hint: str = "") -> ConfigError:
    return ConfigError(f"{text!r} {problem}", expected=expected, hint=hint)


_DEVICES = {
    "con",
    "prn",
    "aux",
    "nul",
    *(f"{port}{n}" for port in ("com", "lpt") for n in range(10)),
}
_LOCAL_BACKBONE = re.compile(r".+--(?:[0-9a-f]{12}|no-weights)")
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


def unportable(name: str) -> str:
    """Return the reason why a name is not valid for files on every system, or ""."""
    stem = name.partition(".")[0]
    if stem.casefold() in _DEVICES:
        return f"Windows reserves {stem!r} for a device"
    return "Windows drops a dot or space at the end" if name.endswith((".", " ")) else ""


def backbone_folder(backbone: str) -> str:
    """Return the name of the folder for a backbone's adapters; no two backbones share one.

    Raises:
        RegistryError: another backbone would have the same folder, or the name is not portable.
    """
    folder = folder_of_id(backbone)
    problem = unportable(folder)
    is_local = "/" not in backbone and "--" in backbone
    if "/" in backbone and "--" in backbone:
        problem = "an id of the Hub does not contain '--'"
    elif is_local != bool(_LOCAL_BACKBONE.fullmatch(folder)):
        other = folder.replace("--", "/", 1) if is_local else folder
        problem = f"they would share the folder {folder!r} with those of {other!r}"
    if _is_reserved(folder):
        problem = f"the name {INDEX_FILE} is the URL of a registry's index"
    if problem:
        raise RegistryError(
            f"adapters of the backbone {backbone!r} cannot be published: {problem}",
            expected="an id of the Hub, or a local name as `adapterhub` saves it",
            hint="load the backbone from the Hub, or from a folder with another name, and save the"
            " adapter again",
        )
    return folder


def folder_of_id(backbone: str) -> str:
    """Return the folder of a backbone's id, even if another backbone may share it."""
    return backbone.replace("/", "--")


def is_backbone_folder(name: str) -> bool:
    """Return whether a folder's name can belong to a backbone."""
    return ".." not in name and _FOLDER.fullmatch(name) is not None and not _is_reserved(name)


def _is_reserved(name: str) -> bool:
    """Return whether a name would collide with an index on some file system."""
    return name.casefold() == INDEX_FILE


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
        summary = f"{' + '.join(self.methods)} for {self.backbone}, {self.task or 'no head'}"
        return one_line(f"<Entry {self.reference}{tags}: {summary}{scores}>", 240)

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
            expected="a new number, since numbers of deleted versions are not reused",
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
