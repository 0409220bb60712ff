"""Requests without a token: the session of a person, and the signed address of an upload.

A session is a row that names the token with which it was begun. It ends with the token, with the
logout, and in time. A signed address carries the digest of the token that requested it. Its key is
kept in the database, so it is valid after a restart, and in every process.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import Connection, delete, insert, select

from adapterhub.hub.accounts import READ, Visitor, visitor_of
from adapterhub.hub.tables import sessions, tokens
from adapterhub.hub.times import now_text
from adapterhub.web.tokens import digest_of_token

COOKIE = "adapterhub"  # of a login
SESSION_SECONDS = 12 * 3600.0
UPLOAD_SECONDS = 24 * 3600.0


def sealed_text(secret: bytes, kind: str, parts: Sequence[str], seconds: float) -> str:
    """Return a text that says these parts, for some time; none of them has a dot."""
    said = ".".join((*parts, str(int(time.time() + seconds))))
    return f"{said}.{_mark(secret, kind, said)}"


def read_sealed(secret: bytes, kind: str, text: str) -> list[str] | None:
    """Return the parts of a signed text; None if it is not ours, or has expired."""
    said, _, mark = text.rpartition(".")
    if not hmac.compare_digest(mark.encode(), _mark(secret, kind, said).encode()):
        return None
    *parts, expires = said.split(".")
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
    """End a session; one that is not known has ended already."""
    connection.execute(delete(sessions).where(sessions.c.sha256 == digest_of_token(cookie)))


def session_visitor(connection: Connection, cookie: str) -> Visitor:
    """Return who a cookie stands for, who only reads; a stranger if it is not valid."""
    digest = connection.execute(
        select(tokens.c.sha256)
        .join(sessions, sessions.c.token == tokens.c.id)
        .where(sessions.c.sha256 == digest_of_token(cookie), sessions.c.expires > now_text())
    ).scalar()
    found = visitor_of(connection, digest=digest) if digest else None
    return replace(found, role=READ) if found else Visitor()


def _mark(secret: bytes, kind: str, said: str) -> str:
    digest = hmac.new(secret, f"{kind}\0{said}".encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
