"""Commits and their trees: the only way to change the files of a repository.

One transaction compares the parent with the head, applies the operations to the tree of the head,
and moves the ref. The gate then stores the new files (gate.py). A request repeated because its
response was lost gets the head that it had made.

A tree is named by the sha1 of its contents, so equal trees are stored once. A client's path never
becomes a path on the disk. Paths that are refused here would be unusable or ambiguous after a
download.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, and_, delete, func, insert, or_, select, true, update

from adapterhub.backbones.hub_network import is_commit
from adapterhub.errors import one_line, printable
from adapterhub.hub.blobs import BlobInfo, StagedBlob
from adapterhub.hub.database import (
    blobs,
    changes_of,
    commits,
    grants,
    now_precisely,
    now_text,
    promises,
    refs,
    repositories,
    trees,
)
from adapterhub.registry.store import unportable
from adapterhub.web.errors import (
    HubRefusal,
    MissingEntryError,
    MissingRevisionError,
    StaleParentError,
)

_MOST_FILES = 20_000
MOST_PATH, _MOST_PART = 1024, 255
PICKLES = re.compile(r"(?i)\.(bin|pt|pth|ckpt|pkl|pickle|joblib|dill|npy|npz|h5|keras|mar|t7)$")
PACKED_WEIGHTS = (".gguf", ".gz", ".zst")
"""The suffixes of weights in other forms than safetensors and pickles."""

Tree = Mapping[str, BlobInfo]
"""The files of a commit by their paths."""
_MOST_KEPT, _MOST_KEPT_FILES = 512, 64
_kept: dict[str, Tree] = {}  # by oid


@dataclass(frozen=True)
class FolderInfo:
    """A folder of a tree, with a hash of its contents."""

    path: str
    oid: str


def path_problem_of(path: object) -> str:
    """Return why a text is not a valid path of a file, or ""."""
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


def is_weights(path: str) -> bool:
    """Return whether a file contains model weights, by its name."""
    return suffix_of(path) in (".safetensors", *PACKED_WEIGHTS) or bool(PICKLES.search(path))


def suffix_of(path: str) -> str:
    """Return the suffix of a path in small letters, with its dot."""
    return Path(path).suffix.lower()


def check_paths(paths: Iterable[str]) -> None:
    """Refuse paths that conflict with each other.

    Raises:
        HubRefusal: a path is both a file and a folder, or two paths differ only by case.
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
    """Store a tree and return its oid."""
    text, oid = _written(tree)
    if connection.execute(select(trees.c.oid).where(trees.c.oid == oid)).first() is None:
        connection.execute(insert(trees).values(oid=oid, files=text))
    return oid


def oid_of_tree(tree: Tree) -> str:
    """Return the oid of a tree."""
    return _written(tree)[1]


def read_tree(connection: Connection, oid: str) -> Tree:
    """Read a tree. Trees never change, so small ones are cached."""
    tree = _kept.get(oid)
    if tree is None:
        text = connection.execute(select(trees.c.files).where(trees.c.oid == oid)).scalar_one()
        tree = {path: BlobInfo(*info) for path, info in json.loads(text).items()}
        if len(tree) <= _MOST_KEPT_FILES:
            if len(_kept) >= _MOST_KEPT:
                _kept.pop(next(iter(_kept)), None)
            _kept[oid] = tree
    return tree


def _written(tree: Tree) -> tuple[str, str]:
    files = {path: [b.sha256, b.size, b.git_sha1] for path, b in sorted(tree.items())}
    text = json.dumps(files, separators=(",", ":"))
    return text, hashlib.sha1(text.encode()).hexdigest()


def entries_below(
    tree: Tree, folder: str, *, recursive: bool
) -> list[tuple[str, BlobInfo | FolderInfo]] | None:
    """List the files and folders in a folder, "" for the root; None if it does not exist."""
    prefix = f"{folder}/" if folder else ""
    inside = _files_below(tree, prefix)
    if not inside and folder:
        return None
    entries: dict[str, BlobInfo | FolderInfo] = {}
    digests: dict[str, Any] = {}  # by folder; the files of each folder arrive in order
    for path, blob in inside:
        parts = path[len(prefix) :].split("/")
        last = len(parts) if recursive else min(2, len(parts))
        for depth in range(1, last):
            name = prefix + "/".join(parts[:depth])
            digests.setdefault(name, hashlib.sha1()).update(_line(path, blob))
        if recursive or len(parts) == 1:
            entries[path] = blob
    entries |= {name: FolderInfo(name, each.hexdigest()) for name, each in digests.items()}
    return sorted(entries.items())


def oid_of_folder(tree: Tree, folder: str) -> str:
    """Return a hash of a folder's contents."""
    lines = [_line(path, blob) for path, blob in _files_below(tree, f"{folder}/")]
    return hashlib.sha1(b"".join(lines)).hexdigest()


def _files_below(tree: Tree, prefix: str) -> list[tuple[str, BlobInfo]]:
    return sorted((path, blob) for path, blob in tree.items() if path.startswith(prefix))


def _line(path: str, blob: BlobInfo) -> bytes:
    return f"{path}\0{blob.key}\n".encode()


@lru_cache(1024)
def pointer_of(sha256: str, size: int) -> tuple[str, int]:
    """Return git's hash and the size of the pointer file that LFS commits instead of a file."""
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    data = text.encode()
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data)).hexdigest(), len(data)


def _shown(path: str) -> str:
    return one_line(path, 100)


MOST_WALKED = 2_000  # commits, to find the last ones that changed some paths
BRANCH, TAG = "branch", "tag"
MAIN = "main"


@dataclass(frozen=True)
class CommitRecord:
    """A stored commit."""

    oid: str
    parent: str | None
    tree: str
    title: str
    message: str
    author: str
    created: str


@dataclass
class CommitChange:
    """The changes of a commit.

    Attributes:
        title: the first line of its message.
        message: the rest of it.
        parent: the head that the writer saw; None for any.
        files: new files by path, received with the commit.
        large: digests and sizes of files that were uploaded before, by path; -1 for a copy.
        removed: the paths of files to remove.
        removed_folders: the paths of folders to remove.
        created: the time of the commit; None for now.
    """

    title: str = "Change files"
    message: str = ""
    parent: str | None = None
    files: dict[str, StagedBlob] = field(default_factory=dict)
    large: dict[str, tuple[str, int]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    removed_folders: list[str] = field(default_factory=list)
    created: str | None = None


@dataclass(frozen=True)
class CommitResult:
    """The head after a commit, and whether the commit is new."""

    commit: CommitRecord
    is_new: bool


def write_commit(
    connection: Connection, repository: int, branch: str, change: CommitChange, author: str
) -> CommitResult:
    """Commit a change to a branch; call it inside `changing`, which stores the files.

    Raises:
        StaleParentError: the head differs from the one the writer saw.
        MissingEntryError: a file to remove does not exist.
        MissingRevisionError: the branch does not exist.
        HubRefusal: a file is unknown, or paths conflict.
    """
    head = branch_head(connection, repository, branch)
    old: Tree = read_tree(connection, head.tree) if head else {}
    if head is None and branch != MAIN:
        raise no_branch(connection, repository, branch)
    named = _large_files(connection, repository, change.large)
    new = changed_tree(old, change, named)
    changes = changes_of(connection)
    is_parent = change.parent in (None, head.oid if head else None)
    if head and oid_of_tree(new) == head.tree and (is_parent or head.parent == change.parent):
        changes.files += change.files.values()  # the stored one may have been damaged since
        return CommitResult(head, False)
    if not is_parent:
        raise StaleParentError("the head of this branch has moved; read it again and try again")
    check_paths(new)
    changes.files += change.files.values()
    grant(connection, repository, [staged.info for staged in change.files.values()])
    grant(connection, repository, named.values())
    record = _insert(connection, repository, new, head.oid if head else None, change, author)
    move_ref(connection, repository, BRANCH, branch, record.oid)
    return CommitResult(record, True)


def changed_tree(
    old: Tree, change: CommitChange, large: Mapping[str, BlobInfo]
) -> dict[str, BlobInfo]:
    """Return the tree after a change.

    Raises:
        MissingEntryError: a file or folder to remove does not exist.
    """
    tree = dict(old)
    for path in change.removed:
        if tree.pop(path, None) is None:
            raise MissingEntryError(f"A file with this name doesn't exist: {one_line(path, 200)}")
    folders = {name.rstrip("/"): name for name in change.removed_folders}
    existing = set()
    for path in [*tree] if folders else ():
        if above := {path[:end] for end in _folder_ends(path)} & folders.keys():
            existing |= above
            del tree[path]
    for name in folders.keys() - existing:
        raise MissingEntryError(
            f"A file with this name doesn't exist: {one_line(folders[name], 200)}"
        )
    tree |= {path: staged.info for path, staged in change.files.items()}
    return {**tree, **large}


def _large_files(
    connection: Connection, repository: int, large: Mapping[str, tuple[str, int]]
) -> dict[str, BlobInfo]:
    """Return the files that were uploaded to this repository earlier.

    Raises:
        HubRefusal: a file was not uploaded, or its size differs.
    """
    allowed = granted(connection, repository, {sha256 for sha256, _ in large.values()})
    named = {}
    for path, (sha256, size) in large.items():
        blob = allowed.get(sha256)
        if blob is None or size not in (-1, blob.size):
            raise HubRefusal(
                f"{one_line(path, 200)}: no file with sha256 {sha256} and this size was uploaded "
                "to this repository"
            )
        named[path] = blob
    return named


def _insert(
    connection: Connection,
    repository: int,
    tree: Tree,
    parent: str | None,
    change: CommitChange,
    author: str,
) -> CommitRecord:
    oid_tree, created = keep_tree(connection, tree), change.created or now_precisely()
    title, message = change.title or "Change files", change.message
    text = "\0".join((parent or "", oid_tree, created, author, title, message))
    oid = hashlib.sha1(text.encode("utf-8", "replace")).hexdigest()
    record = CommitRecord(oid, parent, oid_tree, title, message, author, created)
    # The same change of the same parent within one millisecond, on another branch, is one commit.
    here = (commits.c.repository == repository, commits.c.oid == oid)
    if not connection.execute(update(commits).where(*here).values(is_removed=False)).rowcount:
        connection.execute(insert(commits).values(repository=repository, **vars(record)))
    changes_of(connection).commits[repository, oid] = True
    connection.execute(
        update(repositories).where(repositories.c.id == repository).values(modified=created)
    )
    return record


def grant(
    connection: Connection, repository: int, infos: Iterable[BlobInfo], *, is_committed: bool = True
) -> None:
    """Grant files to a repository; they are stored by the end of the transaction."""
    by_digest = {info.sha256: info for info in infos}
    if not by_digest:
        return
    known = set(
        connection.execute(select(blobs.c.sha256).where(blobs.c.sha256.in_(by_digest))).scalars()
    )
    if new := [info for info in by_digest.values() if info.sha256 not in known]:
        connection.execute(insert(blobs), [vars(info) for info in new])
    own = grants.c.repository == repository
    rows = connection.execute(
        select(grants.c.sha256, grants.c.is_committed).where(own, grants.c.sha256.in_(by_digest))
    ).all()
    had = {row.sha256: row.is_committed for row in rows}
    now = now_text()
    if fresh := [sha256 for sha256 in by_digest if sha256 not in had]:
        changes_of(connection).granted |= {(repository, sha256) for sha256 in fresh}
        fulfilled = (promises.c.repository == repository, promises.c.sha256.in_(fresh))
        connection.execute(delete(promises).where(*fulfilled))
        connection.execute(
            insert(grants),
            [
                {
                    "repository": repository,
                    "sha256": s,
                    "is_committed": is_committed,
                    "granted": now,
                }
                for s in fresh
            ],
        )
    if is_committed and (late := [s for s, done in had.items() if not done]):
        connection.execute(
            update(grants).where(own, grants.c.sha256.in_(late)).values(is_committed=True)
        )
    elif not is_committed and had:  # the grace period starts again
        connection.execute(
            update(grants).where(own, grants.c.sha256.in_([*had])).values(granted=now)
        )


def granted(
    connection: Connection, repository: int, digests: Sequence[str] | set[str]
) -> dict[str, BlobInfo]:
    """Return the subset of files that a repository may name."""
    rows = connection.execute(
        select(blobs)
        .join(grants, grants.c.sha256 == blobs.c.sha256)
        .where(grants.c.repository == repository, blobs.c.sha256.in_([*digests]))
    ).all()
    return {row.sha256: BlobInfo(row.sha256, row.size, row.git_sha1) for row in rows}


def used_bytes(connection: Connection, namespace: int, *, committed: bool = False) -> int:
    """Return the total size of the files of a namespace, or of its commits, without duplicates."""
    own = (
        select(blobs.c.sha256, blobs.c.size)
        .join(grants, grants.c.sha256 == blobs.c.sha256)
        .join(repositories, repositories.c.id == grants.c.repository)
        .where(
            repositories.c.namespace == namespace,
            grants.c.is_committed.is_(True) if committed else true(),
        )
        .distinct()
        .subquery()
    )
    return int(connection.execute(select(func.coalesce(func.sum(own.c.size), 0))).scalar_one())


def sizes_of(connection: Connection, digests: Collection[str]) -> int:
    """Return the total size of some files in bytes."""
    own = select(func.coalesce(func.sum(blobs.c.size), 0)).where(blobs.c.sha256.in_([*digests]))
    return int(connection.execute(own).scalar_one())


def promised_bytes(connection: Connection, namespace: int) -> int:
    """Return the bytes reserved for uploads to a namespace, without duplicates."""
    here = select(repositories.c.id).where(repositories.c.namespace == namespace)
    known = select(grants.c.sha256).where(grants.c.repository.in_(here))
    own = (
        select(promises.c.sha256, promises.c.size)
        .where(
            promises.c.repository.in_(here),
            promises.c.expires > now_text(),
            promises.c.sha256.not_in(known),
        )
        .distinct()
        .subquery()
    )
    return int(connection.execute(select(func.coalesce(func.sum(own.c.size), 0))).scalar_one())


def promise(
    connection: Connection, repository: int, sizes: Mapping[str, int], seconds: float
) -> None:
    """Reserve space for files to be uploaded, for a limited time."""
    own = (promises.c.repository == repository, promises.c.sha256.in_([*sizes]))
    connection.execute(delete(promises).where(or_(and_(*own), promises.c.expires <= now_text())))
    rows = [
        {"repository": repository, "sha256": sha256, "size": size, "expires": now_text(-seconds)}
        for sha256, size in sizes.items()
    ]
    if rows:
        connection.execute(insert(promises), rows)


def branch_head(connection: Connection, repository: int, branch: str = MAIN) -> CommitRecord | None:
    """Return the head commit of a branch."""
    oid = select(refs.c.commit).where(
        refs.c.repository == repository, refs.c.kind == BRANCH, refs.c.name == branch
    )
    row = connection.execute(
        select(commits).where(
            commits.c.repository == repository, commits.c.oid == oid.scalar_subquery()
        )
    ).first()
    return _record(row) if row else None


def no_branch(connection: Connection, repository: int, revision: str) -> MissingRevisionError:
    """Return the error for committing to a revision that is not a branch, such as a tag."""
    try:
        commit_at(connection, repository, revision)
    except MissingRevisionError as error:
        return error
    return MissingRevisionError(
        revision, "is not a branch: commit to a branch, then tag the commit"
    )


def commit_at(connection: Connection, repository: int, revision: str) -> CommitRecord:
    """Return the commit of a branch, a tag or an oid.

    Raises:
        MissingRevisionError: the revision does not exist.
    """
    name = name_of_ref(revision)
    row = connection.execute(
        select(commits)
        .join(
            refs,
            and_(refs.c.repository == commits.c.repository, refs.c.commit == commits.c.oid),
            isouter=True,
        )
        .where(
            commits.c.repository == repository,
            or_(refs.c.name == name, commits.c.oid == name)
            if is_commit(name)
            else refs.c.name == name,
            commits.c.is_removed.is_(False),
        )
        .order_by(refs.c.kind)
        .limit(1)
    ).first()
    if row is None and re.fullmatch("[0-9a-f]{7,39}", name):
        starting = select(commits).where(
            commits.c.repository == repository,
            commits.c.oid.startswith(name),
            commits.c.is_removed.is_(False),
        )
        short = connection.execute(starting.limit(2)).all()
        row = short[0] if len(short) == 1 else None
    if row is None:
        raise MissingRevisionError(revision)
    return _record(row)


def name_of_ref(revision: str) -> str:
    """Return the name of the branch, tag or commit that a revision refers to."""
    name = MAIN if revision == "HEAD" else revision
    for prefix in ("refs/heads/", "refs/tags/"):
        name = name.removeprefix(prefix)
    return name


def history(
    connection: Connection, repository: int, start: CommitRecord, most: int
) -> list[CommitRecord]:
    """Return the history of a commit, newest first, without removed commits."""
    walked: list[CommitRecord] = []
    here: CommitRecord | None = start
    while here is not None and len(walked) < most:
        walked.append(here)
        parent = here.parent
        here = None
        while parent is not None and here is None:
            row = connection.execute(
                select(commits).where(commits.c.repository == repository, commits.c.oid == parent)
            ).one()
            parent, here = row.parent, None if row.is_removed else _record(row)
    return walked


def last_commits(
    connection: Connection, repository: int, start: CommitRecord, paths: Collection[str]
) -> dict[str, CommitRecord]:
    """Return the last commit that changed each file, or anything in each folder.

    For paths unchanged in the last `MOST_WALKED` commits, return the oldest commit that was read.
    """
    latest: dict[str, CommitRecord] = {}
    walked = history(connection, repository, start, MOST_WALKED)
    new = read_tree(connection, start.tree)
    for here, parent in zip(walked, [*walked[1:], None], strict=True):
        old: Tree = read_tree(connection, parent.tree) if parent else {}
        changed = {path for path in {*new, *old} if new.get(path) != old.get(path)}
        changed |= {path[:end] for path in changed for end in _folder_ends(path)}
        latest |= {path: here for path in paths if path in changed and path not in latest}
        if len(latest) == len({*paths}):
            break
        new = old
    return {path: latest.get(path, walked[-1]) for path in paths}


def _folder_ends(path: str) -> list[int]:
    return [place for place, character in enumerate(path) if character == "/"]


def refs_of(connection: Connection, repository: int) -> dict[str, dict[str, str]]:
    """Return the commits of branches and tags, by kind and name."""
    by_kind: dict[str, dict[str, str]] = {BRANCH: {}, TAG: {}}
    rows = connection.execute(
        select(refs).where(refs.c.repository == repository).order_by(refs.c.name)
    )
    for row in rows:
        by_kind[row.kind][row.name] = row.commit
    return by_kind


def move_ref(connection: Connection, repository: int, kind: str, name: str, commit: str) -> None:
    """Point a ref at a commit; create it if necessary."""
    own = (refs.c.repository == repository, refs.c.kind == kind, refs.c.name == name)
    changes_of(connection).commits.setdefault((repository, commit), False)
    if not connection.execute(update(refs).where(*own).values(commit=commit)).rowcount:
        connection.execute(
            insert(refs).values(repository=repository, kind=kind, name=name, commit=commit)
        )


def _record(row: object) -> CommitRecord:
    return CommitRecord(*(getattr(row, name) for name in CommitRecord.__dataclass_fields__))
