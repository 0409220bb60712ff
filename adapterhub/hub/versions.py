"""The versions of an adapter: numbered tags that are never moved, nor given a second time.

`v3` is a tag whose number is kept even when the version, or its repository, is deleted. To delete a
version removes each commit that has its files; what no commit has is collected later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select, update

from adapterhub.backbones.origins import is_commit
from adapterhub.errors import one_line, printable
from adapterhub.files.native import MANIFEST_FILE, SIGNATURE_FILE
from adapterhub.files.tensor_file import TENSORS_FILE
from adapterhub.hub.accepted import is_weights
from adapterhub.hub.changes import NewVersion, changes_of
from adapterhub.hub.commits import (
    BRANCH,
    MAIN,
    TAG,
    CommitChange,
    branch_head,
    commit_at,
    move_ref,
    refs_of,
    write_commit,
)
from adapterhub.hub.described import ReadBlob
from adapterhub.hub.refusals import (
    DeniedError,
    HubRefusal,
    MissingRevisionError,
    TakenError,
)
from adapterhub.hub.repositories import HubRepository
from adapterhub.hub.tables import commits, grants, refs, repositories, versions
from adapterhub.hub.trees import Tree, read_tree
from adapterhub.registry.other_formats import CONFIG_FILE
from adapterhub.registry.published_files import (
    BESIDE_FILE,
    BESIDE_SIGNATURE,
    MAX_YANKED_BYTES,
    YANKED_FILE,
)
from adapterhub.registry.reference import is_version
from adapterhub.registry.store import is_version_folder, version_number

_OF_A_VERSION = (
    MANIFEST_FILE,
    TENSORS_FILE,
    SIGNATURE_FILE,
    CONFIG_FILE,
    "adapter_model.safetensors",
    BESIDE_FILE,
    BESIDE_SIGNATURE,
)


@dataclass(frozen=True)
class HubVersion:
    """A numbered version: its commit, the sha256 of its manifest, its tags, why it was yanked."""

    number: int
    commit: str
    digest: str
    tags: tuple[str, ...] = ()
    yanked: str | None = None

    @property
    def name(self) -> str:
        """Its tag."""
        return f"v{self.number}"


def versions_of(connection: Connection, repository: int, read: ReadBlob) -> list[HubVersion]:
    """List the versions of a repository, the oldest first."""
    rows = connection.execute(
        select(versions.c.number, versions.c.commit, versions.c.digest)
        .where(versions.c.repository == repository)
        .order_by(versions.c.number)
    ).all()
    if not rows:
        return []
    head = branch_head(connection, repository)
    yanked = yanked_in(read_tree(connection, head.tree), read) if head else {}
    tags: dict[str, list[str]] = {}
    for tag, commit in refs_of(connection, repository)[TAG].items():
        if not is_version_folder(tag):
            tags.setdefault(commit, []).append(tag)
    return [
        HubVersion(*row, tuple(tags.get(row.commit, ())), yanked.get(f"v{row.number}"))
        for row in rows
    ]


def yanked_in(tree: Tree, read: ReadBlob) -> dict[str, str]:
    """Return the reasons of versions that were yanked."""
    blob = tree.get(YANKED_FILE)
    if blob is None or blob.size > MAX_YANKED_BYTES:
        return {}
    try:
        found = json.loads(read(blob.sha256, MAX_YANKED_BYTES))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: printable(v) for k, v in found.items() if isinstance(v, str)}


def create_tag(connection: Connection, repository: HubRepository, tag: str, commit: str) -> None:
    """Create a tag of a commit; one with a number is a version, whose number the gate checks.

    Raises:
        TakenError: there is one.
        HubRefusal: the name is not valid.
    """
    check_ref_name(tag)
    known = refs_of(connection, repository.id)
    if tag in known[TAG] or tag in known[BRANCH]:
        raise TakenError(f"{tag} exists already, and is not moved")
    if is_version_folder(tag):
        _add_version(connection, repository, version_number(tag) or 0, commit)
    move_ref(connection, repository.id, TAG, tag, commit)


def delete_tag(connection: Connection, repository: HubRepository, tag: str) -> None:
    """Delete a tag; of a version, its files stay in the commits.

    Raises:
        MissingRevisionError: there is none.
    """
    if tag not in refs_of(connection, repository.id)[TAG]:
        raise MissingRevisionError(tag)
    _remove_tag(connection, repository, tag)


def move_tag(connection: Connection, repository: HubRepository, tag: str, commit: str) -> None:
    """Let a tag name a commit, whether it exists or not.

    Raises:
        TakenError: it is a version, which never moves.
    """
    known = refs_of(connection, repository.id)[TAG].get(tag)
    if known == commit:
        return
    if known is not None:
        if is_version_folder(tag):
            raise TakenError(f"{tag} is a version, which never moves")
        _remove_tag(connection, repository, tag)
    create_tag(connection, repository, tag, commit)


def delete_branch(connection: Connection, repository: HubRepository, branch: str) -> None:
    """Delete a branch; its commits stay.

    Raises:
        DeniedError: it is `main`.
        MissingRevisionError: there is none.
    """
    if branch == MAIN:
        raise DeniedError("the branch main is not deleted")
    gone = connection.execute(
        delete(refs).where(
            refs.c.repository == repository.id, refs.c.kind == BRANCH, refs.c.name == branch
        )
    )
    if not gone.rowcount:
        raise MissingRevisionError(branch)
    changes_of(connection).refs.add((repository.id, BRANCH, branch))


def delete_version(
    connection: Connection,
    repository: HubRepository,
    number: int,
    author: str,
    read: ReadBlob,
    may_return: Callable[[Tree], bool] = lambda tree: True,
) -> None:
    """Delete a version for good: what no other version has of it is in no commit that remains.

    Branches that had it get the files of the newest other version, unless `may_return` says that
    these are not taken any more.

    Raises:
        MissingRevisionError: there is none.
    """
    known = {v.number: v for v in versions_of(connection, repository.id, read)}
    if number not in known:
        raise MissingRevisionError(f"v{number}")
    gone = known.pop(number)
    trees = [_tree_of(connection, repository, each) for each in known.values()]
    kept_by_others = {blob.sha256 for tree in trees for blob in tree.values()}
    private = {
        blob.sha256
        for path, blob in _tree_of(connection, repository, gone).items()
        if path == MANIFEST_FILE or is_weights(path)
    } - kept_by_others
    older = trees[-1] if trees and may_return(trees[-1]) else {}
    for branch in refs_of(connection, repository.id)[BRANCH] if private else ():
        _leave_head(connection, repository, branch, private, older, gone.name, author)
    own = commits.c.repository == repository.id
    rows = connection.execute(select(commits.c.oid, commits.c.tree).where(own)).all()
    kept: set[str] = set()
    for row in rows:
        digests = {blob.sha256 for blob in read_tree(connection, row.tree).values()}
        if not digests & private:
            kept |= digests
            continue
        removed = (own, commits.c.oid == row.oid)
        connection.execute(update(commits).where(*removed).values(is_removed=True))
        here = (refs.c.repository == repository.id, refs.c.kind == TAG)
        connection.execute(delete(refs).where(*here, refs.c.commit == row.oid))
    _remove_tag(connection, repository, gone.name)
    granted_here = grants.c.repository == repository.id
    had = connection.execute(
        select(grants.c.sha256).where(granted_here, grants.c.is_committed.is_(True))
    ).scalars()
    for sha256 in {*had} - kept:
        connection.execute(delete(grants).where(granted_here, grants.c.sha256 == sha256))


def check_ref_name(name: str) -> None:
    """Refuse the name of a branch or tag that could not be asked for.

    Raises:
        HubRefusal: it could not.
    """
    wrong = not is_version(name) or is_commit(name) or name.endswith((".lock", "/", "."))
    if wrong or "//" in name or name.startswith("refs/"):
        raise HubRefusal(f"{one_line(name, 100)!r} cannot be the name of a branch or tag")
    if name.isdecimal():
        raise HubRefusal(f"{name} cannot be a tag: the versions are v1, v2, ...")


def _add_version(
    connection: Connection, repository: HubRepository, number: int, commit: str
) -> None:
    tree = read_tree(connection, commit_at(connection, repository.id, commit).tree)
    changes_of(connection).versions.append(
        NewVersion(repository.id, number, commit, repository.highest)
    )
    connection.execute(
        insert(versions).values(
            repository=repository.id,
            number=number,
            commit=commit,
            digest=_digest(tree),
        )
    )
    connection.execute(
        update(repositories)
        .where(repositories.c.id == repository.id)
        .values(highest=max(number, repository.highest))
    )


def _tree_of(connection: Connection, repository: HubRepository, version: HubVersion) -> Tree:
    return read_tree(connection, commit_at(connection, repository.id, version.commit).tree)


def _leave_head(
    connection: Connection,
    repository: HubRepository,
    branch: str,
    private: Set[str],
    older: Tree,
    gone: str,
    author: str,
) -> None:
    """Commit the files of another version, if a head has some that are to be deleted."""
    head = branch_head(connection, repository.id, branch)
    assert head is not None
    tree = read_tree(connection, head.tree)
    wrong = {path for path, blob in tree.items() if blob.sha256 in private}
    if not wrong:
        return
    change = CommitChange(f"Delete {gone}")
    for path in sorted(wrong | {*_OF_A_VERSION}):
        if path in older:
            change.large[path] = (older[path].sha256, older[path].size)
        elif path in tree:
            change.removed.append(path)
    write_commit(connection, repository.id, branch, change, author)


def _remove_tag(connection: Connection, repository: HubRepository, tag: str) -> None:
    changes_of(connection).refs.add((repository.id, TAG, tag))
    connection.execute(
        delete(refs).where(
            refs.c.repository == repository.id, refs.c.kind == TAG, refs.c.name == tag
        )
    )
    if is_version_folder(tag):
        connection.execute(
            delete(versions).where(
                versions.c.repository == repository.id,
                versions.c.number == version_number(tag),
            )
        )


def _digest(tree: Tree) -> str:
    return tree[MANIFEST_FILE].sha256 if MANIFEST_FILE in tree else ""
