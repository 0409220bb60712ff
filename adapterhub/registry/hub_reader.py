"""Responses of a hub about its repositories, checked field by field and cached for offline use.

Commits, hashes and the names of tags have closed forms; refs and files with other names are
skipped, since they cannot be requested here. Files are always requested by commit.

Each hub has a separate folder in the user's cache, so it cannot affect another hub.

    <cache>/hubs/<host>-<hash>/adapters/<digest>/      the verified files of a version
    <cache>/hubs/<host>-<hash>/manifests/<hash>        manifests, by repository and commit
    <cache>/hubs/<host>-<hash>/names/<hash>.json       refs and yanks as last seen, for offline use

Paths consist of hashes and of the hub's URL as the user wrote it. Adapters are verified before they
enter. Manifests and names are the hub's last response, and are read only offline and in lists.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

from adapterhub.backbones.hub_network import COMMIT, SHA256, is_commit
from adapterhub.config.options import to_dict
from adapterhub.config.user_folders import user_folder
from adapterhub.errors import NotPublishedError, RegistryError, printable
from adapterhub.files import schema
from adapterhub.files.atomic import (
    UnreadableError,
    explained,
    put_in_place,
    read_file,
    replace_file,
    staging,
)
from adapterhub.registry.foreign import MAX_CONFIG_BYTES
from adapterhub.registry.hub_client import (
    Expected,
    HubClient,
    MissingFileError,
    Params,
    UnreachableError,
    login_hint,
)
from adapterhub.registry.store import is_repository, is_version, version_number
from adapterhub.registry.version_files import MAX_YANKED_BYTES, YANKED_FILE

MAX_REFS_BYTES = 8 << 20  # some 50,000 tags and branches
MAX_INFO_BYTES = 8 << 20  # the names of some 100,000 files
MAX_LISTING_BYTES = 4 << 20  # some 10,000 files
MAX_SEARCH_BYTES = 32 << 20  # a thousand repositories with their cards
MAX_FILE_BYTES = 64 << 30  # as the tensors of our own format
MOST_RESULTS = 1_000
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,12}Z")
_Commit = Annotated[str, schema.text(COMMIT.pattern, "a commit")]


@dataclass(frozen=True)
class Refs:
    """The commits of a repository: the head of `main`, its branches and its tags.

    `yanked` has the reason by yanked version, `highest` the highest version ever published, where
    the hub reports it.
    """

    head: _Commit | None
    branches: Mapping[str, _Commit] = field(default_factory=dict)
    tags: Mapping[str, _Commit] = field(default_factory=dict)
    yanked: Mapping[str, str] = field(default_factory=dict)
    highest: Annotated[int, schema.integer(0, 10**9)] = 0

    def versions(self) -> dict[str, tuple[str, ...]]:
        """Return the tags of each version, oldest version first."""
        by_commit: dict[str, list[str]] = {}
        for tag, commit in sorted(self.tags.items()):
            if not version_number(tag):
                by_commit.setdefault(commit, []).append(tag)
        numbered = sorted(filter(version_number, self.tags), key=lambda v: version_number(v) or 0)
        return {v: tuple(by_commit.get(self.tags[v], ())) for v in numbered}


@dataclass(frozen=True)
class RepositoryFiles:
    """A commit of a repository, with the known properties of each file.

    `name` is the repository's name as the hub writes it, `modified` the time of the commit, ""
    where the hub does not report it.
    """

    commit: str
    name: str
    modified: str
    files: Mapping[str, Expected]


class HubReader:
    """Read the repositories of one hub.

    `prefix` starts the references to them, `type` is models, datasets or spaces.
    """

    def __init__(self, client: HubClient, prefix: str, type: str = "models") -> None:
        self.client = client
        self.prefix = prefix
        self._api = f"/api/{type}"
        self._files = "" if type == "models" else f"/{type}"

    def refs(self, name: str) -> Refs:
        """Return the branches and tags of a repository."""
        data = self.client.read(f"{self._api}/{name}/refs", MAX_REFS_BYTES, self.subject(name))
        tree = self._object(data, MAX_REFS_BYTES, name)
        branches = _commits(tree.get("branches"))
        highest = tree.get("highestVersion", 0)
        is_number = type(highest) is int and 0 <= highest <= 10**9
        tags = _commits(tree.get("tags"))
        return Refs(branches.get("main"), branches, tags, highest=highest if is_number else 0)

    def commit_of(self, name: str, revision: str) -> str:
        """Return the commit of a revision that is neither a branch nor a tag."""
        return str(self._info(name, revision)["sha"])

    def snapshot(self, name: str, revision: str) -> RepositoryFiles:
        """Return the commit of a revision with its files; files without a hash are skipped."""
        info = self._info(name, revision, (("blobs", "true"),))
        if is_commit(revision) and info["sha"] != revision:
            raise self._malformed(name, [f"sha: {info['sha']} is not the commit {revision}"])
        siblings = info.get("siblings")
        files = filter(None, map(_sibling, siblings if isinstance(siblings, list) else ()))
        own, date = info.get("id"), info.get("lastModified")
        return RepositoryFiles(
            info["sha"],
            own if isinstance(own, str) and own.casefold() == name.casefold() else name,
            date if isinstance(date, str) and _DATE.fullmatch(date) else "",
            dict(files),
        )

    def _info(self, name: str, revision: str, params: Params = ()) -> dict[str, Any]:
        path = f"{self._api}/{name}/revision/{quote(revision, safe='')}"
        data = self.client.read(path, MAX_INFO_BYTES, self.subject(name), params)
        info = self._object(data, MAX_INFO_BYTES, name)
        if not is_commit(info.get("sha")):
            raise self._malformed(name, [f"sha: {schema.show(info.get('sha'))} is not a commit"])
        return info

    def small_file(self, name: str, commit: str, file: str, limit: int) -> bytes | None:
        """Return the contents of a file, or None if the commit lacks it."""
        try:
            return self.client.read(self._place(name, commit, file), limit, self.subject(name))
        except MissingFileError:
            return None

    def first_file(
        self, name: str, commit: str, limits: Mapping[str, int]
    ) -> tuple[str, bytes] | None:
        """Return the name and contents of the first of these files that the commit has.

        `limits` has the largest accepted size by name, in the order to try them.
        """
        for file, limit in limits.items():
            if (data := self.small_file(name, commit, file, limit)) is not None:
                return file, data
        return None

    def listing(self, name: str, commit: str) -> dict[str, Expected]:
        """Return the size and hash of each file in the root of a commit."""
        path = f"{self._api}/{name}/tree/{commit}"
        data = self.client.read(path, MAX_LISTING_BYTES, self.subject(name))
        items = [schema.parse_object(item, len(item))[0] for item in self._items(data, name)]
        return dict(filter(None, map(_listed, items)))

    def yanked(self, name: str, commit: str) -> dict[str, str]:
        """Return the yanked versions at a commit, with the reasons."""
        data = self.small_file(name, commit, YANKED_FILE, MAX_YANKED_BYTES)
        if data is None:
            return {}
        tree = self._object(data, MAX_YANKED_BYTES, name)
        if not all(isinstance(reason, str) for reason in tree.values()):
            raise self._malformed(name, [f"{YANKED_FILE}: the reasons are not texts"])
        return {version: printable(reason) for version, reason in tree.items()}

    def own_words(self) -> frozenset[str]:
        """Return the extensions of the Hub's protocol that a hub of adapterhub supports."""
        try:
            data = self.client.read("/api/adapterhub", MAX_YANKED_BYTES, self.subject(""))
        except UnreachableError:
            raise
        except RegistryError:
            return frozenset()
        words = schema.parse_object(data, MAX_YANKED_BYTES)[0].get("can")
        return frozenset(filter(_is_word, words)) if isinstance(words, list) else frozenset()

    def search(self, filters: Collection[str], owner: str = "") -> list[dict[str, Any]]:
        """List the repositories on the hub with all of these tags, or of one owner.

        A malformed item is skipped: anyone can publish one, and it must not affect the others.
        """
        options = (("full", "true"), ("cardData", "true"), ("limit", str(MOST_RESULTS)))
        author = (("author", owner),) if owner else ()
        params = (*(("filter", tag) for tag in filters), *author, *options)
        data = self.client.read(self._api, MAX_SEARCH_BYTES, self.subject(""), params)
        items = []
        for item in self._items(data, "")[:MOST_RESULTS]:
            tree, problems = schema.parse_object(item, len(item))
            if problems or not isinstance(tree.get("id"), str) or not is_repository(tree["id"]):
                continue
            if owner in ("", tree["id"].partition("/")[0]):
                items.append(tree)
        return items

    def repositories(self, owner: str) -> list[str]:
        """List all repositories of an owner, a page at a time.

        Raises:
            RegistryError: the hub may have more than it lists.
        """
        is_ours = "versions" in self.own_words()  # whose cursor is the number of previous rows
        names: list[str] = []
        while True:
            params = (("author", owner), ("limit", str(MOST_RESULTS)), ("cursor", str(len(names))))
            data = self.client.read(
                self._api, MAX_SEARCH_BYTES, self.subject(""), params if is_ours else params[:2]
            )
            page = [schema.parse_object(item, len(item))[0] for item in self._items(data, "")]
            names += [str(item.get("id")) for item in page]
            if not page or not is_ours:
                break
        if not is_ours and len(names) >= MOST_RESULTS:
            raise RegistryError(
                f"{self.subject('')} lists {MOST_RESULTS:,} repositories of {owner}, and may have "
                "more"
            )
        return [n for n in names if is_repository(n) and n.partition("/")[0] == owner]

    def download(
        self, name: str, commit: str, file: str, target: Path, expected: Expected, **options: Any
    ) -> Expected:
        """Download a file of a commit to a new path, and verify it; see `HubClient.download`."""
        path = self._place(name, commit, file)
        return self.client.download(path, target, expected, self.subject(name), **options)

    def _place(self, name: str, commit: str, file: str) -> str:
        return f"{self._files}/{name}/resolve/{commit}/{quote(file)}"

    def check_writer(self, name: str) -> None:
        """Check that the token may write to a repository, before computing anything for it.

        A hub that does not support this check refuses later.

        Raises:
            RegistryError: it may not, or the hub cannot be reached.
        """
        subject = self.subject(name)
        # The repository is new, or the hub does not support the check.
        with contextlib.suppress(NotPublishedError, MissingFileError):
            self.client.read(f"{self._api}/{name}/auth-check/write", MAX_YANKED_BYTES, subject)
            return
        with contextlib.suppress(MissingFileError):
            data = self.client.read("/api/whoami-v2", MAX_YANKED_BYTES, subject)
            if re.search(rb'"role"\s*:\s*"read"', data):
                raise RegistryError(
                    f"{subject}: your token may only read", hint=login_hint(self.client.base)
                )

    def subject(self, name: str) -> str:
        """Name the subject of an error: a repository, or the hub itself."""
        return f"{self.prefix}{name}" if name else self.prefix.rstrip("/").replace("hf:", "the Hub")

    def _object(self, data: bytes, limit: int, name: str) -> dict[str, Any]:
        tree, problems = schema.parse_object(data, limit)
        if problems:
            raise self._malformed(name, problems)
        return tree

    def _items(self, data: bytes, name: str) -> list[bytes]:
        """Return the items of a list; an HTML page is not an empty list."""
        text = data.strip()
        if not (text.startswith(b"[") and text.endswith(b"]")):
            content = "a page of HTML" if text.startswith(b"<") else "no list in JSON"
            raise self._malformed(name, [f"it is {content}"])
        return split_items(data)

    def _malformed(self, name: str, problems: list[str]) -> RegistryError:
        return RegistryError(
            f"{self.subject(name)}: the hub's answer is malformed",
            offenders=schema.shorten(problems),
            expected="the answer of a hub",
            hint="check the URL; a network with a login page answers in the place of the hub",
        )


def split_items(data: bytes) -> list[bytes]:
    """Split a JSON list into its items without parsing them.

    An item that is nested too deep for the parser then does not affect the others.
    """
    items, depth, start, quoted = [], 0, 0, False
    for match in re.finditer(rb'\\.|["\[\]{},]', data, re.DOTALL):
        token = match.group()
        if token == b'"':
            quoted = not quoted
        elif quoted or len(token) > 1:
            continue
        elif token in b"[{":
            depth += 1
            start = match.end() if depth == 1 else start
        elif token == b"," and depth == 1:
            items.append(data[start : match.start()])
            start = match.end()
        elif token in b"]}":
            depth -= 1
            if depth == 0:
                items.append(data[start : match.start()])
                break
    return [item for item in items if item.strip()]


def _is_word(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[a-z-]{1,40}", value) is not None


def _commits(items: object) -> dict[str, str]:
    commits = {}
    for item in items if isinstance(items, list) else ():
        name, commit = (item.get(key) if isinstance(item, dict) else None for key in _REF)
        if isinstance(name, str) and is_version(name) and is_commit(commit):
            commits[name] = str(commit)
    return commits


_REF = ("name", "targetCommit")


def _listed(item: Mapping[str, Any]) -> tuple[str, Expected] | None:
    """Return the name and known properties of a listed file, or None if it lacks a hash."""
    path, size, oid = item.get("path"), item.get("size"), item.get("oid")
    large = item.get("lfs") if isinstance(item.get("lfs"), dict) else {}
    assert isinstance(large, dict)
    size, sha256 = large.get("size", size), large.get("oid")
    if item.get("type") != "file" or not isinstance(path, str):
        return None
    if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
        return None
    if isinstance(sha256, str) and SHA256.fullmatch(sha256):
        return path, Expected(size, size, sha256=sha256)
    return (path, Expected(size, size, git_sha1=str(oid))) if is_commit(oid) else None


def _sibling(item: object) -> tuple[str, Expected] | None:
    """Read a file in the description of a repository; see `_listed`."""
    if not isinstance(item, dict):
        return None
    large = item.get("lfs")
    if isinstance(large, dict):
        large = {"oid": large.get("sha256"), "size": large.get("size")}
    path, oid = item.get("rfilename"), item.get("blobId")
    return _listed({**item, "type": "file", "path": path, "oid": oid, "lfs": large})


class HubCache:
    """The folder of one hub in the user's cache."""

    def __init__(self, base: str) -> None:
        host = re.sub(r"[^a-z0-9.]", "_", (urlsplit(base).hostname or "")[:60])
        self.folder = user_folder("cache") / "hubs" / f"{host}-{_key(base)}"

    def adapter(self, digest: str) -> Path:
        """Return the folder of a version, whether it exists or not."""
        assert re.fullmatch("[0-9a-f]{64}", digest), digest
        return self.folder / "adapters" / digest

    @contextlib.contextmanager
    def adding(self, digest: str) -> Iterator[Path]:
        """Yield an empty folder; it becomes the folder of a version if no error is raised.

        Raises:
            OutputError: the cache cannot be written.
        """
        folder = self.adapter(digest)
        with explained(folder), staging(folder) as staged:
            yield staged
            try:
                put_in_place(staged, folder, overwrite=False)
            except OSError:
                if not folder.exists():  # otherwise another process has added the same bytes
                    raise

    def manifest(self, name: str, commit: str, file: str) -> bytes | None:
        """Return a manifest or configuration as last requested."""
        return _read(self._manifest(name, commit, file), MAX_CONFIG_BYTES)

    def keep_manifest(self, name: str, commit: str, file: str, data: bytes) -> None:
        """Store the manifest or configuration of a commit."""
        _write(self._manifest(name, commit, file), data)

    def refs(self, name: str) -> Refs | None:
        """Return the refs of a repository as last seen."""
        data = _read(self._name(name), 2 * MAX_REFS_BYTES)
        return schema.parse_record(Refs, data or b"", 2 * MAX_REFS_BYTES)[0]

    def keep_refs(self, name: str, refs: Refs) -> None:
        """Store the refs of a repository."""
        _write(self._name(name), schema.canonical_json(to_dict(refs)))

    def _manifest(self, name: str, commit: str, file: str) -> Path:
        return self.folder / "manifests" / _key(f"{name}@{commit}/{file}")

    def _name(self, name: str) -> Path:
        return self.folder / "names" / f"{_key(name)}.json"


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(path: Path, limit: int) -> bytes | None:
    try:
        return read_file(path, 0, limit, None)
    except UnreadableError:
        return None


def _write(path: Path, data: bytes) -> None:
    """Write a file to the cache; write errors are ignored."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
