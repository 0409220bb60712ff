"""Repositories: their names, and who may see, create, move and delete them.

What is not there and what may not be seen have the same answer, so nothing tells that a private
repository exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from adapterhub.errors import one_line
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
from adapterhub.hub.changes import changes_of
from adapterhub.hub.refusals import (
    DeniedError,
    HubRefusal,
    MissingRepositoryError,
    TakenError,
)
from adapterhub.hub.tables import listings, namespaces, renamed, repositories, retired
from adapterhub.hub.times import now_precisely
from adapterhub.registry.reference import NAME_RULE, is_name

_VERBS = {WRITE: "write to", ADMIN: "change"}


@dataclass(frozen=True)
class HubRepository:
    """A repository as it is kept."""

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
    """Return the repository of a name, in whatever case it is written."""
    if not name.isascii():  # the sign of Kelvin folds to a k
        return None
    return _found(connection, repositories.c.type == type, repositories.c.folded == name.casefold())


def repository_of_id(connection: Connection, repository: int) -> HubRepository | None:
    """Return the repository of an id; None if it was deleted."""
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
    """Return a repository that a visitor may see, and use as much as is needed.

    With `was_named`, the name may be one that the repository had before it was moved.

    Raises:
        MissingRepositoryError: there is none, or it may not be seen.
        DeniedError: it may be seen, but no more.
    """
    found = find_repository(connection, type, name)
    if found is None and was_named:
        found = repository_named_before(connection, type, name)
    if found is None or not _may_read(found, visitor, open_reading):
        raise missing(name, visitor)
    if needed != READ and found.is_mirrored:
        raise DeniedError(f"{found.name} is mirrored from another hub, and only read here")
    if needed != READ and not visitor.may(needed, found.namespace):
        if not visitor.user:
            raise missing(name, visitor)
        raise DeniedError(
            f"your token may not {_VERBS[needed]} {found.name}: it takes the role {needed} there"
        )
    return found


def missing(name: str, visitor: Visitor) -> MissingRepositoryError:
    """Return the error for a repository that is not there, or not for this visitor."""
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
    """Return the namespace of `owner/name`, in which the visitor may write.

    Raises:
        DeniedError: the namespace does not exist, or the visitor may not.
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
    """Refuse a name that a client or a disk could not have.

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
        TakenError: there is one with this name.
        HubRefusal: the name is not valid.
    """
    check_repository_name(name)
    full = f"{owner.name}/{name.partition('/')[2]}"
    if known := find_repository(connection, type, full):
        raise TakenError(f"{known.name} exists already")
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
    made = connection.execute(insert(repositories).values(folded=full.casefold(), **values))
    fields = {**values, "is_mirrored": owner.kind == MIRROR}
    return HubRepository(id=inserted_id(made), **fields)  # type: ignore[arg-type]


def delete_repository(
    connection: Connection, repository: HubRepository, *, is_final: bool = True
) -> None:
    """Delete a repository; if that is final, the numbers of its versions are not given again."""
    if is_final:
        _retire(connection, repository)
    connection.execute(delete(repositories).where(repositories.c.id == repository.id))


def move_repository(
    connection: Connection, repository: HubRepository, name: str, owner: Owner
) -> HubRepository:
    """Give a repository another name.

    Raises:
        TakenError: another one has it.
        HubRefusal: the name is not valid.
    """
    check_repository_name(name)
    full = f"{owner.name}/{name.partition('/')[2]}"
    known = find_repository(connection, repository.type, full)
    if known is not None and known.id != repository.id:
        raise TakenError(f"{known.name} exists already")
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
    """Let a name lead to no moved repository any more: it is that of another one."""
    connection.execute(
        delete(renamed).where(renamed.c.type == type, renamed.c.folded == name.casefold())
    )


def set_private(connection: Connection, repository: HubRepository, is_private: bool) -> None:
    """Show a repository to its members alone, or to all."""
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
