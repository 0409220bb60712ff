"""What a hub says about its repositories, checked field by field before anything uses it.

Commits, hashes and the names of tags have closed forms; refs and files with other names are left
out, since nothing here could request them. Files are always requested by commit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from adapterhub.errors import RegistryError, printable
from adapterhub.files import schema
from adapterhub.registry.hub_client import Expected, HubClient, MissingFileError
from adapterhub.registry.reference import is_repository, is_version

MAX_REFS_BYTES = 8 << 20  # some 50,000 tags and branches
MAX_INFO_BYTES = 8 << 20  # the names of some 100,000 files
MAX_LISTING_BYTES = 4 << 20  # some 10,000 files
MAX_SEARCH_BYTES = 32 << 20  # a thousand repositories with their cards
MAX_YANKED_BYTES = 1 << 20
MAX_FILE_BYTES = 64 << 30  # as the tensors of our own format
MOST_RESULTS = 1_000
YANKED_FILE = "yanked.json"
_COMMIT, _SHA256 = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Refs:
    """The commits of a repository: of the head of `main`, of its branches and of its tags."""

    head: str | None
    branches: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


class HubReader:
    """Read the repositories of one hub; `prefix` starts the references to them."""

    def __init__(self, client: HubClient, prefix: str) -> None:
        self.client = client
        self.prefix = prefix

    def refs(self, name: str) -> Refs:
        """Return the branches and tags of a repository."""
        data = self.client.read(f"/api/models/{name}/refs", MAX_REFS_BYTES, self.subject(name))
        tree = self._object(data, MAX_REFS_BYTES, name)
        branches = _commits(tree.get("branches"))
        return Refs(branches.get("main"), branches, _commits(tree.get("tags")))

    def commit_of(self, name: str, revision: str) -> str:
        """Return the commit of a revision that is neither a branch nor a tag."""
        path = f"/api/models/{name}/revision/{quote(revision, safe='')}"
        data = self.client.read(path, MAX_INFO_BYTES, self.subject(name))
        commit = self._object(data, MAX_INFO_BYTES, name).get("sha")
        if not is_commit(commit):
            raise self._malformed(name, [f"sha: {schema.show(commit)} is not a commit"])
        return str(commit)

    def small_file(self, name: str, commit: str, file: str, limit: int) -> bytes | None:
        """Return the contents of a file, or None if the commit has no such file.

        Args:
            name: the repository.
            commit: the commit.
            file: the name of the file.
            limit: the largest accepted size in bytes.
        """
        try:
            return self.client.read(_resolve(name, commit, file), limit, self.subject(name))
        except MissingFileError:
            return None

    def first_file(
        self, name: str, commit: str, limits: Mapping[str, int]
    ) -> tuple[str, bytes] | None:
        """Return the name and contents of the first of these files that the commit has.

        Args:
            name: the repository.
            commit: the commit.
            limits: the largest accepted size by name, in the order in which to try them.
        """
        for file, limit in limits.items():
            if (data := self.small_file(name, commit, file, limit)) is not None:
                return file, data
        return None

    def listing(self, name: str, commit: str) -> dict[str, Expected]:
        """Return the size and hash of each file in the root of a commit."""
        path = f"/api/models/{name}/tree/{commit}"
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

    def search(self, filters: Collection[str]) -> list[dict[str, Any]]:
        """Return what the hub lists of the repositories with all of these tags.

        A malformed item is left out: anyone can publish one, and it must not disturb the others.
        """
        options = (("full", "true"), ("cardData", "true"), ("limit", str(MOST_RESULTS)))
        params = (*(("filter", tag) for tag in filters), *options)
        data = self.client.read("/api/models", MAX_SEARCH_BYTES, self.subject(""), params)
        items = []
        for item in self._items(data, "")[:MOST_RESULTS]:
            tree, problems = schema.parse_object(item, len(item))
            if not problems and isinstance(tree.get("id"), str) and is_repository(tree["id"]):
                items.append(tree)
        return items

    def download(
        self, name: str, commit: str, file: str, target: Path, expected: Expected, **options: Any
    ) -> None:
        """Download a file of a commit to a new path, and verify it; see `HubClient.download`."""
        path = _resolve(name, commit, file)
        self.client.download(path, target, expected, self.subject(name), **options)

    def subject(self, name: str) -> str:
        """Name the subject of an error: a repository, or the hub itself."""
        return f"{self.prefix}{name}" if name else self.prefix.rstrip("/").replace("hf:", "the Hub")

    def _object(self, data: bytes, limit: int, name: str) -> dict[str, Any]:
        tree, problems = schema.parse_object(data, limit)
        if problems:
            raise self._malformed(name, problems)
        return tree

    def _items(self, data: bytes, name: str) -> list[bytes]:
        """Return the items of a list; a page for people is no empty one."""
        text = data.strip()
        if not (text.startswith(b"[") and text.endswith(b"]")):
            found = "a page of HTML" if text.startswith(b"<") else "no list in JSON"
            raise self._malformed(name, [f"it is {found}"])
        return split_items(data)

    def _malformed(self, name: str, problems: list[str]) -> RegistryError:
        return RegistryError(
            f"{self.subject(name)}: the hub's answer is malformed",
            offenders=schema.shorten(problems),
            expected="the answer of a hub",
            hint="check the URL; a network with a login page answers in the place of the hub",
        )


def is_commit(value: object) -> bool:
    """Return whether a value is a full commit hash."""
    return isinstance(value, str) and _COMMIT.fullmatch(value) is not None


def split_items(data: bytes) -> list[bytes]:
    """Return the items of a JSON list as they are, without parsing them.

    One item that is nested too deep for a parser then does not disturb the others.
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


def _commits(items: object) -> dict[str, str]:
    commits = {}
    for item in items if isinstance(items, list) else ():
        name, commit = (item.get(key) if isinstance(item, dict) else None for key in _REF)
        if isinstance(name, str) and is_version(name) and is_commit(commit):
            commits[name] = str(commit)
    return commits


_REF = ("name", "targetCommit")


def _listed(item: Mapping[str, Any]) -> tuple[str, Expected] | None:
    """Return the name of a listed file with what is known of it, or None if it has no hash."""
    path, size, oid = item.get("path"), item.get("size"), item.get("oid")
    large = item.get("lfs") if isinstance(item.get("lfs"), dict) else {}
    assert isinstance(large, dict)
    size, sha256 = large.get("size", size), large.get("oid")
    if item.get("type") != "file" or not isinstance(path, str):
        return None
    if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
        return None
    if isinstance(sha256, str) and _SHA256.fullmatch(sha256):
        return path, Expected(size, size, sha256=sha256)
    return (path, Expected(size, size, git_sha1=str(oid))) if is_commit(oid) else None


def _resolve(name: str, commit: str, file: str) -> str:
    return f"/{name}/resolve/{commit}/{file}"
