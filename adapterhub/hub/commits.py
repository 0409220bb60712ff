"""The commit: the only way in which a repository's files change.

Within one transaction it compares the parent with the head, applies the operations to the tree of
the head, and moves the ref; the gate then puts the new files in their places (gate.py). A request
that comes a second time, since its answer was lost, gets the head that it had made.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, and_, delete, func, insert, or_, select, true, update

from adapterhub.backbones.origins import is_commit
from adapterhub.errors import one_line
from adapterhub.hub.blobs import BlobInfo, StagedBlob
from adapterhub.hub.changes import changes_of
from adapterhub.hub.refusals import (
    HubRefusal,
    MissingEntryError,
    MissingRevisionError,
    StaleParentError,
)
from adapterhub.hub.tables import blobs, commits, grants, promises, refs, repositories
from adapterhub.hub.times import now_precisely, now_text
from adapterhub.hub.trees import Tree, check_paths, keep_tree, oid_of_tree, read_tree

MOST_WALKED = 2_000  # commits, to find the last ones that changed some paths
BRANCH, TAG = "branch", "tag"
MAIN = "main"


@dataclass(frozen=True)
class CommitRecord:
    """A commit as it is kept."""

    oid: str
    parent: str | None
    tree: str
    title: str
    message: str
    author: str
    created: str


@dataclass
class CommitChange:
    """What a commit changes.

    Attributes:
        title: the first line of its message.
        message: the rest of it.
        parent: the head that the writer saw; None where that does not matter.
        files: new files by path, received with the commit.
        large: digests and sizes of files that were uploaded before, by path; -1 for a copy.
        removed: the paths of files to remove.
        removed_folders: those of folders.
        created: when it was made; None for now.
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
    """Commit a change to a branch; call it inside `changing`, which puts the files in place.

    Raises:
        StaleParentError: the head is another one than the writer saw.
        MissingEntryError: a file to remove does not exist.
        MissingRevisionError: there is no such branch.
        HubRefusal: a file is not known, or paths cannot be beside each other.
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
    """Return the files after a change.

    Raises:
        MissingEntryError: a file or folder to remove does not exist.
    """
    tree = dict(old)
    for path in change.removed:
        if tree.pop(path, None) is None:
            raise MissingEntryError(f"A file with this name doesn't exist: {one_line(path, 200)}")
    folders = {name.rstrip("/"): name for name in change.removed_folders}
    found = set()
    for path in [*tree] if folders else ():
        if above := {path[:end] for end in _folder_ends(path)} & folders.keys():
            found |= above
            del tree[path]
    for name in folders.keys() - found:
        raise MissingEntryError(
            f"A file with this name doesn't exist: {one_line(folders[name], 200)}"
        )
    tree |= {path: staged.info for path, staged in change.files.items()}
    return {**tree, **large}


def _large_files(
    connection: Connection, repository: int, large: Mapping[str, tuple[str, int]]
) -> dict[str, BlobInfo]:
    """Return the files that were uploaded to this repository before.

    Raises:
        HubRefusal: one was not, or has another size.
    """
    found = granted(connection, repository, {sha256 for sha256, _ in large.values()})
    named = {}
    for path, (sha256, size) in large.items():
        blob = found.get(sha256)
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
    connection.execute(insert(commits).values(repository=repository, **vars(record)))
    changes_of(connection).commits[repository, oid] = True
    connection.execute(
        update(repositories).where(repositories.c.id == repository).values(modified=created)
    )
    return record


def grant(
    connection: Connection, repository: int, infos: Iterable[BlobInfo], *, is_committed: bool = True
) -> None:
    """Let a repository name files, which are in their places at the end of the transaction."""
    wanted = {info.sha256: info for info in infos}
    if not wanted:
        return
    known = set(
        connection.execute(select(blobs.c.sha256).where(blobs.c.sha256.in_(wanted))).scalars()
    )
    if new := [info for info in wanted.values() if info.sha256 not in known]:
        connection.execute(insert(blobs), [vars(info) for info in new])
    own = grants.c.repository == repository
    rows = connection.execute(
        select(grants.c.sha256, grants.c.is_committed).where(own, grants.c.sha256.in_(wanted))
    ).all()
    had = {row.sha256: row.is_committed for row in rows}
    now = now_text()
    if fresh := [sha256 for sha256 in wanted if sha256 not in had]:
        changes_of(connection).granted |= {(repository, sha256) for sha256 in fresh}
        kept = (promises.c.repository == repository, promises.c.sha256.in_(fresh))
        connection.execute(delete(promises).where(*kept))
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
    elif not is_committed and had:  # the time of grace begins anew
        connection.execute(
            update(grants).where(own, grants.c.sha256.in_([*had])).values(granted=now)
        )


def granted(
    connection: Connection, repository: int, digests: Sequence[str] | set[str]
) -> dict[str, BlobInfo]:
    """Return those of some files that a repository may name."""
    rows = connection.execute(
        select(blobs)
        .join(grants, grants.c.sha256 == blobs.c.sha256)
        .where(grants.c.repository == repository, blobs.c.sha256.in_([*digests]))
    ).all()
    return {row.sha256: BlobInfo(row.sha256, row.size, row.git_sha1) for row in rows}


def used_bytes(connection: Connection, namespace: int, *, committed: bool = False) -> int:
    """Return how many bytes the files of a namespace have, or of its commits, each counted once."""
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
    """Return how many bytes some files have."""
    own = select(func.coalesce(func.sum(blobs.c.size), 0)).where(blobs.c.sha256.in_([*digests]))
    return int(connection.execute(own).scalar_one())


def promised_bytes(connection: Connection, namespace: int) -> int:
    """Return how many bytes uploads to a namespace may still bring, each file counted once."""
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
    """Keep room for files that are to be uploaded, for some time."""
    own = (promises.c.repository == repository, promises.c.sha256.in_([*sizes]))
    connection.execute(delete(promises).where(or_(and_(*own), promises.c.expires <= now_text())))
    rows = [
        {"repository": repository, "sha256": sha256, "size": size, "expires": now_text(-seconds)}
        for sha256, size in sizes.items()
    ]
    if rows:
        connection.execute(insert(promises), rows)


def branch_head(connection: Connection, repository: int, branch: str = MAIN) -> CommitRecord | None:
    """Return the commit of a branch."""
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
    """Return the error for a commit to what is no branch: a tag and a commit take none, either."""
    try:
        commit_at(connection, repository, revision)
    except MissingRevisionError as error:
        return error
    return MissingRevisionError(revision, "is no branch: commit to a branch, and tag the commit")


def commit_at(connection: Connection, repository: int, revision: str) -> CommitRecord:
    """Return the commit of a branch, a tag or an oid.

    Raises:
        MissingRevisionError: there is none.
    """
    name = name_of_ref(revision)
    found = connection.execute(
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
    if found is None and re.fullmatch("[0-9a-f]{7,39}", name):
        starting = select(commits).where(
            commits.c.repository == repository,
            commits.c.oid.startswith(name),
            commits.c.is_removed.is_(False),
        )
        short = connection.execute(starting.limit(2)).all()
        found = short[0] if len(short) == 1 else None
    if found is None:
        raise MissingRevisionError(revision)
    return _record(found)


def name_of_ref(revision: str) -> str:
    """Return the branch, tag or commit that a revision is, in whatever form it is asked."""
    name = MAIN if revision == "HEAD" else revision
    for prefix in ("refs/heads/", "refs/tags/"):
        name = name.removeprefix(prefix)
    return name


def history(
    connection: Connection, repository: int, start: CommitRecord, most: int
) -> list[CommitRecord]:
    """Return commits from one backwards, without those that were removed."""
    found: list[CommitRecord] = []
    here: CommitRecord | None = start
    while here is not None and len(found) < most:
        found.append(here)
        parent = here.parent
        here = None
        while parent is not None and here is None:
            row = connection.execute(
                select(commits).where(commits.c.repository == repository, commits.c.oid == parent)
            ).one()
            parent, here = row.parent, None if row.is_removed else _record(row)
    return found


def last_commits(
    connection: Connection, repository: int, start: CommitRecord, paths: Collection[str]
) -> dict[str, CommitRecord]:
    """Return the last commit that changed each file, or anything in each folder.

    Of what was changed more than `MOST_WALKED` commits ago, the oldest commit that was read.
    """
    found: dict[str, CommitRecord] = {}
    walked = history(connection, repository, start, MOST_WALKED)
    new = read_tree(connection, start.tree)
    for here, parent in zip(walked, [*walked[1:], None], strict=True):
        old: Tree = read_tree(connection, parent.tree) if parent else {}
        changed = {path for path in {*new, *old} if new.get(path) != old.get(path)}
        changed |= {path[:end] for path in changed for end in _folder_ends(path)}
        found |= {path: here for path in paths if path in changed and path not in found}
        if len(found) == len({*paths}):
            break
        new = old
    return {path: found.get(path, walked[-1]) for path in paths}


def _folder_ends(path: str) -> list[int]:
    return [place for place, character in enumerate(path) if character == "/"]


def refs_of(connection: Connection, repository: int) -> dict[str, dict[str, str]]:
    """Return the commits of branches and of tags, by kind and name."""
    found: dict[str, dict[str, str]] = {BRANCH: {}, TAG: {}}
    rows = connection.execute(
        select(refs).where(refs.c.repository == repository).order_by(refs.c.name)
    )
    for row in rows:
        found[row.kind][row.name] = row.commit
    return found


def move_ref(connection: Connection, repository: int, kind: str, name: str, commit: str) -> None:
    """Let a ref name a commit, whether it exists or not."""
    own = (refs.c.repository == repository, refs.c.kind == kind, refs.c.name == name)
    changes_of(connection).commits.setdefault((repository, commit), False)
    if not connection.execute(update(refs).where(*own).values(commit=commit)).rowcount:
        connection.execute(
            insert(refs).values(repository=repository, kind=kind, name=name, commit=commit)
        )


def _record(row: object) -> CommitRecord:
    return CommitRecord(*(getattr(row, name) for name in CommitRecord.__dataclass_fields__))
