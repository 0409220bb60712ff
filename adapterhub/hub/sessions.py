"""What stands for a person or an upload without a token: signed texts that expire.

Their key is kept in the database, so they hold after a restart, and in every process.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import Connection, select

from adapterhub.hub.accounts import READ, Visitor, visitor_of
from adapterhub.hub.tables import tokens

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


def new_session(secret: bytes, token_id: int) -> str:
    """Return the cookie of a login with a token."""
    return sealed_text(secret, "session", [str(token_id)], SESSION_SECONDS)


def session_visitor(connection: Connection, secret: bytes, cookie: str) -> Visitor:
    """Return who a cookie stands for, who only reads; a stranger if it is not valid."""
    parts = read_sealed(secret, "session", cookie)
    if parts is None:
        return Visitor()
    row = connection.execute(select(tokens.c.sha256).where(tokens.c.id == int(parts[0]))).first()
    found = visitor_of(connection, digest=row.sha256) if row else None
    return replace(found, role=READ) if found else Visitor()


def _mark(secret: bytes, kind: str, said: str) -> str:
    digest = hmac.new(secret, f"{kind}\0{said}".encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
