"""The database of a hub of several processes: PostgreSQL, where it differs from SQLite.

A row of `settings` counts the transactions that write. Each writer updates this row first, so that
writers in all processes wait for each other. Readers compare it to see whether cached values are
still valid.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, Connection, create_engine, event, text
from sqlalchemy.exc import DBAPIError, OperationalError

from adapterhub.errors import ConfigError
from adapterhub.hub.database import LOCK_SECONDS, Database
from adapterhub.web.errors import BusyError, FullDiskError

_COUNT = "UPDATE settings SET value = CAST(CAST(value AS bigint) + 1 AS text) WHERE key = 'writes'"
_STATE = "SELECT CAST(value AS bigint) FROM settings WHERE key = 'writes'"
_LOCK = "SELECT {lock}(:key)"
_CONNECTIONS = 20  # per process; a server usually allows a hundred in total
_CONNECT_SECONDS = 5
_FULL, _LATE = "53100", ("55P03", "40P01", "40001", "53300", "57P01", "57P02", "57P03")


class PostgresDatabase(Database):
    """A database of PostgreSQL.

    Args:
        place: its address: postgresql://user@host/database.
        lock_seconds: how long a writer waits for the others.

    Raises:
        ConfigError: the server cannot be reached, or the library is not installed.
    """

    waits = True

    def __init__(self, place: URL, lock_seconds: float = LOCK_SECONDS) -> None:
        self.place = place
        try:
            engine = create_engine(
                place.set(drivername="postgresql+psycopg"),
                pool_size=_CONNECTIONS,
                max_overflow=0,
                pool_timeout=lock_seconds,
                pool_pre_ping=True,
                connect_args={"connect_timeout": _CONNECT_SECONDS},
            )
        except ImportError:
            raise ConfigError(
                f"{place} needs the library psycopg, which is not installed",
                hint='pip install "adapterhub[hub-scale]"',
            ) from None

        @event.listens_for(engine, "connect")
        def prepare(connection: Any, _: Any) -> None:
            with connection.cursor() as cursor:
                cursor.execute(f"SET lock_timeout = {round(1000 * lock_seconds)}")
                cursor.execute(  # acknowledged writes are not lost
                    "SELECT set_config('synchronous_commit', 'on', false)"
                    " WHERE current_setting('synchronous_commit') = 'off'"
                )
            connection.commit()

        super().__init__(engine, lock_seconds)
        self._readers = engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
        self._watch: Connection | None = None
        self._check_reached()

    def _check_reached(self) -> None:
        try:
            self.engine.connect().close()
        except OperationalError as error:
            message = " ".join(str(error.orig).split())
            raise ConfigError(
                f"{self.place} cannot be used: {message[:300]}",
                expected="a database that this user may write",
                hint="postgresql://USER@HOST:PORT/DATABASE, with the password in PGPASSWORD",
            ) from None

    @contextmanager
    def creating(self) -> Iterator[Connection]:
        """Begin the transaction that creates a hub, unless another process has created it."""
        with self._locked("creating", waits=True) as connection:
            yield connection

    def _begun(self, *, writes: bool) -> Connection:
        return (self.engine if writes else self._readers).connect()

    def _start_writing(self, connection: Connection) -> None:
        connection.execute(text(_COUNT))

    def _read_state(self) -> int:
        try:
            if self._watch is None:
                options = {"isolation_level": "AUTOCOMMIT"}
                self._watch = self.engine.connect().execution_options(**options)
            return int(self._watch.execute(text(_STATE)).scalar_one())
        except DBAPIError:
            self._leave()
            raise

    def _reason(self, error: DBAPIError) -> Exception | None:
        state = getattr(error.orig, "sqlstate", None)
        if state == _FULL:
            return FullDiskError()
        if state is None or state in _LATE or state.startswith("08"):
            return BusyError()
        return None

    @contextmanager
    def alone(self, *, waits: bool = True) -> Iterator[None]:
        """Hold a lock of the database, in a separate transaction."""
        with self._locked("keeping", waits=waits):
            yield

    @contextmanager
    def _locked(self, name: str, *, waits: bool) -> Iterator[Connection]:
        key = {"key": zlib.crc32(name.encode())}
        with self._explained(), self.engine.begin() as connection:
            if waits:
                connection.execute(text("SET LOCAL lock_timeout = 0"))
                connection.execute(text(_LOCK.format(lock="pg_advisory_xact_lock")), key)
            elif not connection.execute(
                text(_LOCK.format(lock="pg_try_advisory_xact_lock")), key
            ).scalar_one():
                raise BusyError
            yield connection

    def problems(self) -> list[str]:
        """Return an empty list: PostgreSQL checks its own pages."""
        return []

    def close(self) -> None:
        """Close all connections."""
        with self._watching:
            self._leave()
        super().close()

    def _leave(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.invalidate()
            watch.close()
