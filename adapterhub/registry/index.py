"""The index of a local registry: an SQLite file that answers searches, built from the folders.

It holds nothing that the folders do not, so it may be deleted at any time. A name's folder is
indexed as a whole, together with its stamp; another stamp later means that the folder has changed.
A search compares the folders with the index and reads it in one transaction, so that its results
are those of the folders at one time during the search, whatever other processes do.

Each version that is not yanked is a row of `versions`. Its tokens are its labels, such as
`_task_<hex>`, and the words of its text. The full-text index `texts` finds the versions that have
all labels and word prefixes of a query. If they are few, they are sorted; if they are many,
versions are scanned in the query's order, and their tokens compared, until its limit is reached.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from adapterhub.errors import RegistryError
from adapterhub.registry.store import (
    SORTS,
    Entry,
    Query,
    is_fingerprint,
    sort_field,
    sort_keys,
    words_in,
)

FORMAT = 5  # to be changed with the tables and with the fields of an entry
# The ascii tokenizer splits at spaces only: tokens consist of letters, digits and underscores.
_SCHEMA = """
    CREATE TABLE IF NOT EXISTS folders (
        path TEXT PRIMARY KEY, stamp TEXT, broken TEXT) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS folders_broken ON folders (path, broken) WHERE broken != '';
    CREATE TABLE IF NOT EXISTS versions (
        id INTEGER PRIMARY KEY, path TEXT, entry TEXT, tokens TEXT);
    CREATE INDEX IF NOT EXISTS versions_by_path ON versions (path);
    CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5 (
        tokens, content='versions', content_rowid='id', tokenize="ascii tokenchars '_'",
        detail='none', columnsize=0);
    CREATE TABLE IF NOT EXISTS words (word TEXT PRIMARY KEY) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS orders (
        field TEXT, value, id INTEGER, PRIMARY KEY (field, value, id)) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS orders_by_version ON orders (id, field, value);
"""
_COUNT_MATCHES = "SELECT count(*) FROM (SELECT 1 FROM texts WHERE texts MATCH :match LIMIT :few)"
_SORT_MATCHES = """
    SELECT v.entry FROM (
        SELECT o.id, o.value FROM texts CROSS JOIN orders o
            ON o.id = texts.rowid AND o.field = :field
        WHERE texts MATCH :match ORDER BY o.value, o.id LIMIT :limit
    ) best CROSS JOIN versions v ON v.id = best.id ORDER BY best.value, best.id
"""
_SCAN_VERSIONS = """
    SELECT v.entry FROM orders o CROSS JOIN versions v ON v.id = o.id
    WHERE o.field = :field AND NOT EXISTS (
        SELECT 1 FROM json_each(:tokens) token WHERE instr(v.tokens, token.value) = 0)
    ORDER BY o.value, o.id LIMIT :limit
"""
_FEW = 4_096  # matches; sorting more takes longer than a scan up to the usual limit

_MOST_WORDS = 64  # that a prefix is expanded to
_LAST = "\U0010ffff"

_WAIT = 120.0  # seconds for another process that indexes the folders
_TABLES = ("folders", "versions", "texts", "words", "orders")


@dataclass(frozen=True)
class IndexedFolder:
    """A name's folder: its versions, oldest first, each with its text, and problems by file."""

    versions: Sequence[tuple[Entry, str]]
    broken: Mapping[str, str] = field(default_factory=dict)


class Index:
    """An open index file: `with open_index(path) as index`. Processes may share the file."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read one state of the index, which other processes do not change in the meantime."""
        with self.db:
            self.db.execute("BEGIN")
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Exclude other writers; an error undoes all changes."""
        with self.db:
            self.db.execute("BEGIN IMMEDIATE")
            yield

    def stamps(self) -> dict[str, str]:
        """Return the stamp of each folder when it was indexed."""
        return dict(self.db.execute("SELECT path, stamp FROM folders WHERE path != ''"))

    def registry_stamp(self) -> str | None:
        """Return the stamp of the registry at the last update."""
        row = self.db.execute("SELECT stamp FROM folders WHERE path = ''").fetchone()
        return row[0] if row else None

    def broken(self) -> dict[str, str]:
        """Return the problem of each file that could not be read, by its path."""
        sql = "SELECT path, broken FROM folders WHERE broken != '' ORDER BY path"
        return {
            f"{path}/{file}": problem
            for path, broken in self.db.execute(sql)
            for file, problem in json.loads(broken).items()
        }

    def digests(self) -> dict[str, str]:
        """Return the digest of each indexed version, by its path."""
        rows = self.db.execute("SELECT path, entry FROM versions")
        entries = [(path, json.loads(entry)) for path, entry in rows]
        return {f"{path}/{entry['version']}": entry["digest"] for path, entry in entries}

    def count(self) -> int:
        """Count the indexed folders."""
        (count,) = self.db.execute("SELECT count(*) FROM folders WHERE path != ''").fetchone()
        return int(count)

    def update(
        self, stamps: Mapping[str, str], read: Callable[[str], IndexedFolder], registry_stamp: str
    ) -> None:
        """Index new and changed folders, and remove deleted ones; call it inside `writing()`.

        Args:
            stamps: the stamp of each folder by its path, from before it is read.
            read: reads the folder with a path.
            registry_stamp: the stamp of the registry, from before the folders are read.
        """
        indexed = self.stamps()
        for path in indexed.keys() - stamps.keys():
            self._remove(path)
        for path, stamp in stamps.items():
            if indexed.get(path) != stamp:
                self._remove(path)
                self._index(path, stamp, read(path))
        self.db.execute("INSERT OR REPLACE INTO folders VALUES ('', ?, '')", (registry_stamp,))

    def clear(self) -> None:
        """Remove everything; call it inside `writing()`."""
        for table in _TABLES:
            self.db.execute(f"DROP TABLE {table}")
        _create_tables(self.db)

    def search(self, query: Query) -> list[Entry]:
        """Return the versions that match a query, in its order."""
        labels, prefixes = list(_required_labels(query)), sorted(words_in(query.text))
        terms = [f'"{label}"' for label in labels] + [self._term(prefix) for prefix in prefixes]
        parts = [f" {label} " for label in labels] + [f" {prefix}" for prefix in prefixes]
        values = {
            "match": " AND ".join(terms),
            "tokens": json.dumps(parts),
            "field": sort_field(query.sort),
            "limit": query.limit,
            "few": _FEW,
        }
        (count,) = self.db.execute(_COUNT_MATCHES, values).fetchone()
        rows = self.db.execute(_SORT_MATCHES if count < _FEW else _SCAN_VERSIONS, values)
        return entries_from_json(f"[{','.join(entry for (entry,) in rows)}]")

    def _term(self, prefix: str) -> str:
        """Return the full-text term for a prefix: the words that have it, unless they are many.

        FTS5 reads all matches of a prefix, but of words only as many as it needs.
        """
        sql = "SELECT word FROM words WHERE word >= ? AND word < ? LIMIT ?"
        rows = self.db.execute(sql, (prefix, prefix + _LAST, _MOST_WORDS + 1))
        words = [f'"{word}"' for (word,) in rows]
        return f"({' OR '.join(words)})" if 0 < len(words) <= _MOST_WORDS else f'"{prefix}"*'

    def _index(self, path: str, stamp: str, folder: IndexedFolder) -> None:
        broken = json.dumps(dict(folder.broken)) if folder.broken else ""
        self.db.execute("INSERT INTO folders VALUES (?, ?, ?)", (path, stamp, broken))
        available = [version for version in folder.versions if version[0].yanked is None]
        for entry, text in available:
            self._insert(path, entry, text, newest=entry is available[-1][0])

    def _insert(self, path: str, entry: Entry, text: str, *, newest: bool) -> None:
        words = words_in(text)
        tokens = f" {' '.join((*_labels(entry, newest), *words))} "
        sql = "INSERT INTO versions (path, entry, tokens) VALUES (?, ?, ?)"
        row = self.db.execute(sql, (path, json.dumps(asdict(entry)), tokens)).lastrowid
        self.db.executemany("INSERT OR IGNORE INTO words VALUES (?)", ((w,) for w in words))
        self.db.execute("INSERT INTO texts (rowid, tokens) VALUES (?, ?)", (row, tokens))
        orders = [(field, value, row) for field, value in sort_keys(entry).items()]
        self.db.executemany("INSERT INTO orders VALUES (?, ?, ?)", orders)

    def _remove(self, path: str) -> None:
        for sql in (
            "INSERT INTO texts (texts, rowid, tokens)"
            " SELECT 'delete', id, tokens FROM versions WHERE path = ?",
            "DELETE FROM orders WHERE id IN (SELECT id FROM versions WHERE path = ?)",
            "DELETE FROM versions WHERE path = ?",
            "DELETE FROM folders WHERE path = ?",
        ):
            self.db.execute(sql, (path,))


@contextmanager
def open_index(path: Path | None) -> Iterator[Index]:
    """Open the index in a file, and create it if it does not exist; None is one in memory.

    Raises:
        RegistryError: this Python's SQLite has no full-text index.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    # No implicit transactions: `reading` and `writing` begin them.
    connection = sqlite3.connect(path or ":memory:", timeout=_WAIT, isolation_level=None)
    with closing(connection) as db:
        index = Index(db)
        if not _is_complete(db):
            with index.writing():
                if not _is_complete(db):  # another process may have created the tables
                    _create_tables(db)
        yield index


def remove_index(path: Path) -> None:
    """Delete an index file that is not a database, and its journal."""
    for file in (path, path.with_name(f"{path.name}-journal")):
        file.unlink(missing_ok=True)


def _is_complete(db: sqlite3.Connection) -> bool:
    return bool(db.execute("PRAGMA user_version").fetchone() == (FORMAT,))


def _create_tables(db: sqlite3.Connection) -> None:
    try:
        for statement in _SCHEMA.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {FORMAT}")
    except sqlite3.OperationalError as error:
        if "fts5" not in str(error):
            raise
        raise RegistryError(
            f"this Python's SQLite {sqlite3.sqlite_version} was built without FTS5",
            expected="SQLite with FTS5, as in Python from python.org, conda or Debian",
            hint="use another Python; publish, pull and load work without it, searches do not",
        ) from error


def _labels(entry: Entry, newest: bool) -> Iterator[str]:
    """Yield the labels of a version."""
    yield "_version"
    if newest:
        yield "_newest"
    yield _label("backbone", entry.backbone)
    yield _label("fingerprint", entry.fingerprint)
    if entry.task is not None:
        yield _label("task", entry.task)
    for kind, values in (
        ("method", entry.methods),
        ("tag", (*entry.tags, *entry.topics)),
        ("metric", entry.metrics),
    ):
        yield from (_label(kind, value) for value in values)


def _required_labels(query: Query) -> Iterator[str]:
    """Yield the labels that a query requires."""
    yield "_version" if query.all_versions else "_newest"
    if query.backbone is not None:
        kind = "fingerprint" if is_fingerprint(query.backbone) else "backbone"
        yield _label(kind, query.backbone)
    for kind, value in (
        ("task", query.task),
        ("method", query.method),
        ("metric", query.metric),
        ("metric", None if query.sort in SORTS else query.sort),
        *(("tag", tag) for tag in query.tags),
    ):
        if value is not None:
            yield _label(kind, value)


def _label(kind: str, value: str) -> str:
    """Encode a value as a token; the underscore keeps it apart from words and their prefixes."""
    return f"_{kind}_{value.encode('utf-8', 'surrogatepass').hex()}"


def entries_from_json(text: str) -> list[Entry]:
    """Parse a JSON list of entries, each written by `json.dumps(asdict(entry))`."""
    entries = json.loads(text)
    for fields in entries:
        for name in ("methods", "tags", "language", "topics"):
            fields[name] = tuple(fields[name])
    return [Entry(**fields) for fields in entries]
