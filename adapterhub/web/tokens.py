"""Access tokens of our servers, stored in a file as digests and never in plain text.

A token is `ah_` and 32 random bytes. The file contains its sha256, its permissions and the time of
its last use, but not the token itself. A server reloads the file when it changes, so that a revoked
token is rejected there, too.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated

from filelock import FileLock

from adapterhub.config.options import to_dict
from adapterhub.config.user_folders import user_folder
from adapterhub.errors import ConfigError, FileError, did_you_mean
from adapterhub.files import schema
from adapterhub.files.atomic import UnreadableError, explained, read_file, replace_file

ROLES = ("predict", "admin")
PREFIX = "ah_"
_TOKEN = re.compile(r"ah_[A-Za-z0-9_-]{43}")
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_MAX_BYTES = 16 << 20
_LOOK_EVERY = 1.0  # seconds between two checks of the file
_NOTE_EVERY = 60.0  # seconds between two updates of the last use
_Name = Annotated[str, schema.text(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", "a name")]
_Digest = Annotated[str, schema.text(r"[0-9a-f]{64}", "a sha256")]
_Role = Annotated[str, schema.text("|".join(ROLES), "a role")]
_Pattern = Annotated[str, schema.text(r"[\x21-\x7e]{1,300}", "a pattern")]
_TIME_TEXT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
_When = Annotated[str | None, schema.text(_TIME_TEXT, "a time in UTC", null=True)]


@dataclass(frozen=True)
class AccessToken:
    """Entry of a token file.

    Attributes:
        name: the name of the token's user; unique in its file.
        sha256: the digest of the token.
        roles: the permitted roles: predict, admin.
        adapters: the patterns of the permitted adapters.
        created: the time of creation, in UTC.
        expires: the time of expiry; None: never.
        used: the time of the last use, to about a minute.
    """

    name: _Name
    sha256: _Digest
    roles: tuple[_Role, ...]
    adapters: tuple[_Pattern, ...]
    created: _When
    expires: _When = None
    used: _When = None

    def is_valid(self, now: datetime) -> bool:
        """Return whether the token has not expired."""
        return self.expires is None or now < _parsed_time(self.expires)


@dataclass(frozen=True)
class _AccessFile:
    """Contents of a token file."""

    tokens: tuple[AccessToken, ...]
    version: Annotated[int, schema.integer(1, 1)] = 1


def default_token_file() -> Path:
    """Return the path of the user's token file."""
    return user_folder("config") / "server-tokens.json"


class TokenFile:
    """Token file.

    Args:
        path: the path of the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._by_digest: dict[str, AccessToken] = {}
        self._stamp: tuple[int, int] | None = None
        self._looked = float("-inf")
        self._used: dict[str, str] = {}  # last uses by name, not in the file yet
        self._noted = time.monotonic()

    def tokens(self) -> tuple[AccessToken, ...]:
        """List the tokens; the list is empty if the file does not exist.

        Raises:
            FileError: the file cannot be read; access without a token is never the fallback.
        """
        if not os.path.lexists(self.path):
            return ()
        try:
            data = read_file(self.path.resolve(), 1, _MAX_BYTES, None)
        except UnreadableError as error:
            raise FileError(f"the tokens in {self.path} cannot be read: {error}") from None
        file, problems = schema.parse_record(_AccessFile, data, _MAX_BYTES)
        if file is None:
            raise FileError(f"{self.path} is not a file of tokens", offenders=problems)
        return file.tokens

    def create(
        self,
        name: str,
        roles: Sequence[str] = ("predict",),
        adapters: Sequence[str] = ("*",),
        seconds: float | None = None,
    ) -> str:
        """Add a token and return it; it cannot be shown again.

        Args:
            name: the name of its user.
            roles: the permitted roles.
            adapters: patterns of the permitted adapters.
            seconds: the lifetime in seconds; None: until it is revoked.

        Raises:
            ConfigError: the name is taken or not valid, or a role is unknown.
            OutputError: the file cannot be written.
        """
        token = new_token()
        now = datetime.now(timezone.utc)
        expires = None if seconds is None else (now + timedelta(seconds=seconds)).strftime(_TIME)
        new = AccessToken(
            name,
            digest_of_token(token),
            tuple(roles),
            tuple(adapters),
            now.strftime(_TIME),
            expires,
        )
        _, problems = schema.parse_record(
            _AccessFile, schema.canonical_json(to_dict(_AccessFile((new,)))), _MAX_BYTES
        )
        if problems:
            raise ConfigError("this token cannot be made", offenders=problems)
        with self._changing() as known:
            if any(each.name == name for each in known):
                raise ConfigError(
                    f"there is a token with the name {name!r}",
                    hint=f"another name, or first adapterhub token revoke {name}",
                )
            self._write((*known, new))
        return token

    def revoke(self, name: str) -> AccessToken:
        """Remove a token and return its entry.

        Raises:
            ConfigError: no token has this name.
            OutputError: the file cannot be written.
        """
        with self._changing() as known:
            named = [each for each in known if each.name == name]
            if not named:
                near = did_you_mean(name, [each.name for each in known])
                raise ConfigError(f"no token has the name {name!r}{near}")
            self._write([each for each in known if each.name != name])
        return named[0]

    def check(self, token: str) -> AccessToken | None:
        """Return the entry of a client's token; None if it is not valid.

        The lookup uses the digest, which clients cannot choose, and compares in constant time.
        """
        if not is_token(token):
            return None
        self._look()
        digest = digest_of_token(token)
        record = self._by_digest.get(digest[:16])
        if record is None or not hmac.compare_digest(record.sha256, digest):
            return None
        now = datetime.now(timezone.utc)
        if not record.is_valid(now):
            return None
        self._used[record.name] = now.strftime(_TIME)
        return record

    def note_uses(self, *, at_once: bool = False) -> None:
        """Write the last uses to the file, at intervals: other processes may write it, too."""
        if not self._used or not (at_once or time.monotonic() - self._noted > _NOTE_EVERY):
            return
        self._noted, used, self._used = time.monotonic(), self._used, {}
        with self._changing() as known:
            self._write([replace(each, used=used.get(each.name, each.used)) for each in known])

    def _look(self) -> None:
        """Reload the file if it has changed; while it cannot be read, no token is valid."""
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY:
            return
        self._looked = now
        try:
            status = os.stat(self.path)
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp != self._stamp:
                self._by_digest = {each.sha256[:16]: each for each in self.tokens()}
                self._stamp = stamp
        except (OSError, FileError):
            self._by_digest, self._stamp = {}, None

    @contextmanager
    def _changing(self) -> Iterator[tuple[AccessToken, ...]]:
        """Hold the lock that serializes changes to the file, and yield its tokens."""
        with explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self.path.with_name(f".{self.path.name}.lock")):
                yield self.tokens()

    def _write(self, tokens: Sequence[AccessToken]) -> None:
        data = schema.canonical_json(to_dict(_AccessFile(tuple(tokens))))
        replace_file(self.path.resolve(), data, private=True)


def new_token() -> str:
    """Return a new random token."""
    return PREFIX + secrets.token_urlsafe(32)


def is_token(text: str) -> bool:
    """Return whether a text has the form of our tokens, unlike tokens of other services."""
    return _TOKEN.fullmatch(text) is not None


def digest_of_token(token: str) -> str:
    """Return the sha256 of a token; a random token needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


def _parsed_time(text: str) -> datetime:
    return datetime.strptime(text, _TIME).replace(tzinfo=timezone.utc)
