"""The files of a commit: their paths, and what paths there may be.

A tree is named by the sha1 of what it has, so equal trees are one. No path of a client ever becomes
one on the disk; what is refused here would be unusable, or something else, for those who download.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, insert, select

from adapterhub.errors import one_line, printable
from adapterhub.hub.blobs import BlobInfo
from adapterhub.hub.refusals import HubRefusal
from adapterhub.hub.tables import trees
from adapterhub.registry.reference import unportable

_MOST_FILES = 20_000
MOST_PATH, _MOST_PART = 1024, 255

Tree = Mapping[str, BlobInfo]
"""The files of a commit by their paths."""
_MOST_KEPT, _MOST_KEPT_FILES = 512, 64
_kept: dict[str, Tree] = {}  # by oid


@dataclass(frozen=True)
class FolderInfo:
    """A folder of a tree, with a hash of what is in it."""

    path: str
    oid: str


def path_problem_of(path: object) -> str:
    """Return why a text cannot be the path of a file, or ""."""
    if not isinstance(path, str) or not path:
        return "a path is a text"
    try:
        data = path.encode()
    except UnicodeEncodeError:
        return "it has half of a character"
    if len(data) > MOST_PATH:
        return f"it has more than {MOST_PATH} bytes"
    if unicodedata.normalize("NFC", path) != path:
        return "it is not in Unicode's form NFC"
    if any(ord(c) < 32 or ord(c) == 127 or c in '\\:*"<>|' for c in path):
        return "it has a character that some systems cannot have in a name"
    if printable(path) != path:
        return "it has an invisible character, or one that changes the direction of text"
    return next(filter(None, map(_part_problem, path.split("/"))), "")


def _part_problem(part: str) -> str:
    if part in ("", ".", ".."):
        return "it has an empty part, . or .."
    if part.casefold() in (".git", ".cache"):
        return f"{part} is a folder of tools"
    if len(part.encode()) > _MOST_PART:
        return f"a part has more than {_MOST_PART} bytes"
    return unportable(part)


def check_paths(paths: Iterable[str]) -> None:
    """Refuse paths that cannot be beside each other.

    Raises:
        HubRefusal: a file would be a folder, too, or two differ by case alone.
    """
    files: dict[str, str] = {}
    for path in paths:
        other = files.setdefault(path.casefold(), path)
        if other != path:
            raise HubRefusal(f"{_shown(path)} and {_shown(other)} differ by case alone")
    if len(files) > _MOST_FILES:
        raise HubRefusal(f"a repository has at most {_MOST_FILES:,} files")
    folders: dict[str, str] = {}
    for path in files.values():
        for end in (i for i, c in enumerate(path) if c == "/"):
            folder = path[:end]
            if folder.casefold() in files:
                raise HubRefusal(f"{_shown(folder)} would be a file and a folder")
            if folders.setdefault(folder.casefold(), folder) != folder:
                raise HubRefusal(f"the folders of {_shown(path)} differ from others by case alone")


def keep_tree(connection: Connection, tree: Tree) -> str:
    """Write a tree and return its oid."""
    text, oid = _written(tree)
    if connection.execute(select(trees.c.oid).where(trees.c.oid == oid)).first() is None:
        connection.execute(insert(trees).values(oid=oid, files=text))
    return oid


def oid_of_tree(tree: Tree) -> str:
    """Return the oid that a tree has."""
    return _written(tree)[1]


def read_tree(connection: Connection, oid: str) -> Tree:
    """Read a tree, which never changes: small ones are kept in memory."""
    found = _kept.get(oid)
    if found is None:
        text = connection.execute(select(trees.c.files).where(trees.c.oid == oid)).scalar_one()
        found = {path: BlobInfo(*info) for path, info in json.loads(text).items()}
        if len(found) <= _MOST_KEPT_FILES:
            if len(_kept) >= _MOST_KEPT:
                _kept.pop(next(iter(_kept)), None)
            _kept[oid] = found
    return found


def _written(tree: Tree) -> tuple[str, str]:
    files = {path: [b.sha256, b.size, b.git_sha1] for path, b in sorted(tree.items())}
    text = json.dumps(files, separators=(",", ":"))
    return text, hashlib.sha1(text.encode()).hexdigest()


def entries_below(
    tree: Tree, folder: str, *, recursive: bool
) -> list[tuple[str, BlobInfo | FolderInfo]] | None:
    """List the files and folders in a folder, "" for the root; None if there is no such folder."""
    prefix = f"{folder}/" if folder else ""
    inside = _files_below(tree, prefix)
    if not inside and folder:
        return None
    found: dict[str, BlobInfo | FolderInfo] = {}
    digests: dict[str, Any] = {}  # of folders, each of which has its files in their order
    for path, blob in inside:
        parts = path[len(prefix) :].split("/")
        last = len(parts) if recursive else min(2, len(parts))
        for depth in range(1, last):
            name = prefix + "/".join(parts[:depth])
            digests.setdefault(name, hashlib.sha1()).update(_line(path, blob))
        if recursive or len(parts) == 1:
            found[path] = blob
    found |= {name: FolderInfo(name, each.hexdigest()) for name, each in digests.items()}
    return sorted(found.items())


def oid_of_folder(tree: Tree, folder: str) -> str:
    """Return a hash of what is in a folder."""
    lines = [_line(path, blob) for path, blob in _files_below(tree, f"{folder}/")]
    return hashlib.sha1(b"".join(lines)).hexdigest()


def _files_below(tree: Tree, prefix: str) -> list[tuple[str, BlobInfo]]:
    return sorted((path, blob) for path, blob in tree.items() if path.startswith(prefix))


def _line(path: str, blob: BlobInfo) -> bytes:
    return f"{path}\0{blob.key}\n".encode()


@lru_cache(1024)
def pointer_of(sha256: str, size: int) -> tuple[str, int]:
    """Return git's hash and the size of the pointer that LFS keeps in the place of a file."""
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    data = text.encode()
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data)).hexdigest(), len(data)


def _shown(path: str) -> str:
    return one_line(path, 100)
