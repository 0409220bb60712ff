"""The database of a hub: how it is opened, read and written, and which schema it must have.

A hub in a folder has SQLite, a hub of several processes PostgreSQL; postgres.py is what that does
otherwise. Either waits for the disk at the end of each transaction: what was answered as written
survives the end of the process and of the power. Readers are in nobody's way; writers wait for
each other.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import QueuePool

from adapterhub.hub.changes import CHANGES, Changes
from adapterhub.hub.full_text import full_text_of
from adapterhub.hub.refusals import BusyError, FullDiskError
from adapterhub.hub.tables import SCHEMA_REVISION, metadata

HubPlace = Path | URL
"""Where a hub is: a folder, or a database of PostgreSQL, which says where its files are."""
DATABASE, NEW_DATABASE = "hub.sqlite", "new.sqlite"
LOCK_SECONDS = 60.0  # that a writer waits for the others; clients do not try again
_CONNECTIONS = 56  # of the threads of readers, which are 40, and those of writers
KEEPING = ".keeping"  # held while files are removed or copied
_UNCHANGED_SECONDS = 1.0  # a token may expire without a write
_WRITES = "adapterhub_writes"


class Database(ABC):
    """An open database.

    Args:
        engine: its engine.
        lock_seconds: how long a writer waits for the others.

    Attributes:
        waits: whether `unchanged` asks another machine.
    """

    waits = False

    def __init__(self, engine: Engine, lock_seconds: float) -> None:
        self.engine, self._lock_seconds = engine, lock_seconds
        self._turn = threading.Lock()  # of this process' writers, before they take a connection
        self._watching = threading.RLock()
        self._state, self._began = -1, 0.0
        self._unchanged: dict[Hashable, Any] = {}

    @abstractmethod
    def _begun(self, *, writes: bool) -> Connection:
        """Return a connection that begins a transaction so."""

    @abstractmethod
    def _start_writing(self, connection: Connection) -> None:
        """Exclude other writers until the end of the transaction."""

    @abstractmethod
    def _read_state(self) -> int:
        """Return a number that any writer, in any process, changes."""

    @abstractmethod
    def _reason(self, error: DBAPIError) -> Exception | None:
        """Return why a transaction was not possible, where that is nobody's mistake."""

    @abstractmethod
    def alone(self, *, waits: bool = True) -> Any:
        """Return a context that excludes others who remove or copy files, in any process.

        Raises:
            BusyError: somebody does, and it is not to wait.
        """

    @abstractmethod
    def problems(self) -> list[str]:
        """List what is wrong with the database as such."""

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Read one state of the database, whatever others write meanwhile.

        Raises:
            BusyError: it is locked, or does not answer.
        """
        with self._explained(), self._begun(writes=False) as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Write in one transaction, which an error undoes; it excludes other writers.

        What can be downloaded is changed in `changing` (gate.py).

        Raises:
            BusyError: another one writes for too long, or the database does not answer.
            FullDiskError: there is no room.
        """
        if not self._turn.acquire(timeout=self._lock_seconds):
            raise BusyError
        try:
            with self._explained(), self._begun(writes=True) as connection:
                changes = Changes()
                connection.execution_options(**{CHANGES: changes})
                with connection.begin():
                    self._start_writing(connection)
                    yield connection
                    changes.check_admitted()
        finally:
            self._turn.release()

    def unchanged(self) -> dict[Hashable, Any]:
        """Return what was read, by what was asked, since anybody, in any process, has written.

        Between two writes, all readers of a file ask the same: whose the token is, which
        repository, which commit. To ask whether anybody wrote is one short question, to ask the
        rest a dozen. A value goes into the dictionary of before it was read.

        Raises:
            BusyError: the database does not answer.
        """
        with self._watching, self._explained():
            state = self._read_state()
            if state != self._state or time.monotonic() - self._began > _UNCHANGED_SECONDS:
                self._state, self._began, self._unchanged = state, time.monotonic(), {}
            return self._unchanged

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except PoolTimeout:
            raise BusyError from None
        except (OperationalError, InterfaceError) as error:
            if (reason := self._reason(error)) is not None:
                raise reason from None
            raise


class SqliteDatabase(Database):
    """A database in a file.

    Args:
        path: its file.
        lock_seconds: how long a writer waits for the others.
    """

    def __init__(self, path: Path, lock_seconds: float = LOCK_SECONDS) -> None:
        self.path = path
        super().__init__(_sqlite_engine(path, lock_seconds), lock_seconds)
        self._watch: sqlite3.Connection | None = None  # never writes, so it sees all writers

    def _begun(self, *, writes: bool) -> Connection:
        return self.engine.connect().execution_options(**{_WRITES: writes})

    def _start_writing(self, connection: Connection) -> None:
        """Do nothing: the transaction was begun so."""

    def _read_state(self) -> int:
        if self._watch is None:
            self._watch = sqlite3.connect(self.path, check_same_thread=False)
        return int(self._watch.execute("PRAGMA data_version").fetchone()[0])

    def _reason(self, error: DBAPIError) -> Exception | None:
        words = str(error.orig)
        if "locked" in words or "busy" in words:
            return BusyError()
        if "full" in words or "disk I/O" in words:
            return FullDiskError()
        return None

    @contextmanager
    def alone(self, *, waits: bool = True) -> Iterator[None]:
        """Hold a lock in the folder."""
        try:
            with FileLock(self.path.with_name(KEEPING), timeout=-1 if waits else 0):
                yield
        except Timeout:
            raise BusyError from None

    def problems(self) -> list[str]:
        """Check the pages of the file and its indices."""
        with self.reading() as connection:
            found = connection.execute(text("PRAGMA integrity_check(20)")).scalars().all()
        return [f"{self.path.name}: {line}" for line in found if line != "ok"]

    def close(self) -> None:
        """Close all connections."""
        super().close()
        with self._watching:
            if self._watch is not None:
                self._watch.close()
                self._watch = None


def create_tables(connection: Connection) -> None:
    """Create the tables of a new hub, and say of which schema they are."""
    metadata.create_all(connection)
    for statement in full_text_of(connection).created:
        connection.execute(text(statement))
    connection.execute(
        text("CREATE TABLE IF NOT EXISTS alembic_version (version_num VARCHAR(32) NOT NULL)")
    )
    connection.execute(text("DELETE FROM alembic_version"))
    connection.execute(
        text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": SCHEMA_REVISION}
    )


def create_database_file(path: Path) -> SqliteDatabase:
    """Create a database in a file, with the tables of a hub."""
    database = SqliteDatabase(path)
    with database.writing() as connection:
        create_tables(connection)
    os.chmod(path, 0o600)
    return database


def revision_in(connection: Connection) -> str | None:
    """Return the schema of a database; None if it has none."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    row = connection.execute(text("SELECT version_num FROM alembic_version")).first()
    return str(row[0]) if row else None


def _sqlite_engine(path: Path, lock_seconds: float) -> Engine:
    engine = create_engine(
        f"sqlite:///{path}",
        poolclass=QueuePool,
        pool_size=_CONNECTIONS,
        max_overflow=0,
        connect_args={"check_same_thread": False, "timeout": lock_seconds},
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # `begin` below begins transactions
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            "cache_size=-2000",
            "mmap_size=268435456",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
