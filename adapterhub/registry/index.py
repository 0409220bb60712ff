"""The index of a local registry: an SQLite file that answers searches, built from the folders.

It holds nothing that the folders do not, so it may be deleted at any time. A name's folder is
indexed as a whole, together with its stamp; another stamp later means that the folder has changed.

Each version that is not yanked is a row of `versions`. Its tokens are its labels, such as
`_task_<hex>`, and the words of its text. The full-text index `texts` finds the versions that have
all labels and word prefixes of a query. If they are few, they are sorted; if they are many,
versions are scanned in the query's order, and their tokens compared, until its limit is reached.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

from adapterhub.errors import RegistryError
from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.registry.store import Entry, Query, is_fingerprint, words_in

FORMAT = 3  # to be changed with the tables and with the fields of an entry
# The ascii tokenizer splits at spaces only: tokens consist of letters, digits and underscores.
_SCHEMA = """
    CREATE TABLE IF NOT EXISTS folders (path TEXT PRIMARY KEY, stamp TEXT) WITHOUT ROWID;
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

Folder = tuple[str, str, Sequence[tuple[Entry, str]]]
"""A name's folder: its path, its stamp, and its versions, oldest first, each with its text."""


class Index:
    """An open index file: `with open_index(path) as index`. Processes may share the file."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def stamps(self) -> dict[str, str]:
        """Return the stamp of each folder when it was indexed."""
        return dict(self.db.execute("SELECT path, stamp FROM folders WHERE path != ''"))

    def registry_stamp(self) -> str | None:
        """Return the stamp of the registry at the last update."""
        row = self.db.execute("SELECT stamp FROM folders WHERE path = ''").fetchone()
        return row[0] if row else None

    def count(self) -> int:
        """Count the indexed folders."""
        (count,) = self.db.execute("SELECT count(*) FROM folders WHERE path != ''").fetchone()
        return int(count)

    def has_more_than(self, number: int) -> bool:
        """Return whether more folders are indexed, without counting all of them."""
        sql = "SELECT 1 FROM folders WHERE path != '' LIMIT 1 OFFSET ?"
        return self.db.execute(sql, (number,)).fetchone() is not None

    def update(
        self, folders: Iterable[Folder], removed: Iterable[str], registry_stamp: str
    ) -> None:
        """Index new and changed folders, and remove deleted ones, in one transaction.

        Args:
            folders: the folders to index.
            removed: the paths of the folders to remove.
            registry_stamp: the stamp of the registry before the folders were read.
        """
        with self.db as db:
            db.execute("BEGIN IMMEDIATE")  # one writer at a time, from the first read on
            for path in removed:
                self._remove(path)
            for path, stamp, versions in folders:
                self._remove(path)
                db.execute("INSERT INTO folders VALUES (?, ?)", (path, stamp))
                available = [version for version in versions if version[0].yanked is None]
                for entry, text in available:
                    self._insert(path, entry, text, newest=entry is available[-1][0])
            db.execute("INSERT OR REPLACE INTO folders VALUES ('', ?)", (registry_stamp,))

    def search(self, query: Query) -> list[Entry]:
        """Return the versions that match a query, in its order."""
        labels, prefixes = list(_required_labels(query)), sorted(words_in(query.text))
        terms = [f'"{label}"' for label in labels] + [self._term(prefix) for prefix in prefixes]
        parts = [f" {label} " for label in labels] + [f" {prefix}" for prefix in prefixes]
        values = {
            "match": " AND ".join(terms),
            "tokens": json.dumps(parts),
            "field": _field(query.sort),
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

    def _insert(self, path: str, entry: Entry, text: str, *, newest: bool) -> None:
        words = words_in(text)
        tokens = f" {' '.join((*_labels(entry, newest), *words))} "
        sql = "INSERT INTO versions (path, entry, tokens) VALUES (?, ?, ?)"
        row = self.db.execute(sql, (path, json.dumps(asdict(entry)), tokens)).lastrowid
        self.db.executemany("INSERT OR IGNORE INTO words VALUES (?)", ((w,) for w in words))
        self.db.execute("INSERT INTO texts (rowid, tokens) VALUES (?, ?)", (row, tokens))
        keys = {"name": entry.name, "size": entry.size} | {
            _field(metric): value if metric in LOWER_IS_BETTER else -value
            for metric, value in entry.metrics.items()
        }
        orders = [(field, value, row) for field, value in keys.items()]
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
def open_index(path: Path) -> Iterator[Index]:
    """Open the index in a file, and create it if it does not exist.

    Raises:
        RegistryError: this Python's SQLite has no full-text index.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=30)) as db:
        if db.execute("PRAGMA user_version").fetchone() != (FORMAT,):
            _create_tables(db)
        yield Index(db)


def remove_index(path: Path) -> None:
    """Delete an index file and its journal."""
    for file in (path, path.with_name(f"{path.name}-journal")):
        file.unlink(missing_ok=True)


def _create_tables(db: sqlite3.Connection) -> None:
    try:
        db.executescript(f"BEGIN EXCLUSIVE; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
    except sqlite3.OperationalError as error:
        if "fts5" not in str(error):
            raise
        raise RegistryError(
            f"this Python's SQLite {sqlite3.sqlite_version} was built without FTS5",
            expected="SQLite with FTS5, as in Python from python.org, conda or Debian",
            hint="use another Python; publish, pull and load work without it, searches do not",
        ) from error


def _field(sort: str) -> str:
    """Return the field of `orders` that a query sorts by."""
    return sort if sort in ("name", "size") else f"metric {sort}"


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
        ("metric", None if query.sort in ("name", "size") else query.sort),
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
