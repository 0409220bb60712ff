"""The database of a hub: opening, reading, writing, and schema revisions.

A hub in a folder has SQLite, a hub of several processes PostgreSQL; postgres.py holds the
differences. Both sync to disk at the end of each transaction: data that was acknowledged survives a
crash or a power failure. Readers do not block anyone; writers wait for each other.

The tables: a namespace is a user or an organisation and has repositories. A repository has commits,
each with a tree of files, and refs to them. A file is a blob; a repository may only name blobs that
it was granted. Versions, listings and facets are derived from these.

Each transaction records its changes to downloadable data in its `Changes`. The gate reads this
record at the end of the transaction (gate.py). A transaction with changes that did not pass the
gate is rolled back.

The full-text index of listings needs different SQL in each database: SQLite has FTS5, PostgreSQL a
GIN index of a `tsvector`. Both index the tokens of `listings.tokens` and match them whole or by
prefix.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sqlalchemy import (
    URL,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    false,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import QueuePool
from sqlalchemy.types import TypeEngine

from adapterhub.hub.blobs import Blobs, StagedBlob
from adapterhub.web.errors import BusyError, FullDiskError

_MOST_WORDS = 64  # that a prefix expands to
_LONGEST, _MOST_BYTES = 500, 900_000  # characters of a term, bytes of all: a tsvector has limits
_LAST = "\U0010ffff"
_REST = "l.type = :type AND {seen} ORDER BY {order}, l.repository LIMIT :limit OFFSET :offset"


@dataclass(frozen=True)
class FullText:
    """The full-text index of one kind of database, as SQL.

    Attributes:
        created: statements that create it.
        add: adds a repository with its `:tokens`, or with these as a list of `:terms`.
        remove: removes them.
        matches: the condition of rows that match `:match`.
        join: joins matching rows to their listings.
        holds: the condition of a listing that has all of `:tokens`, without the index.
        quote: encloses a token of `:match`.
        begins: follows a token that is a prefix.
        both: the operator "and".
        either: the operator "or".
        shortens: whether `_terms` shortens the tokens.
    """

    created: tuple[str, ...]
    add: str
    remove: str
    matches: str
    join: str
    holds: str
    quote: str
    begins: str
    both: str
    either: str
    shortens: bool

    def write(self, connection: Connection, repository: int, tokens: str) -> None:
        """Index a repository; prefixes expand to its words."""
        unique = [*dict.fromkeys(tokens.split())]
        values = {"repository": repository, "tokens": tokens, "terms": _terms(unique)}
        parameters = {name: value for name, value in values.items() if f":{name}" in self.add}
        connection.execute(text(self.add), parameters)
        words = [{"word": word} for word in unique if word[0] != "_" and len(word) <= _LONGEST]
        if words:
            statement = "INSERT INTO listing_words VALUES (:word) ON CONFLICT DO NOTHING"
            connection.execute(text(statement), words)

    def erase(self, connection: Connection, repository: int, tokens: str) -> None:
        """Remove a repository, indexed under these tokens, from the index."""
        values = {"repository": repository, "tokens": tokens}
        parameters = {name: value for name, value in values.items() if f":{name}" in self.remove}
        connection.execute(text(self.remove), parameters)

    def match(self, connection: Connection, labels: Iterable[str], prefixes: Iterable[str]) -> str:
        """Return the match expression for all of these labels and word prefixes."""
        terms = [self._quoted(label) for label in labels]
        return self.both.join([*terms, *(self._word(connection, p) for p in prefixes)])

    def count(self, connection: Connection, match: str, most: int) -> int:
        """Return the number of matching rows, at most `most`."""
        statement = f"SELECT count(*) FROM (SELECT 1 FROM listing_texts t WHERE {self.matches} "
        result = connection.execute(
            text(f"{statement} LIMIT :most) AS found"), {"match": match, "most": most}
        )
        return int(result.scalar_one())

    def search(self, seen: str, order: str, *, sorts: bool) -> str:
        """Return a query that sorts the matches, or one that reads all rows in order.

        Args:
            seen: the condition of visible rows.
            order: the column to order by.
            sorts: whether to sort, since few rows match.
        """
        start = (
            f"SELECT l.* FROM listing_texts t {self.join} WHERE {self.matches}"
            if sorts
            else f"SELECT l.* FROM listings l WHERE {self.holds}"
        )
        return f"{start} AND {_REST.format(seen=seen, order=order)}"

    def _word(self, connection: Connection, prefix: str) -> str:
        """Return the expression for a prefix: the words it expands to, unless there are many."""
        chosen = "SELECT word FROM listing_words WHERE word >= :first AND word < :last LIMIT :most"
        values = {"first": prefix, "last": prefix + _LAST, "most": _MOST_WORDS + 1}
        rows = connection.execute(text(chosen), values).all()
        if 0 < len(rows) <= _MOST_WORDS:
            return f"({self.either.join(self._quoted(row.word) for row in rows)})"
        return f"{self._quoted(prefix)}{self.begins}"

    def _quoted(self, token: str) -> str:
        return f"{self.quote}{_terms([token])[0] if self.shortens else token}{self.quote}"


def _terms(tokens: Iterable[str]) -> list[str]:
    """Return tokens that a tsvector can hold: long ones as digests, and a limited number."""
    terms = [
        token if len(token) <= _LONGEST else f"_{sha256(token.encode()).hexdigest()}"
        for token in tokens
    ]
    sizes = accumulate(len(term.encode()) for term in terms)
    return [term for term, size in zip(terms, sizes, strict=True) if size <= _MOST_BYTES]


SQLITE = FullText(
    created=(
        "CREATE VIRTUAL TABLE IF NOT EXISTS listing_texts USING fts5 (tokens, content='listings',"
        " content_rowid='repository', tokenize=\"ascii tokenchars '_'\", detail='none',"
        " columnsize=0)",
        "CREATE TABLE IF NOT EXISTS listing_words (word TEXT PRIMARY KEY) WITHOUT ROWID",
    ),
    add="INSERT INTO listing_texts (rowid, tokens) VALUES (:repository, :tokens)",
    remove="INSERT INTO listing_texts (listing_texts, rowid, tokens)"
    " VALUES ('delete', :repository, :tokens)",
    matches="listing_texts MATCH :match",
    join="CROSS JOIN listings l ON l.repository = t.rowid",
    holds="NOT EXISTS (SELECT 1 FROM json_each(:tokens) token"
    " WHERE instr(l.tokens, token.value) = 0)",
    quote='"',
    begins="*",
    both=" AND ",
    either=" OR ",
    shortens=False,
)
POSTGRES = FullText(
    created=(
        "CREATE TABLE IF NOT EXISTS listing_texts (repository integer PRIMARY KEY"
        " REFERENCES listings ON DELETE CASCADE, terms tsvector NOT NULL)",
        "CREATE INDEX IF NOT EXISTS listing_texts_by_term ON listing_texts USING gin (terms)",
        'CREATE TABLE IF NOT EXISTS listing_words (word text COLLATE "C" PRIMARY KEY)',
        "CREATE INDEX IF NOT EXISTS listings_by_best_score"
        " ON listings (type, score DESC NULLS LAST)",
    ),
    add="INSERT INTO listing_texts VALUES (:repository, array_to_tsvector(:terms))",
    remove="DELETE FROM listing_texts WHERE repository = :repository",
    matches="t.terms @@ CAST(:match AS tsquery)",
    join="JOIN listings l ON l.repository = t.repository",
    holds="NOT EXISTS (SELECT 1 FROM json_array_elements_text(CAST(:tokens AS json)) token (value)"
    " WHERE strpos(l.tokens, token.value) = 0)",
    quote="'",
    begins=":*",
    both=" & ",
    either=" | ",
    shortens=True,
)


def full_text_of(connection: Connection) -> FullText:
    """Return the index for the database of a connection."""
    return POSTGRES if connection.dialect.name == "postgresql" else SQLITE


CHANGES = "adapterhub_changes"
"""The connection option that holds the record of changes of the transaction."""


@dataclass(frozen=True)
class NewVersion:
    """An added version: its repository, number and commit, and the previous highest number."""

    repository: int
    number: int
    commit: str
    before: int


@dataclass
class Changes:
    """The changes of a transaction.

    Attributes:
        commits: commits by repository, each with whether it is new or has a new ref.
        moved: renamed repositories, with their previous namespaces.
        granted: files newly granted to a repository.
        versions: added versions.
        refs: branches and tags that were deleted or moved, by repository: kind and name.
        files: received files; the gate stores them.
        are_admitted: whether the gate has admitted all of these changes.
    """

    commits: dict[tuple[int, str], bool] = field(default_factory=dict)
    moved: dict[int, int] = field(default_factory=dict)
    granted: set[tuple[int, str]] = field(default_factory=set)
    versions: list[NewVersion] = field(default_factory=list)
    refs: set[tuple[int, str, str]] = field(default_factory=set)
    files: list[StagedBlob] = field(default_factory=list)
    are_admitted: bool = False

    @property
    def repositories(self) -> set[int]:
        """The repositories that were changed."""
        ids = {*self.moved, *(each.repository for each in self.versions)}
        ids |= {own for own, _ in self.commits} | {own for own, _ in self.granted}
        return ids | {own for own, _, _ in self.refs}

    def check_admitted(self) -> None:
        """Refuse to end a transaction that bypassed the gate.

        Raises:
            RuntimeError: the changes were not admitted: a bug in this program.
        """
        if not self.are_admitted and (self.repositories or self.files):
            raise RuntimeError("what can be downloaded changes in `changing` alone")


def changes_of(connection: Connection) -> Changes:
    """Return the record of changes of a connection's transaction."""
    changes: Changes = connection.get_execution_options()[CHANGES]
    return changes


def received_reader(connection: Connection, folder: Blobs) -> Callable[[str, int], bytes]:
    """Return a function that reads files, including those not yet in place."""
    received = {staged.info.sha256: staged.path for staged in changes_of(connection).files}

    def read(sha256: str, most: int) -> bytes:
        with suppress(KeyError, FileNotFoundError), open(received[sha256], "rb") as file:
            return file.read(most)
        return folder.read(sha256, most)

    return read


_SECONDS = "%Y-%m-%dT%H:%M:%SZ"


def now_text(ago: float = 0.0) -> str:
    """Return the current time, or the time `ago` seconds before."""
    return (datetime.now(timezone.utc) - timedelta(seconds=ago)).strftime(_SECONDS)


def now_precisely() -> str:
    """Return the current time to the millisecond, in the Hub's format."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


SCHEMA_REVISION = "0002"
"""The newest revision in `migrations/versions`, which these tables match."""

metadata = MetaData()


def _words(length: int) -> TypeEngine[str]:
    """Return a text type that every database sorts by code point."""
    return String(length).with_variant(Text(collation="C"), "postgresql")


def _owned_by(name: str, target: str, **options: Any) -> Column[int]:
    return Column(name, Integer, ForeignKey(target, ondelete="CASCADE"), **options)


settings = Table(
    "settings",
    metadata,
    Column("key", _words(64), primary_key=True),
    Column("value", Text, nullable=False),
)


def _next_id(context: Any) -> int:
    """Return an id that no row of the table has or ever had.

    SQLite gives the id of a deleted row to the next one. The highest id is therefore kept in
    `settings`, which backups and moves to another database copy.
    """
    table = context.compiled.statement.table
    own, connection = f"highest id of {table.name}", context.connection
    kept = connection.scalar(select(settings.c.value).where(settings.c.key == own))
    number = max(int(kept or 0), connection.scalar(select(func.max(table.c.id))) or 0) + 1
    if kept is None:
        connection.execute(insert(settings).values(key=own, value=str(number)))
    else:
        connection.execute(update(settings).where(settings.c.key == own).values(value=str(number)))
    return number


def _own_id() -> Column[int]:
    return Column("id", Integer, primary_key=True, default=_next_id)


namespaces = Table(
    "namespaces",
    metadata,
    _own_id(),
    Column("name", _words(96), nullable=False),
    Column("folded", _words(96), nullable=False, unique=True),  # no two may differ only by case
    Column("kind", _words(8), nullable=False),  # user, org, or mirror
    Column("is_admin", Boolean, nullable=False, default=False),  # a user who may change everything
    Column("rules", Text, nullable=False, default="{}"),  # see gate.py
    Column("quota", BigInteger),  # bytes
    Column("created", _words(20), nullable=False),
    Column("is_disabled", Boolean, nullable=False, default=False, server_default=false()),
)

members = Table(
    "members",
    metadata,
    _owned_by("org", "namespaces.id", primary_key=True),
    _owned_by("user", "namespaces.id", primary_key=True),
    Column("role", _words(8), nullable=False),
)

tokens = Table(
    "tokens",
    metadata,
    _own_id(),
    Column("sha256", _words(64), nullable=False, unique=True),
    Column("name", _words(96), nullable=False, unique=True),
    _owned_by("user", "namespaces.id", nullable=False),
    Column("role", _words(8), nullable=False),
    _owned_by("scope", "namespaces.id"),  # the only namespace that it covers
    Column("created", _words(20), nullable=False),
    Column("expires", _words(20)),
    Column("used", _words(20)),
)

sessions = Table(
    "sessions",
    metadata,
    Column("sha256", _words(64), primary_key=True),  # of the cookie
    _owned_by("token", "tokens.id", nullable=False, index=True),  # used to log in
    Column("expires", _words(20), nullable=False),
)

repositories = Table(
    "repositories",
    metadata,
    _own_id(),
    Column("type", _words(8), nullable=False),  # models, datasets or spaces
    _owned_by("namespace", "namespaces.id", nullable=False, index=True),
    Column("name", _words(200), nullable=False),  # owner/name
    Column("folded", _words(200), nullable=False),
    Column("is_private", Boolean, nullable=False),
    Column("created", _words(24), nullable=False),
    Column("modified", _words(24), nullable=False),
    Column("highest", Integer, nullable=False, default=0),  # of all versions, deleted ones included
    UniqueConstraint("type", "folded"),
)

retired = Table(
    "retired",
    metadata,
    Column("type", _words(8), primary_key=True),
    Column("folded", _words(200), primary_key=True),
    Column("highest", Integer, nullable=False),  # version of a deleted repository
)

renamed = Table(
    "renamed",
    metadata,
    Column("type", _words(8), primary_key=True),
    Column("folded", _words(200), primary_key=True),  # an earlier name
    _owned_by("repository", "repositories.id", nullable=False, index=True),
)

trees = Table(
    "trees",
    metadata,
    Column("oid", _words(40), primary_key=True),
    Column("files", Text, nullable=False),
)

commits = Table(
    "commits",
    metadata,
    _owned_by("repository", "repositories.id", primary_key=True),
    Column("oid", _words(40), primary_key=True),
    Column("parent", _words(40)),
    Column("tree", _words(40), ForeignKey("trees.oid"), nullable=False, index=True),
    Column("title", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("author", _words(96), nullable=False),
    Column("created", _words(24), nullable=False),
    Column("is_removed", Boolean, nullable=False, default=False),  # by deleting a version
)

refs = Table(
    "refs",
    metadata,
    _owned_by("repository", "repositories.id", primary_key=True),
    Column("kind", _words(8), primary_key=True),  # branch or tag
    Column("name", _words(200), primary_key=True),
    Column("commit", _words(40), nullable=False),
)

blobs = Table(
    "blobs",
    metadata,
    Column("sha256", _words(64), primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("git_sha1", _words(40), nullable=False),
)

grants = Table(
    "grants",
    metadata,
    _owned_by("repository", "repositories.id", primary_key=True),
    Column("sha256", _words(64), ForeignKey("blobs.sha256"), primary_key=True, index=True),
    Column("is_committed", Boolean, nullable=False),
    Column("granted", _words(20), nullable=False),  # in a mirrored one, when it was used last
)

promises = Table(
    "promises",  # space reserved for uploads
    metadata,
    _owned_by("repository", "repositories.id", primary_key=True),
    Column("sha256", _words(64), primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("expires", _words(20), nullable=False),
)

versions = Table(
    "versions",
    metadata,
    _owned_by("repository", "repositories.id", primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("commit", _words(40), nullable=False),
    Column("digest", _words(64), nullable=False),  # "" without a manifest of ours
)

listings = Table(
    "listings",
    metadata,
    _owned_by("repository", "repositories.id", primary_key=True),
    Column("type", _words(8), nullable=False),
    Column("name", _words(200), nullable=False),
    Column("namespace", Integer, nullable=False),
    Column("is_private", Boolean, nullable=False),
    Column("modified", _words(24), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("score", Float),  # the higher the better
    Column("head", _words(40), nullable=False),
    Column("about", Text, nullable=False),  # see search_rows.py
    Column("entry", Text),  # its current version; none if it has no adapter
    Column("tokens", Text, nullable=False),  # labels and words that a search compares
    Index("listings_by_name", "type", "name"),
    Index("listings_by_date", "type", "modified"),
    Index("listings_by_size", "type", "size"),
    Index("listings_by_score", "type", "score"),
)

facets = Table(
    "facets",
    metadata,
    Column("field", _words(16), primary_key=True),
    Column("value", _words(300), primary_key=True),
    _owned_by("repository", "listings.repository", primary_key=True, index=True),
)

facet_counts = Table(
    "facet_counts",
    metadata,
    Column("field", _words(16), primary_key=True),
    Column("value", _words(300), primary_key=True),
    Column("number", Integer, nullable=False, index=True),
)

audit = Table(
    "audit",
    metadata,
    _own_id(),
    Column("time", _words(20), nullable=False, index=True),
    Column("who", _words(96), nullable=False),
    Column("token", _words(96), nullable=False),  # the token's name
    Column("action", _words(40), nullable=False),
    Column("target", _words(300), nullable=False),
    Column("address", _words(64), nullable=False),
)


def write_audit(
    connection: Connection, user: str, token: str, action: str, target: str, address: str = ""
) -> None:
    """Write an action to the audit log, in the transaction of the action.

    Args:
        connection: the transaction.
        user: the name of the user; "" for a stranger.
        token: the name of the user's token.
        action: what was done.
        target: what it was done to.
        address: the address of the client.
    """
    values = {"time": now_text(), "who": user, "token": token, "action": action}
    connection.execute(insert(audit).values(**values, target=target[:300], address=address))


HubPlace = Path | URL
"""The location of a hub: a folder, or a PostgreSQL database that names its bucket."""
DATABASE, NEW_DATABASE = "hub.sqlite", "new.sqlite"
LOCK_SECONDS = 60.0  # how long a writer waits for others; clients do not retry
_CONNECTIONS = 56  # for 40 threads of readers, and those of writers
KEEPING = ".keeping"  # held while files are removed or copied
_UNCHANGED_SECONDS = 1.0  # a token may expire without a write
_WRITES = "adapterhub_writes"


class Database(ABC):
    """An open database.

    Args:
        engine: its engine.
        lock_seconds: how long a writer waits for the others.

    Attributes:
        waits: whether `unchanged` queries another machine.
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
        """Return a connection that has begun a transaction of this kind."""

    @abstractmethod
    def _start_writing(self, connection: Connection) -> None:
        """Exclude other writers until the end of the transaction."""

    @abstractmethod
    def _read_state(self) -> int:
        """Read a number that changes with each write, in any process."""

    @abstractmethod
    def _reason(self, error: DBAPIError) -> Exception | None:
        """Return why a transaction failed if the cause is external, such as a lock."""

    @abstractmethod
    def alone(self, *, waits: bool = True) -> Any:
        """Return a context that excludes other processes that remove or copy files.

        Raises:
            BusyError: another process holds the lock, and waiting is not wanted.
        """

    @abstractmethod
    def problems(self) -> list[str]:
        """List the problems of the database itself."""

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Read one consistent state of the database, regardless of concurrent writes.

        Raises:
            BusyError: the database is locked or does not respond.
        """
        with self._explained(), self._begun(writes=False) as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Write in one transaction that excludes other writers; an error rolls it back.

        Changes to downloadable data are made in `changing` (gate.py).

        Raises:
            BusyError: another writer takes too long, or the database does not respond.
            FullDiskError: the disk is full.
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
        """Return a cache of values by key, which is emptied when any process has written.

        Between two writes, all readers of a file make the same queries: the token's user, the
        repository, the commit. Checking for writes is one short query; the others are a dozen. Get
        the dictionary before reading the value that is stored in it.

        Raises:
            BusyError: the database does not respond.
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
        """Do nothing: the transaction already began in write mode."""

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
            lines = connection.execute(text("PRAGMA integrity_check(20)")).scalars().all()
        return [f"{self.path.name}: {line}" for line in lines if line != "ok"]

    def close(self) -> None:
        """Close all connections."""
        super().close()
        with self._watching:
            if self._watch is not None:
                self._watch.close()
                self._watch = None


def create_tables(connection: Connection) -> None:
    """Create the tables of a new hub and record their revision."""
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
    """Create a database file with the tables of a hub."""
    database = SqliteDatabase(path)
    with database.writing() as connection:
        create_tables(connection)
    os.chmod(path, 0o600)
    return database


def revision_in(connection: Connection) -> str | None:
    """Return the schema revision of a database; None if it has none."""
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
