"""The database of a hub: how it is opened, read and written, and which schema it must have.

SQLite writes ahead (WAL) and waits for the disk at the end of each transaction: what was answered
as written survives the end of the process and of the power. Readers are in nobody's way; writers
wait for each other.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.pool import QueuePool

from adapterhub.errors import FileError
from adapterhub.hub.refusals import BusyError, FullDiskError
from adapterhub.hub.tables import SCHEMA_REVISION, metadata

LOCK_SECONDS = 5.0  # that a writer waits for the others
_UNCHANGED_SECONDS = 1.0  # a token may expire without a write
_CONNECTIONS = 48
_WRITES = "adapterhub_writes"

# Words and labels of listings; SQLAlchemy has no virtual tables. listings.py searches in it.
FULL_TEXT = (
    "CREATE VIRTUAL TABLE IF NOT EXISTS listing_texts USING fts5 (tokens, content='listings',"
    " content_rowid='repository', tokenize=\"ascii tokenchars '_'\", detail='none', columnsize=0)",
    "CREATE TABLE IF NOT EXISTS listing_words (word TEXT PRIMARY KEY) WITHOUT ROWID",
)


class Database:
    """An open database.

    Args:
        path: its file.
        lock_seconds: how long a writer waits for the others.
    """

    def __init__(self, path: Path, lock_seconds: float = LOCK_SECONDS) -> None:
        self.path = path
        self.engine = _engine(path, lock_seconds)
        self._watch: sqlite3.Connection | None = None  # never writes, so it sees all writers
        self._watching = threading.Lock()
        self._state, self._began = -1, 0.0
        self._unchanged: dict[Hashable, Any] = {}

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Read one state of the database, whatever others write meanwhile.

        Raises:
            BusyError: it is locked.
        """
        with _explained(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Write in one transaction, which an error undoes; it excludes other writers.

        Raises:
            BusyError: another one writes for too long.
            FullDiskError: there is no room.
        """
        with _explained(), self.engine.connect() as connection:
            connection = connection.execution_options(**{_WRITES: True})
            with connection.begin():
                yield connection

    def unchanged(self) -> dict[Hashable, Any]:
        """Return what was read, by what was asked, since anybody, in any process, has written.

        Between two writes, all readers of a file ask the same: whose the token is, which
        repository, which commit. This takes microseconds, to ask the rest a millisecond. A value
        goes into the dictionary of before it was read.
        """
        with self._watching:
            if self._watch is None:
                self._watch = sqlite3.connect(self.path, check_same_thread=False)
            state = int(self._watch.execute("PRAGMA data_version").fetchone()[0])
            if state != self._state or time.monotonic() - self._began > _UNCHANGED_SECONDS:
                self._state, self._began, self._unchanged = state, time.monotonic(), {}
            return self._unchanged

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()
        with self._watching:
            if self._watch is not None:
                self._watch.close()
                self._watch = None


def create_tables(database: Database) -> None:
    """Create the tables of a new hub, and say of which schema they are."""
    with database.writing() as connection:
        metadata.create_all(connection)
        for statement in FULL_TEXT:
            connection.execute(text(statement))
        connection.execute(
            text("CREATE TABLE IF NOT EXISTS alembic_version (version_num VARCHAR(32) NOT NULL)")
        )
        connection.execute(text("DELETE FROM alembic_version"))
        connection.execute(
            text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": SCHEMA_REVISION}
        )
    os.chmod(database.path, 0o600)


def schema_revision(path: Path) -> str | None:
    """Return the schema of a database's file; None if it has none.

    Raises:
        FileError: it is no database.
    """
    if not path.exists() or not path.stat().st_size:
        return None
    database = Database(path)
    try:
        with database.reading() as connection:
            found = connection.execute(
                text("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'")
            ).first()
            if found is None:
                return None
            row = connection.execute(text("SELECT version_num FROM alembic_version")).first()
            return str(row[0]) if row else None
    except DatabaseError as error:
        raise FileError(
            f"{path} is not the database of a hub: {type(error).__name__}",
            hint="adapterhub hub restore, from a backup",
        ) from None
    finally:
        database.close()


def _engine(path: Path, lock_seconds: float) -> Engine:
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


@contextmanager
def _explained() -> Iterator[None]:
    """Say why a transaction was not possible, where that is nobody's mistake."""
    try:
        yield
    except OperationalError as error:
        words = str(error.orig)
        if "locked" in words or "busy" in words:
            raise BusyError from None
        if "full" in words or "disk I/O" in words:
            raise FullDiskError from None
        raise
