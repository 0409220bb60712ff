"""Maintenance: collect unused files, and verify the stored ones.

Collection and backup exclude each other; neither stops the server. A file is forgotten in one
transaction and removed in the next, unless it was stored again in between. If collection is
interrupted, every file that the database names still exists.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sqlalchemy import Connection, delete, select, true

from adapterhub.files.atomic import FileDigest
from adapterhub.hub.accounts import MIRROR
from adapterhub.hub.blobs import BlobInfo, Blobs, discard_staged
from adapterhub.hub.commits import read_tree
from adapterhub.hub.database import (
    blobs,
    commits,
    grants,
    namespaces,
    now_text,
    promises,
    repositories,
    trees,
)
from adapterhub.hub.state import Hub

GRACE_SECONDS = 2 * 3600.0  # for uploaded files that are not yet committed
_AT_ONCE = 200  # files that are removed in one transaction


@dataclass
class CollectReport:
    """The result of a collection: files and their bytes, trees, and unfinished uploads."""

    files: int = 0
    size: int = 0
    trees: int = 0
    uploads: int = 0


def collect(hub: Hub, *, dry_run: bool = False, grace: float = GRACE_SECONDS) -> CollectReport:
    """Remove the files that no commit uses, and the remains of interrupted uploads.

    Args:
        hub: the hub, which may be serving.
        dry_run: remove nothing, only report.
        grace: how many seconds an uploaded file may wait for its commit.
    """
    report = CollectReport()
    with hub.database.alone():
        before = now_text(grace)
        late = (grants.c.is_committed.is_(False), grants.c.granted < before)
        if not dry_run:
            with hub.database.writing() as connection:
                connection.execute(delete(grants).where(*late))
                connection.execute(delete(promises).where(promises.c.expires <= now_text()))
        with hub.database.reading() as connection:
            known = set(connection.execute(select(blobs.c.sha256)).scalars())
            needed = set(
                connection.execute(
                    select(grants.c.sha256).where(~(late[0] & late[1]) if dry_run else true())
                ).scalars()
            )
        unneeded = [*(known - needed), *(set(hub.blobs.all()) - known)]
        for some in _batches(unneeded):
            if dry_run:
                report.files += len(some)
                report.size += sum(hub.blobs.size(sha256) for sha256 in some)
                continue
            with hub.database.writing() as connection:
                gone = [sha256 for sha256 in some if forget_blob(connection, sha256)]
            report.files += len(gone)
            report.size += remove_files(hub, gone)
        report.trees = _collect_trees(hub, dry_run)
        report.uploads = hub.blobs.collect_uploads(time.time() - grace, dry_run=dry_run)
    return report


def verify_hub(hub: Hub, source: Blobs | None = None) -> list[str]:
    """Read everything, and list the problems.

    With another hub as `source`, such as a backup, missing or damaged files are replaced by intact
    copies from there.
    """
    problems = hub.database.problems()
    with hub.database.reading() as connection:
        problems += _problems_of_commits(connection)
        known = {row.sha256: row.size for row in connection.execute(select(blobs))}
    for sha256, size in known.items():
        info = BlobInfo(sha256, size, "")
        if source is not None and not hub.blobs.is_intact(info) and _repair(hub, source, info):
            continue
        if hub.blobs.size(sha256) < 0:
            problems.append(f"blobs/{sha256}: missing{_users(hub, sha256)}")
        elif hub.blobs.digest(sha256) != FileDigest(size, sha256):
            users = _users(hub, sha256)
            fate = "; removed, and fetched again when requested" * _forget_copy(hub, sha256)
            problems.append(f"blobs/{sha256}: its bytes have changed{users}{fate}")
    return problems


def _repair(hub: Hub, source: Blobs, info: BlobInfo) -> bool:
    """Replace a file with an intact copy from another hub; return whether it succeeded."""
    if not source.is_intact(info):
        return False

    def copy(path: Path) -> BlobInfo:
        source.copy(info.sha256, path)
        return info

    staged = hub.blobs.receive_from(copy)
    try:
        hub.blobs.send(staged)
        with hub.database.writing():
            hub.blobs.put(staged)
    finally:
        discard_staged(staged)
    return True


def forget_blob(connection: Connection, sha256: str) -> bool:
    """Forget a file not granted since; return whether it was. Call `remove_files` next."""
    if connection.execute(select(grants.c.sha256).where(grants.c.sha256 == sha256)).first():
        return False
    connection.execute(delete(blobs).where(blobs.c.sha256 == sha256))
    return True


def remove_files(hub: Hub, digests: Collection[str]) -> int:
    """Remove forgotten files, unless they are known again; return the bytes freed."""
    size = 0
    with hub.database.writing() as connection:
        chosen = select(blobs.c.sha256).where(blobs.c.sha256.in_(digests))
        for sha256 in {*digests} - {*connection.execute(chosen).scalars()}:
            size += max(hub.blobs.size(sha256), 0)
            hub.blobs.remove(sha256)
    return size


def _collect_trees(hub: Hub, dry_run: bool) -> int:
    unused = trees.c.oid.not_in(select(commits.c.tree))
    if dry_run:
        with hub.database.reading() as connection:
            return len(connection.execute(select(trees.c.oid).where(unused)).all())
    with hub.database.writing() as connection:
        return connection.execute(delete(trees).where(unused)).rowcount


def _problems_of_commits(connection: Connection) -> Iterator[str]:
    rows = connection.execute(
        select(repositories.c.id, repositories.c.name, commits.c.oid, commits.c.tree)
        .join(commits, commits.c.repository == repositories.c.id)
        .join(namespaces, namespaces.c.id == repositories.c.namespace)
        .where(commits.c.is_removed.is_(False), namespaces.c.kind != MIRROR)
    ).all()
    granted: dict[int, set[str]] = {}
    for repository, sha256 in connection.execute(select(grants.c.repository, grants.c.sha256)):
        granted.setdefault(repository, set()).add(sha256)
    for row in rows:
        own = granted.get(row.id, set())
        for path, blob in read_tree(connection, row.tree).items():
            if blob.sha256 not in own:
                yield f"{row.name}@{row.oid[:12]}: {path} is not granted"


def _forget_copy(hub: Hub, sha256: str) -> bool:
    """Forget a damaged file if only mirrored repositories have it; return whether it was."""
    kinds = (
        select(namespaces.c.kind)
        .join(repositories, repositories.c.namespace == namespaces.c.id)
        .join(grants, grants.c.repository == repositories.c.id)
        .where(grants.c.sha256 == sha256)
    )
    with hub.database.alone():
        with hub.database.writing() as connection:
            if {*connection.execute(kinds).scalars()} != {MIRROR}:
                return False
            connection.execute(delete(grants).where(grants.c.sha256 == sha256))
            forget_blob(connection, sha256)
        remove_files(hub, [sha256])
    return True


def _users(hub: Hub, sha256: str) -> str:
    with hub.database.reading() as connection:
        names = connection.execute(
            select(repositories.c.name)
            .join(grants, grants.c.repository == repositories.c.id)
            .where(grants.c.sha256 == sha256)
            .order_by(repositories.c.name)
            .limit(3)
        ).scalars()
        shown = ", ".join(names)
    return f" (of {shown})" if shown else ""


def _batches(items: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(items)
    while some := [*islice(rest, _AT_ONCE)]:
        yield some
