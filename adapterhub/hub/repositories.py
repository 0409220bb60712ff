"""Repositories and their versions: naming, visibility, creation, moves and deletion.

Missing and invisible repositories get the same response, so a response never reveals a private
repository.

`v3` is a tag whose number stays reserved even when the version, or its repository, is deleted.
Deleting a version removes each commit that has its files; files without a commit are collected
later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Set
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from adapterhub.backbones.hub_network import is_commit
from adapterhub.errors import one_line, printable
from adapterhub.files.native import (
    BESIDE_FILE,
    BESIDE_SIGNATURE,
    MANIFEST_FILE,
    SIGNATURE_FILE,
    TENSORS_FILE,
)
from adapterhub.hub.accounts import (
    ADMIN,
    MIRROR,
    READ,
    WRITE,
    Owner,
    Visitor,
    find_owner,
    inserted_id,
)
from adapterhub.hub.commits import (
    BRANCH,
    MAIN,
    TAG,
    CommitChange,
    Tree,
    branch_head,
    commit_at,
    is_weights,
    move_ref,
    read_tree,
    refs_of,
    write_commit,
)
from adapterhub.hub.database import (
    NewVersion,
    changes_of,
    commits,
    grants,
    listings,
    namespaces,
    now_precisely,
    refs,
    renamed,
    repositories,
    retired,
    versions,
)
from adapterhub.registry.foreign import CONFIG_FILE
from adapterhub.registry.store import (
    NAME_RULE,
    is_name,
    is_version,
    is_version_folder,
    version_number,
)
from adapterhub.registry.version_files import (
    MAX_YANKED_BYTES,
    YANKED_FILE,
)
from adapterhub.web.errors import (
    DeniedError,
    HubRefusal,
    MissingRepositoryError,
    MissingRevisionError,
    TakenError,
)

ReadBlob = Callable[[str, int], bytes]
"""Returns the first bytes of a file, by its sha256."""
_VERBS = {WRITE: "write to", ADMIN: "change"}


@dataclass(frozen=True)
class HubRepository:
    """A stored repository."""

    id: int
    type: str
    namespace: int
    name: str
    is_private: bool
    created: str
    modified: str
    highest: int
    is_mirrored: bool = False

    @property
    def path(self) -> str:
        """The path of its page."""
        return self.name if self.type == "models" else f"{self.type}/{self.name}"


def find_repository(connection: Connection, type: str, name: str) -> HubRepository | None:
    """Return the repository with a name, ignoring case."""
    if not name.isascii():  # the Kelvin sign folds to a k
        return None
    return _found(connection, repositories.c.type == type, repositories.c.folded == name.casefold())


def repository_of_id(connection: Connection, repository: int) -> HubRepository | None:
    """Return the repository with an id; None if it was deleted."""
    return _found(connection, repositories.c.id == repository)


def _found(connection: Connection, *conditions: ColumnElement[bool]) -> HubRepository | None:
    own = [column for column in repositories.c if column.name in HubRepository.__dataclass_fields__]
    row = connection.execute(
        select(*own, (namespaces.c.kind == MIRROR).label("is_mirrored"))
        .join(namespaces, namespaces.c.id == repositories.c.namespace)
        .where(*conditions)
    ).first()
    return HubRepository(**row._asdict()) if row else None


def visible_repository(
    connection: Connection,
    type: str,
    name: str,
    visitor: Visitor,
    needed: str = READ,
    *,
    open_reading: bool = False,
    was_named: bool = False,
) -> HubRepository:
    """Return a repository that the visitor may see and use at the required level.

    With `was_named`, the name may be an earlier name of a moved repository.

    Raises:
        MissingRepositoryError: it does not exist or is not visible.
        DeniedError: it is visible, but the visitor lacks the required permission.
    """
    repository = find_repository(connection, type, name)
    if repository is None and was_named:
        repository = repository_named_before(connection, type, name)
    if repository is None or not _may_read(repository, visitor, open_reading):
        raise missing(name, visitor)
    if needed != READ and repository.is_mirrored:
        raise DeniedError(f"{repository.name} is mirrored from another hub, and only read here")
    if needed != READ and not visitor.may(needed, repository.namespace):
        if not visitor.user:
            raise missing(name, visitor)
        raise DeniedError(
            f"your token may not {_VERBS[needed]} {repository.name}: "
            f"it takes the role {needed} there"
        )
    return repository


def missing(name: str, visitor: Visitor) -> MissingRepositoryError:
    """Return the error for a repository that does not exist or is not visible."""
    shown = one_line(name, 200)
    advice = (
        "If it is a backbone of another hub: HF_ENDPOINT sends all requests here, and this hub "
        "fetches it if it is started with --upstream https://huggingface.co; without HF_ENDPOINT, "
        "transformers finds the backbone, and adapterhub pull https://HOST/OWNER/NAME the adapter"
    )
    if not visitor.user:
        return MissingRepositoryError(
            f"{shown} is not on this hub, or it needs a token of this hub",
            status=401,
            advice=advice,
        )
    problem = f"{shown} is not on this hub, or you may not see it"
    return MissingRepositoryError(problem, advice=advice)


def _may_read(repository: HubRepository, visitor: Visitor, open_reading: bool) -> bool:
    if visitor.may(READ, repository.namespace):
        return True
    if repository.is_private or visitor.scope not in (None, repository.namespace):
        return False
    return bool(visitor.user) or open_reading


def owner_for_writing(connection: Connection, name: str, visitor: Visitor) -> Owner:
    """Return the namespace of `owner/name`, if the visitor may write to it.

    Raises:
        DeniedError: the namespace does not exist, or the visitor may not write to it.
    """
    owner = find_owner(connection, name.partition("/")[0])
    if owner is None or not visitor.may(WRITE, owner.id):
        shown = one_line(name.partition("/")[0], 100)
        raise DeniedError(
            f"your token may not create or move repositories in {shown}: it takes the role "
            f"{WRITE} there"
        )
    return owner


def check_repository_name(name: str) -> None:
    """Refuse a name that clients or file systems do not support.

    Raises:
        HubRefusal: it is not `owner/name`, or a part is not valid.
    """
    owner, _, own = name.partition("/")
    if not (is_name(owner) and is_name(own)) or re.search(r"--|\.git(/|$)", name):
        raise HubRefusal(
            f"{one_line(name, 100)!r} cannot be the name of a repository; expected OWNER/NAME, "
            f"each {NAME_RULE}; without --, and not ending with .git"
        )


def create_repository(
    connection: Connection, type: str, name: str, owner: Owner, *, is_private: bool
) -> HubRepository:
    """Create a repository without commits.

    Raises:
        TakenError: the name is taken.
        HubRefusal: the name is not valid.
    """
    check_repository_name(name)
    full = f"{owner.name}/{name.partition('/')[2]}"
    if existing := find_repository(connection, type, full):
        raise TakenError(f"{existing.name} exists already")
    now = now_precisely()
    values = {
        "type": type,
        "namespace": owner.id,
        "name": full,
        "is_private": is_private,
        "created": now,
        "modified": now,
        "highest": _highest_before(connection, type, full),
    }
    _forget_earlier_name(connection, type, full)
    result = connection.execute(insert(repositories).values(folded=full.casefold(), **values))
    fields = {**values, "is_mirrored": owner.kind == MIRROR}
    return HubRepository(id=inserted_id(result), **fields)  # type: ignore[arg-type]


def delete_repository(
    connection: Connection, repository: HubRepository, *, is_final: bool = True
) -> None:
    """Delete a repository; a final deletion reserves its version numbers."""
    if is_final:
        _retire(connection, repository)
    connection.execute(delete(repositories).where(repositories.c.id == repository.id))


def move_repository(
    connection: Connection, repository: HubRepository, name: str, owner: Owner
) -> HubRepository:
    """Rename a repository.

    Raises:
        TakenError: the new name is taken.
        HubRefusal: the name is not valid.
    """
    check_repository_name(name)
    full = f"{owner.name}/{name.partition('/')[2]}"
    existing = find_repository(connection, repository.type, full)
    if existing is not None and existing.id != repository.id:
        raise TakenError(f"{existing.name} exists already")
    _retire(connection, repository)
    _forget_earlier_name(connection, repository.type, full)
    if full.casefold() != repository.name.casefold():
        connection.execute(
            insert(renamed).values(
                type=repository.type,
                folded=repository.name.casefold(),
                repository=repository.id,
            )
        )
    changes_of(connection).moved[repository.id] = repository.namespace
    highest = max(repository.highest, _highest_before(connection, repository.type, full))
    connection.execute(
        update(repositories)
        .where(repositories.c.id == repository.id)
        .values(name=full, folded=full.casefold(), namespace=owner.id, highest=highest)
    )
    moved = find_repository(connection, repository.type, full)
    assert moved is not None
    return moved


def repository_named_before(connection: Connection, type: str, name: str) -> HubRepository | None:
    """Return the repository that had a name before it was moved."""
    earlier = select(renamed.c.repository).where(
        renamed.c.type == type, renamed.c.folded == name.casefold()
    )
    return _found(connection, repositories.c.id == earlier.scalar_subquery())


def _forget_earlier_name(connection: Connection, type: str, name: str) -> None:
    """Drop the redirect from an earlier name, which another repository uses now."""
    connection.execute(
        delete(renamed).where(renamed.c.type == type, renamed.c.folded == name.casefold())
    )


def set_private(connection: Connection, repository: HubRepository, is_private: bool) -> None:
    """Make a repository private or public."""
    for table, column in ((repositories, "id"), (listings, "repository")):
        connection.execute(
            update(table).where(table.c[column] == repository.id).values(is_private=is_private)
        )


def _highest_before(connection: Connection, type: str, name: str) -> int:
    chosen = select(retired.c.highest).where(
        retired.c.type == type, retired.c.folded == name.casefold()
    )
    return int(connection.execute(chosen).scalar() or 0)


def _retire(connection: Connection, repository: HubRepository) -> None:
    key = (retired.c.type == repository.type, retired.c.folded == repository.name.casefold())
    before = _highest_before(connection, repository.type, repository.name)
    connection.execute(delete(retired).where(*key))
    connection.execute(
        insert(retired).values(
            type=repository.type,
            folded=repository.name.casefold(),
            highest=max(before, repository.highest),
        )
    )


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
    """A numbered version: its commit, manifest sha256, tags, and reason for a yank."""

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
    """List the versions of a repository, oldest first."""
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
    """Return the reasons of yanked versions."""
    blob = tree.get(YANKED_FILE)
    if blob is None or blob.size > MAX_YANKED_BYTES:
        return {}
    try:
        reasons = json.loads(read(blob.sha256, MAX_YANKED_BYTES))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(reasons, dict):
        return {}
    return {k: printable(v) for k, v in reasons.items() if isinstance(v, str)}


def create_tag(connection: Connection, repository: HubRepository, tag: str, commit: str) -> None:
    """Create a tag of a commit; a numbered tag is a version, whose number the gate checks.

    Raises:
        TakenError: the tag exists.
        HubRefusal: the name is not valid.
    """
    check_ref_name(tag)
    refs = refs_of(connection, repository.id)
    if tag in refs[TAG] or tag in refs[BRANCH]:
        raise TakenError(f"{tag} exists already, and is not moved")
    if is_version_folder(tag):
        _add_version(connection, repository, version_number(tag) or 0, commit)
    move_ref(connection, repository.id, TAG, tag, commit)


def delete_tag(connection: Connection, repository: HubRepository, tag: str) -> None:
    """Delete a tag; the files of a version stay in the commits.

    Raises:
        MissingRevisionError: the tag does not exist.
    """
    if tag not in refs_of(connection, repository.id)[TAG]:
        raise MissingRevisionError(tag)
    _remove_tag(connection, repository, tag)


def move_tag(connection: Connection, repository: HubRepository, tag: str, commit: str) -> None:
    """Point a tag at a commit; create it if necessary.

    Raises:
        TakenError: the tag is a version, which never moves.
    """
    current = refs_of(connection, repository.id)[TAG].get(tag)
    if current == commit:
        return
    if current is not None:
        if is_version_folder(tag):
            raise TakenError(f"{tag} is a version, which never moves")
        _remove_tag(connection, repository, tag)
    create_tag(connection, repository, tag, commit)


def delete_branch(connection: Connection, repository: HubRepository, branch: str) -> None:
    """Delete a branch; its commits stay.

    Raises:
        DeniedError: the branch is `main`.
        MissingRevisionError: the branch does not exist.
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
    """Delete a version for good: no remaining commit keeps files that only it has.

    Branches that had it get the files of the newest other version, unless `may_return` says that
    these files are no longer accepted.

    Raises:
        MissingRevisionError: the version does not exist.
    """
    versions = {v.number: v for v in versions_of(connection, repository.id, read)}
    if number not in versions:
        raise MissingRevisionError(f"v{number}")
    gone = versions.pop(number)
    trees = [_tree_of(connection, repository, each) for each in versions.values()]
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
    """Refuse an invalid name of a branch or tag.

    Raises:
        HubRefusal: the name is not valid.
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
    """Commit the files of another version if a head has files that are to be deleted."""
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
