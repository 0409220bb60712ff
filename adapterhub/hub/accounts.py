"""Accounts and permissions: users, organisations, their members, and tokens.

A user or an organisation is a namespace: the `owner` of `owner/name`. A role is read, write or
admin; each role includes the ones before it. A user is admin of the user's own namespace. An
organisation sets the roles of its members. Elsewhere a user may read what is public. A token allows
at most its own role. A token with a scope allows nothing outside that namespace.

A request without a token may carry a session cookie or a signed upload address. A session is a row
that names the token used to log in. It ends when the token is revoked, at logout, or when it
expires. A signed address carries the digest of the token that requested it. Its key is stored in
the database, so the address is valid after a restart and in every process.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, CursorResult, Row, delete, func, insert, select, update

from adapterhub.errors import ConfigError, did_you_mean
from adapterhub.hub.database import members, namespaces, now_text, repositories, sessions, tokens
from adapterhub.registry.store import NAME_RULE, is_name
from adapterhub.web.errors import DeniedError
from adapterhub.web.tokens import digest_of_token, is_token, new_token

READ, WRITE, ADMIN = "read", "write", "admin"
HUB_ROLES = (READ, WRITE, ADMIN)
MIRROR = "mirror"  # the kind of a mirrored namespace; other kinds are user and org
_RESERVED = frozenset([
    "api", "models", "datasets", "spaces", "kernels", "buckets", "resolve", "raw", "blob",
    "tree", "commit", "lfs", "cas", "v1", "v2", "docs", "settings", "login", "logout",
    "static", "health", "ready", "metrics", "search", "new", "join", "organizations",
])  # fmt: skip


@dataclass(frozen=True)
class Owner:
    """A namespace: a user or an organisation."""

    id: int
    name: str
    kind: str
    quota: int | None = None
    rules: str = "{}"
    is_admin: bool = False
    is_disabled: bool = False


@dataclass(frozen=True)
class Visitor:
    """The sender of a request.

    Attributes:
        user: the user's name; "" without a token.
        token: the name of the token.
        role: the highest role that the token allows.
        is_admin: whether the user may change everything.
        roles: the user's role in namespaces, by id.
        scope: the id of the only namespace that the token covers.
        orgs: the names of the user's organisations.
        digest: the sha256 of the token.
    """

    user: str = ""
    token: str = ""
    role: str = ""
    is_admin: bool = False
    roles: Mapping[int, str] = field(default_factory=dict)
    scope: int | None = None
    orgs: Sequence[str] = ()
    digest: str = ""

    def role_in(self, namespace: int) -> str:
        """Return the role in a namespace; "" for a visitor who is not a member."""
        if self.scope not in (None, namespace):
            return ""
        role = ADMIN if self.is_admin else self.roles.get(namespace, "")
        return min(role, self.role, key=_rank)

    def may(self, needed: str, namespace: int) -> bool:
        """Return whether the visitor's role in a namespace is sufficient."""
        return _rank(self.role_in(namespace)) >= _rank(needed)

    @property
    def namespaces(self) -> tuple[int, ...] | None:
        """The namespaces whose private repositories are visible; None for all."""
        if self.scope is not None:
            return (self.scope,) if self.role_in(self.scope) else ()
        return None if self.is_admin else tuple(self.roles)

    @property
    def is_operator(self) -> bool:
        """Whether the visitor may see and change everything on this hub."""
        return self.is_admin and self.role == ADMIN


def _rank(role: str) -> int:
    return HUB_ROLES.index(role) + 1 if role in HUB_ROLES else 0


def visitor_of(
    connection: Connection, token: str = "", *, digest: str = "", operator: str = ""
) -> Visitor | None:
    """Return the visitor who has a token, or a token with the given digest.

    Return None if the token is not valid: unknown, expired, or of a disabled user.

    Args:
        connection: a transaction.
        token: the token.
        digest: its digest, instead of the token.
        operator: the digest of the operator's token, which is not in the database.
    """
    if token and not is_token(token):
        return None
    digest = digest or digest_of_token(token)
    if operator and hmac.compare_digest(operator, digest):
        return Visitor("operator", "command line", ADMIN, True, digest=digest)
    own = namespaces.alias()
    row = connection.execute(
        select(tokens, own.c.name.label("owner"), own.c.is_admin, own.c.is_disabled)
        .join(own, own.c.id == tokens.c.user)
        .where(tokens.c.sha256 == digest)
    ).first()
    if row is None or row.is_disabled:
        return None
    if row.expires is not None and row.expires <= now_text():
        return None
    roles, orgs = _memberships(connection, row.user)
    return Visitor(
        row.owner,
        row.name,
        row.role,
        bool(row.is_admin) and row.scope is None,
        roles,
        row.scope,
        [name for org, name in orgs.items() if row.scope in (None, org)],
        row.sha256,
    )


def visitor_of_proxy(connection: Connection, user: str) -> Visitor:
    """Return a user named by a trusted proxy, with read access only.

    Raises:
        DeniedError: the user does not exist or is disabled.
    """
    owner = find_owner(connection, user)
    if owner is None or owner.kind != "user" or owner.is_disabled:
        raise DeniedError("the proxy names an account that is not a user of this hub")
    roles, orgs = _memberships(connection, owner.id)
    return Visitor(owner.name, "", READ, False, roles, None, [*orgs.values()])


def _memberships(connection: Connection, user: int) -> tuple[dict[int, str], dict[int, str]]:
    """Return a user's roles by namespace, and the names of the user's organisations."""
    rows = connection.execute(
        select(members.c.org, members.c.role, namespaces.c.name)
        .join(namespaces, namespaces.c.id == members.c.org)
        .where(members.c.user == user)
        .order_by(namespaces.c.name)
    ).all()
    roles = {user: ADMIN, **{row.org: row.role for row in rows}}
    return roles, {row.org: row.name for row in rows}


def note_use(connection: Connection, names: Sequence[str]) -> None:
    """Record that tokens were used now."""
    connection.execute(update(tokens).where(tokens.c.name.in_(names)).values(used=now_text()))


def find_owner(connection: Connection, name: str) -> Owner | None:
    """Return the namespace with a name, ignoring case."""
    if not name.isascii():  # the Kelvin sign folds to a k
        return None
    row = connection.execute(
        select(namespaces).where(namespaces.c.folded == name.casefold())
    ).first()
    return _owner_of(row) if row else None


def namespace_of(connection: Connection, namespace: int) -> Owner:
    """Return the namespace with an id."""
    return _owner_of(
        connection.execute(select(namespaces).where(namespaces.c.id == namespace)).one()
    )


def _owner_of(row: Row[Any]) -> Owner:
    return Owner(row.id, row.name, row.kind, row.quota, row.rules, row.is_admin, row.is_disabled)


def create_namespace(
    connection: Connection, name: str, kind: str, *, is_admin: bool = False
) -> Owner:
    """Create a user or an organisation.

    Raises:
        ConfigError: the name is taken, reserved or not valid.
    """
    if not is_name(name) or re.search(r"--|\.git$", name) or name.casefold() in _RESERVED:
        raise ConfigError(
            f"{name!r} cannot be the name of a user or organisation", expected=NAME_RULE
        )
    if existing := find_owner(connection, name):
        kinds = {"user": "user", "org": "organisation"}
        raise ConfigError(
            f"there is a{'n' * (existing.kind == 'org')} {kinds[existing.kind]} {existing.name}"
        )
    _forget_mirrored(connection, name)
    result = connection.execute(
        insert(namespaces).values(
            name=name, folded=name.casefold(), kind=kind, is_admin=is_admin, created=now_text()
        )
    )
    return Owner(inserted_id(result), name, kind)


def mirror_namespace(connection: Connection, upstream: str) -> Owner:
    """Return the namespace of a mirrored owner. It has no members and is not a user's name.

    Raises:
        ConfigError: this hub mirrors another hub.
    """
    row = connection.execute(select(namespaces).where(namespaces.c.kind == MIRROR)).first()
    if row is not None:
        if row.name != upstream:
            raise ConfigError(
                f"this hub mirrors {row.name}, and not {upstream}",
                expected=f"--upstream {row.name}",
                hint="another folder for another upstream",
            )
        return _owner_of(row)
    result = connection.execute(
        insert(namespaces).values(
            name=upstream, folded=upstream, kind=MIRROR, is_admin=False, created=now_text()
        )
    )
    return Owner(inserted_id(result), upstream, MIRROR)


def _forget_mirrored(connection: Connection, owner: str) -> None:
    """Delete the mirrored data of an owner whose name now belongs to this hub."""
    own = select(namespaces.c.id).where(namespaces.c.kind == MIRROR)
    connection.execute(
        delete(repositories).where(
            repositories.c.namespace.in_(own),
            repositories.c.folded.startswith(f"{owner.casefold()}/", autoescape=True),
        )
    )


def inserted_id(result: CursorResult[Any]) -> int:
    """Return the id of an inserted row."""
    assert result.inserted_primary_key is not None
    return int(result.inserted_primary_key[0])


def require_owner(connection: Connection, name: str, kind: str = "") -> Owner:
    """Return the namespace with a name.

    Raises:
        ConfigError: it does not exist or is of another kind.
    """
    owner = find_owner(connection, name)
    if owner is None or kind not in ("", owner.kind):
        rows = connection.execute(select(namespaces.c.name, namespaces.c.kind)).all()
        near = did_you_mean(name, [row.name for row in rows if kind in ("", row.kind)])
        noun = {"user": "user", "org": "organisation"}.get(kind, "user or organisation")
        raise ConfigError(f"there is no {noun} {name!r}{near}", hint="adapterhub hub user DIR")
    return owner


def set_user(
    connection: Connection,
    name: str,
    *,
    is_admin: bool | None = None,
    is_disabled: bool | None = None,
) -> Owner:
    """Promote, demote, disable or enable a user.

    A disabled user keeps repositories, memberships and tokens, but none of them grants access.

    Raises:
        ConfigError: the user does not exist.
    """
    owner = require_owner(connection, name, "user")
    changed = replace(
        owner,
        is_admin=owner.is_admin if is_admin is None else is_admin,
        is_disabled=owner.is_disabled if is_disabled is None else is_disabled,
    )
    connection.execute(
        update(namespaces)
        .where(namespaces.c.id == owner.id)
        .values(is_admin=changed.is_admin, is_disabled=changed.is_disabled)
    )
    return changed


def remove_user(connection: Connection, name: str) -> Owner:
    """Remove a user with its tokens and memberships.

    Raises:
        ConfigError: the user does not exist or has repositories.
    """
    owner = require_owner(connection, name, "user")
    own = select(repositories.c.name).where(repositories.c.namespace == owner.id)
    if owned := connection.execute(own.order_by(repositories.c.name)).scalars().all():
        raise ConfigError(
            f"{owner.name} has {len(owned)} {'repository' if len(owned) == 1 else 'repositories'}",
            offenders=owned[:20],
            hint="delete or move them first, or --disable, which keeps them",
        )
    connection.execute(delete(namespaces).where(namespaces.c.id == owner.id))
    return owner


def set_member(connection: Connection, org: str, user: str, role: str | None) -> None:
    """Give a user a role in an organisation; None removes the role.

    Raises:
        ConfigError: the organisation or the user does not exist.
    """
    place = require_owner(connection, org, "org").id
    member = require_owner(connection, user, "user").id
    connection.execute(delete(members).where(members.c.org == place, members.c.user == member))
    if role is not None:
        connection.execute(insert(members).values(org=place, user=member, role=role))


def create_hub_token(
    connection: Connection,
    user: str,
    name: str,
    role: str,
    *,
    scope: str | None = None,
    seconds: float | None = None,
) -> str:
    """Create a token of a user and return it; it cannot be shown again.

    Raises:
        ConfigError: the user, the scope or the role does not exist, or the name is taken.
    """
    if role not in HUB_ROLES:
        raise ConfigError(f"no such role: {role!r}", expected=", ".join(HUB_ROLES))
    owner = require_owner(connection, user, "user").id
    place = require_owner(connection, scope).id if scope else None
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", name):
        raise ConfigError(f"{name!r} cannot be the name of a token", expected="letters and digits")
    if connection.execute(select(tokens.c.id).where(tokens.c.name == name)).first():
        raise ConfigError(
            f"there is a token with the name {name!r}",
            hint=f"another --name, or first adapterhub hub token revoke DIR {name}",
        )
    token = new_token()
    connection.execute(
        insert(tokens).values(
            sha256=digest_of_token(token),
            name=name,
            user=owner,
            role=role,
            scope=place,
            created=now_text(),
            expires=None if seconds is None else now_text(-seconds),
        )
    )
    return token


def revoke_hub_token(connection: Connection, name: str) -> None:
    """Remove a token.

    Raises:
        ConfigError: no token has this name.
    """
    if not connection.execute(delete(tokens).where(tokens.c.name == name)).rowcount:
        names = connection.execute(select(tokens.c.name)).scalars().all()
        raise ConfigError(f"no token has the name {name!r}{did_you_mean(name, names)}")


def count_tokens(connection: Connection) -> int:
    """Return the number of valid tokens."""
    valid = tokens.c.expires.is_(None) | (tokens.c.expires > now_text())
    return int(connection.execute(select(func.count()).where(valid)).scalar_one())


def owners_of_kind(connection: Connection, kind: str) -> list[Owner]:
    """List the users or the organisations."""
    rows = connection.execute(
        select(namespaces).where(namespaces.c.kind == kind).order_by(namespaces.c.name)
    )
    return [_owner_of(row) for row in rows]


def members_of(connection: Connection, org: int) -> dict[str, str]:
    """Return the roles of the members of an organisation, by name."""
    rows = connection.execute(
        select(namespaces.c.name, members.c.role)
        .join(members, members.c.user == namespaces.c.id)
        .where(members.c.org == org)
        .order_by(namespaces.c.name)
    )
    return {row.name: row.role for row in rows}


def change_owner(connection: Connection, owner: int, rules: str, quota: int | None) -> None:
    """Update the rules and the quota of a namespace."""
    connection.execute(
        update(namespaces).where(namespaces.c.id == owner).values(rules=rules, quota=quota)
    )


def free_token_name(connection: Connection, user: str) -> str:
    """Return a name for the next token of a user."""
    taken = set(connection.execute(select(tokens.c.name)).scalars())
    return next(name for n in range(1, 1_000_000) if (name := f"{user}-{n}") not in taken)


def token_rows(connection: Connection) -> list[dict[str, str | None]]:
    """Return a table row for each token, keyed by column title."""
    owner, place = namespaces.alias(), namespaces.alias()
    rows = connection.execute(
        select(
            tokens.c.name,
            owner.c.name.label("user"),
            tokens.c.role,
            place.c.name.label("scope"),
            tokens.c.created,
            tokens.c.expires,
            tokens.c.used,
        )
        .join(owner, owner.c.id == tokens.c.user)
        .join(place, place.c.id == tokens.c.scope, isouter=True)
        .order_by(tokens.c.name)
    )
    return [dict(row) for row in rows.mappings()]


COOKIE = "adapterhub"  # name of the login cookie
SESSION_SECONDS = 12 * 3600.0
UPLOAD_SECONDS = 24 * 3600.0


def sealed_text(secret: bytes, kind: str, parts: Sequence[str], seconds: float) -> str:
    """Return a signed text of these parts that expires; no part may contain a dot."""
    payload = ".".join((*parts, str(int(time.time() + seconds))))
    return f"{payload}.{_mark(secret, kind, payload)}"


def read_sealed(secret: bytes, kind: str, text: str) -> list[str] | None:
    """Return the parts of a signed text; None if the signature is invalid or expired."""
    payload, _, mark = text.rpartition(".")
    if not hmac.compare_digest(mark.encode(), _mark(secret, kind, payload).encode()):
        return None
    *parts, expires = payload.split(".")
    return parts if expires.isdecimal() and int(expires) > time.time() else None


def begin_session(connection: Connection, token: str) -> str:
    """Begin a session with a valid token, and return its cookie."""
    cookie = secrets.token_urlsafe(32)
    own = select(tokens.c.id).where(tokens.c.sha256 == digest_of_token(token))
    connection.execute(delete(sessions).where(sessions.c.expires <= now_text()))
    connection.execute(
        insert(sessions).values(
            sha256=digest_of_token(cookie),
            token=connection.execute(own).scalar_one(),
            expires=now_text(-SESSION_SECONDS),
        )
    )
    return cookie


def end_session(connection: Connection, cookie: str) -> None:
    """End a session; an unknown session counts as ended."""
    connection.execute(delete(sessions).where(sessions.c.sha256 == digest_of_token(cookie)))


def session_visitor(connection: Connection, cookie: str) -> Visitor:
    """Return the visitor of a session cookie, read-only; a stranger if the cookie is not valid."""
    digest = connection.execute(
        select(tokens.c.sha256)
        .join(sessions, sessions.c.token == tokens.c.id)
        .where(sessions.c.sha256 == digest_of_token(cookie), sessions.c.expires > now_text())
    ).scalar()
    visitor = visitor_of(connection, digest=digest) if digest else None
    return replace(visitor, role=READ) if visitor else Visitor()


def _mark(secret: bytes, kind: str, payload: str) -> str:
    digest = hmac.new(secret, f"{kind}\0{payload}".encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
