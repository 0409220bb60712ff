"""The versions of an adapter: numbered tags that are never moved, nor given a second time.

`v3` is a tag whose number is kept even when the version, or its repository, is deleted. To delete a
version removes each commit that has its files; what no commit has is collected later.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select, update

from adapterhub.backbones.origins import is_commit
from adapterhub.errors import one_line, printable
from adapterhub.files.native import MANIFEST_FILE, SIGNATURE_FILE
from adapterhub.files.tensor_file import TENSORS_FILE
from adapterhub.hub.accepted import NamespaceRules
from adapterhub.hub.accounts import ADMIN, Visitor
from adapterhub.hub.blobs import Blobs
from adapterhub.hub.commits import (
    BRANCH,
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
from adapterhub.registry.published_files import MAX_YANKED_BYTES, YANKED_FILE
from adapterhub.registry.reference import is_version
from adapterhub.registry.store import is_version_folder, version_number

MOST_SKIPPED = 1_000
"""Numbers of versions that an admin may skip, for a copy of a registry that has deleted some."""
_OF_A_VERSION = (
    MANIFEST_FILE,
    TENSORS_FILE,
    SIGNATURE_FILE,
    CONFIG_FILE,
    "adapter_model.safetensors",
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


def create_tag(
    connection: Connection,
    repository: HubRepository,
    tag: str,
    commit: str,
    *,
    most_skipped: int = 0,
) -> None:
    """Create a tag of a commit; one with a number is a version.

    Versions are numbered one after the other; a copy of a registry may skip some numbers.

    Raises:
        TakenError: there is one, or the number was given before, or it is not the next one.
        HubRefusal: the name is not valid.
    """
    check_ref_name(tag)
    known = refs_of(connection, repository.id)
    if tag in known[TAG] or tag in known[BRANCH]:
        raise TakenError(f"{tag} exists already, and is not moved")
    number = version_number(tag) if is_version_folder(tag) else None
    if number is not None:
        if number <= repository.highest:
            raise TakenError(
                f"v{number} was given before: a number is not used again; the next is "
                f"v{repository.highest + 1}"
            )
        if number > repository.highest + 1 + most_skipped:
            raise TakenError(
                f"v{number} is not the next version: it is v{repository.highest + 1}. Versions are "
                f"numbered one after the other; an admin may skip {MOST_SKIPPED:,} numbers"
            )
        _add_version(connection, repository, number, commit)
    move_ref(connection, repository.id, TAG, tag, commit)


def delete_tag(
    connection: Connection,
    repository: HubRepository,
    tag: str,
    visitor: Visitor,
    rules: NamespaceRules,
) -> None:
    """Delete a tag; of a version, its files stay in the commits.

    Raises:
        MissingRevisionError: there is none.
        DeniedError: only an admin may delete it.
    """
    if tag not in refs_of(connection, repository.id)[TAG]:
        raise MissingRevisionError(tag)
    if is_version_folder(tag) or rules.protects(tag):
        require_admin(visitor, repository, f"delete {tag}")
    _remove_tag(connection, repository, tag)


def move_tag(
    connection: Connection,
    repository: HubRepository,
    tag: str,
    commit: str,
    visitor: Visitor,
    rules: NamespaceRules,
) -> None:
    """Let a tag name a commit, whether it exists or not.

    Raises:
        TakenError: it is a version, which never moves.
        DeniedError: only an admin may move it.
    """
    known = refs_of(connection, repository.id)[TAG].get(tag)
    if known == commit:
        return
    if known is not None:
        if is_version_folder(tag):
            raise TakenError(f"{tag} is a version, which never moves")
        if rules.protects(tag):
            require_admin(visitor, repository, f"move {tag}")
        _remove_tag(connection, repository, tag)
    skipped = MOST_SKIPPED if visitor.may(ADMIN, repository.namespace) else 0
    create_tag(connection, repository, tag, commit, most_skipped=skipped)


def delete_version(
    connection: Connection, folder: Blobs, repository: HubRepository, number: int, author: str
) -> None:
    """Delete a version for good: no commit that remains has its files, unless another has the same.

    Raises:
        MissingRevisionError: there is none.
    """
    known = {v.number: v for v in versions_of(connection, repository.id, folder.read)}
    if number not in known:
        raise MissingRevisionError(f"v{number}")
    gone = known.pop(number)
    others = known.values()
    if any(v.commit == gone.commit or v.digest == gone.digest != "" for v in others):
        _remove_tag(connection, repository, gone.name)
        return
    for branch in refs_of(connection, repository.id)[BRANCH]:
        _leave_head(connection, folder, repository, branch, gone, [*others], author)
    own = commits.c.repository == repository.id
    rows = connection.execute(select(commits.c.oid, commits.c.tree).where(own)).all()
    kept: set[str] = set()
    for row in rows:
        tree = read_tree(connection, row.tree)
        if row.oid == gone.commit or (gone.digest and _digest(tree) == gone.digest):
            connection.execute(
                update(commits).where(own, commits.c.oid == row.oid).values(is_removed=True)
            )
            connection.execute(
                delete(refs).where(
                    refs.c.repository == repository.id,
                    refs.c.kind == TAG,
                    refs.c.commit == row.oid,
                )
            )
        else:
            kept |= {blob.sha256 for blob in tree.values()}
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


def require_admin(visitor: Visitor, repository: HubRepository, what: str) -> None:
    """Refuse what only an admin of the namespace may do.

    Raises:
        DeniedError: the visitor is none.
    """
    if not visitor.may(ADMIN, repository.namespace):
        raise DeniedError(f"only an admin of {repository.name.partition('/')[0]} may {what}")


def _add_version(
    connection: Connection, repository: HubRepository, number: int, commit: str
) -> None:
    tree = read_tree(connection, commit_at(connection, repository.id, commit).tree)
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


def _leave_head(
    connection: Connection,
    folder: Blobs,
    repository: HubRepository,
    branch: str,
    gone: HubVersion,
    others: Sequence[HubVersion],
    author: str,
) -> None:
    """Commit the files of the newest other version, if a head has those of one to delete."""
    head = branch_head(connection, repository.id, branch)
    assert head is not None
    tree = read_tree(connection, head.tree)
    if _digest(tree) != gone.digest and head.oid != gone.commit:
        return
    change = CommitChange(f"Delete v{gone.number}")
    older: Tree = {}
    if others:
        newest = commit_at(connection, repository.id, others[-1].commit)
        older = read_tree(connection, newest.tree)
    for path in _OF_A_VERSION:
        if path in older:
            change.large[path] = (older[path].sha256, older[path].size)
        elif path in tree:
            change.removed.append(path)
    write_commit(connection, folder, repository.id, branch, change, author)


def _remove_tag(connection: Connection, repository: HubRepository, tag: str) -> None:
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
