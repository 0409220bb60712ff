"""The index of a local registry: an SQLite file that answers searches, made from the folders.

It holds nothing that the folders do not say, so it may be deleted or rebuilt at any time. What a
name's folder says is entered as a whole, under a stamp of that folder; another stamp later means
that the folder changed behind the index.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.registry.store import Entry, Query, is_fingerprint

# Of another format, a file is another one: its name holds the number.
_FORMAT = 1
_SCHEMA = """
    CREATE TABLE IF NOT EXISTS folders (path TEXT PRIMARY KEY, stamp TEXT) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS versions (
        id INTEGER PRIMARY KEY, path TEXT, name TEXT, backbone TEXT, fingerprint TEXT, task TEXT,
        size INTEGER, newest INTEGER, yanked INTEGER, entry TEXT);
    CREATE INDEX IF NOT EXISTS by_path ON versions (path);
    CREATE INDEX IF NOT EXISTS by_name ON versions (newest, name);
    CREATE INDEX IF NOT EXISTS by_size ON versions (newest, size);
    CREATE INDEX IF NOT EXISTS by_backbone ON versions (backbone, newest, name);
    CREATE INDEX IF NOT EXISTS by_fingerprint ON versions (fingerprint, newest, name);
    CREATE INDEX IF NOT EXISTS by_task ON versions (task, newest, name);
    CREATE TABLE IF NOT EXISTS metrics (
        metric TEXT, value REAL, id INTEGER, PRIMARY KEY (metric, value, id)) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS by_version ON metrics (id);
    CREATE TABLE IF NOT EXISTS words (
        kind TEXT, word TEXT, id INTEGER, PRIMARY KEY (kind, word, id)) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS words_by_version ON words (id);
    CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5 (text, prefix='2 3 4');
"""


Folder = tuple[str, str, Sequence[tuple[Entry, str]]]
"""The path of a name's folder, its stamp, and its versions, oldest first, each with its text."""


class Index:
    """The index in one file, open: `with opened(path) as index`. Processes may share the file."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def stamps(self) -> dict[str, str]:
        """The stamp of each folder as it was when it was entered."""
        return dict(self.db.execute("SELECT path, stamp FROM folders WHERE path != ''"))

    def whole(self) -> str | None:
        """The stamp of the whole registry as it was at the last update."""
        row = self.db.execute("SELECT stamp FROM folders WHERE path = ''").fetchone()
        return row[0] if row else None

    def count(self) -> int:
        """The number of folders in it."""
        (count,) = self.db.execute("SELECT count(*) FROM folders WHERE path != ''").fetchone()
        return int(count)

    def update(self, entered: Iterable[Folder], gone: Iterable[str], whole: str) -> None:
        """Replace what is known of some folders, and drop what is known of others."""
        with self.db as db:
            for path in gone:
                _forget(db, path)
            for path, stamp, versions in entered:
                _forget(db, path)
                db.execute("INSERT INTO folders VALUES (?, ?)", (path, stamp))
                standing = [entry.version for entry, _ in versions if entry.yanked is None]
                for entry, text in versions:
                    _insert(db, path, entry, text, newest=entry.version in standing[-1:])
            db.execute("INSERT OR REPLACE INTO folders VALUES ('', ?)", (whole,))

    def search(self, query: Query) -> list[Entry]:
        """The versions that a query finds, in its order."""
        sql, values = _select(query)
        return [entry_from_json(text) for (text,) in self.db.execute(sql, values)]


@contextmanager
def opened(path: Path) -> Iterator[Index]:
    """The index in a file, made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=30)) as db:
        if db.execute("PRAGMA user_version").fetchone() != (_FORMAT,):
            db.executescript(f"BEGIN EXCLUSIVE; {_SCHEMA} PRAGMA user_version = {_FORMAT}; COMMIT;")
        yield Index(db)


def _forget(db: sqlite3.Connection, path: str) -> None:
    ids = "(SELECT id FROM versions WHERE path = ?)"
    db.execute(f"DELETE FROM texts WHERE rowid IN {ids}", (path,))
    for table in ("metrics", "words", "versions"):
        db.execute(f"DELETE FROM {table} WHERE id IN {ids}", (path,))
    db.execute("DELETE FROM folders WHERE path = ?", (path,))


def _insert(db: sqlite3.Connection, path: str, entry: Entry, text: str, newest: bool) -> None:
    columns = (
        path, entry.name, entry.backbone, entry.fingerprint, entry.task, entry.size, newest,
        entry.yanked is not None, json.dumps(asdict(entry)),
    )  # fmt: skip
    row = db.execute(f"INSERT INTO versions VALUES (NULL{', ?' * len(columns)})", columns).lastrowid
    db.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (row, text))
    values = ((name, value, row) for name, value in entry.metrics.items())
    db.executemany("INSERT OR IGNORE INTO metrics VALUES (?, ?, ?)", values)
    words = {("tag", tag) for tag in entry.tags} | {("method", name) for name in entry.methods}
    db.executemany("INSERT INTO words VALUES (?, ?, ?)", ((*pair, row) for pair in sorted(words)))


def _select(query: Query) -> tuple[str, list[Any]]:
    joins, order, values = _order(query)
    where = ["NOT v.yanked"] + ([] if query.all_versions else ["v.newest"])
    if query.backbone is not None:
        column = "fingerprint" if is_fingerprint(query.backbone) else "backbone"
        where.append(f"v.{column} = ?")
        values.append(query.backbone)
    if query.task is not None:
        where.append("v.task = ?")
        values.append(query.task)
    methods = [("method", query.method)] if query.method is not None else []
    for pair in (*methods, *(("tag", tag) for tag in query.tags)):
        where.append("EXISTS (SELECT 1 FROM words w WHERE (w.kind, w.word, w.id) = (?, ?, v.id))")
        values += pair
    if query.metric is not None and query.metric != query.sort:
        where.append("EXISTS (SELECT 1 FROM metrics m WHERE m.metric = ? AND m.id = v.id)")
        values.append(query.metric)
    if words := re.findall(r"\w+", query.text):
        where.append("v.id IN (SELECT rowid FROM texts WHERE texts MATCH ?)")
        values.append(" ".join(f'"{word}"*' for word in words))
    sql = f"SELECT v.entry FROM {joins} WHERE {' AND '.join(where)} ORDER BY {order} LIMIT ?"
    return sql, [*values, query.limit]


def _order(query: Query) -> tuple[str, str, list[Any]]:
    if query.sort in ("name", "size"):
        return "versions v", f"v.{query.sort}, v.name, v.id", []
    down = "" if query.sort in LOWER_IS_BETTER else " DESC"
    ranked = "metrics s CROSS JOIN versions v ON v.id = s.id AND s.metric = ?"
    return ranked, f"s.value{down}, s.id", [query.sort]


def entry_from_json(text: str) -> Entry:
    """The entry that `json.dumps(asdict(entry))` wrote."""
    fields = json.loads(text)
    for name in ("methods", "tags"):
        fields[name] = tuple(fields[name])
    return Entry(**fields)
