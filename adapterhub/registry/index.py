"""The index of a local registry: an SQLite file that answers searches, made from the folders.

It holds nothing that the folders do not say, so it may be deleted or rebuilt at any time. What a
name's folder says is entered as a whole, under a stamp of that folder; another stamp later means
that the folder changed behind the index.

A version gets a number, and for each backbone, task, method, tag, metric and word of text there is
the set of the versions that have it. A search intersects sets. Where few are left they are sorted;
where many are left, versions are taken in the order that is asked for until the limit. Only what is
shown is read, whatever a query asks for. A version that is replaced leaves the sets of what can be
found, and its number is never used again.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

from adapterhub.files.manifest import LOWER_IS_BETTER
from adapterhub.registry.bitmaps import SCHEMA, Bitmaps, Key, members
from adapterhub.registry.store import Entry, Query, is_fingerprint, words_in

FORMAT = 2  # another one where the tables differ, or the fields of an entry
_SCHEMA = f"""
    CREATE TABLE IF NOT EXISTS folders (path TEXT PRIMARY KEY, stamp TEXT) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS versions (
        id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT, entry TEXT);
    CREATE INDEX IF NOT EXISTS by_path ON versions (path);
    CREATE TABLE IF NOT EXISTS orders (
        field TEXT, value, id INTEGER, PRIMARY KEY (field, value, id)) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS orders_by_version ON orders (id);
    CREATE INDEX IF NOT EXISTS orders_by_field ON orders (field, id, value);
    {SCHEMA}
"""
_NEWEST: Key = ("state", "newest")
_STANDING: Key = ("state", "standing")
# So many are sorted; of more, hits are frequent in the order of a field.
_FEW = 1_000
_BATCH = 2_048


Folder = tuple[str, str, Sequence[tuple[Entry, str]]]
"""The path of a name's folder, its stamp, and its versions, oldest first, each with its text."""


class Index:
    """An open index file: `with open_index(path) as index`. Processes may share the file."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self.sets = Bitmaps(db)

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
        self, entered: Iterable[Folder], removed: Iterable[str], registry_stamp: str
    ) -> None:
        """Index folders again, and remove others from the index.

        Args:
            entered: the folders to index.
            removed: the paths of the folders to remove.
            registry_stamp: the stamp of the registry before the folders were read.
        """
        with self.db as db:
            for path in removed:
                self._forget(path)
            found: dict[Key, list[int]] = defaultdict(list)
            for path, stamp, versions in entered:
                self._forget(path)
                db.execute("INSERT INTO folders VALUES (?, ?)", (path, stamp))
                standing = [entry.version for entry, _ in versions if entry.yanked is None]
                for entry, text in versions:
                    number = self._insert(path, entry)
                    for key in _keys(entry, text, newest=entry.version in standing[-1:]):
                        found[key].append(number)
                    if number % _BATCH == 0:
                        self.sets.add(found)
                        found.clear()
            self.sets.add(found)
            db.execute("INSERT OR REPLACE INTO folders VALUES ('', ?)", (registry_stamp,))

    def search(self, query: Query) -> list[Entry]:
        """Return the versions that match a query, in its order."""
        found = self.sets.of(*(_STANDING if query.all_versions else _NEWEST))
        for kind, word in _wanted(query):
            found &= self.sets.of(kind, word)
        for word in words_in(query.text):
            found &= self.sets.starting("text", word)
        first = self._sorted if found.bit_count() <= _FEW else self._walked
        return self._entries(list(first(found, query)))

    def _sorted(self, found: int, query: Query) -> Iterator[int]:
        """Yield the first members of a set in the order of a query, by sorting the set."""
        field, order = _field(query.sort)
        sql = f"""SELECT o.id FROM json_each(?) m CROSS JOIN orders o
            ON o.field = ? AND o.id = m.value ORDER BY o.value {order}, o.id LIMIT ?"""
        numbers = json.dumps(list(members(found)))
        yield from (number for (number,) in self.db.execute(sql, (numbers, field, query.limit)))

    def _walked(self, found: int, query: Query) -> Iterator[int]:
        """Yield the first members of a set in the order of a query, by scanning all versions."""
        field, order = _field(query.sort)
        bits = found.to_bytes(found.bit_length() // 8 + 1, "little")
        sql = f"SELECT id FROM orders WHERE field = ? ORDER BY value {order}, id"
        hits = (
            number
            for (number,) in self.db.execute(sql, (field,))
            if number >> 3 < len(bits) and bits[number >> 3] >> (number & 7) & 1
        )
        yield from itertools.islice(hits, query.limit)

    def _entries(self, numbers: list[int]) -> list[Entry]:
        sql = """SELECT v.entry FROM json_each(?) m CROSS JOIN versions v
            ON v.id = m.value ORDER BY m.key"""
        texts = (text for (text,) in self.db.execute(sql, (json.dumps(numbers),)))
        return entries_from_json(f"[{','.join(texts)}]")

    def _insert(self, path: str, entry: Entry) -> int:
        sql = "INSERT INTO versions (path, entry) VALUES (?, ?)"
        number = self.db.execute(sql, (path, json.dumps(asdict(entry)))).lastrowid or 0
        fields = {"name": entry.name, "size": entry.size}
        fields |= {_field(name)[0]: value for name, value in entry.metrics.items()}
        rows = ((field, value, number) for field, value in fields.items())
        self.db.executemany("INSERT INTO orders VALUES (?, ?, ?)", rows)
        return number

    def _forget(self, path: str) -> None:
        sql = "SELECT id FROM versions WHERE path = ?"
        numbers = [number for (number,) in self.db.execute(sql, (path,))]
        for key in (_NEWEST, _STANDING):
            self.sets.remove(key, numbers)
        for number in numbers:
            self.db.execute("DELETE FROM orders WHERE id = ?", (number,))
        self.db.execute("DELETE FROM versions WHERE path = ?", (path,))
        self.db.execute("DELETE FROM folders WHERE path = ?", (path,))


@contextmanager
def open_index(path: Path) -> Iterator[Index]:
    """Open the index in a file, and create it if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=30)) as db:
        if db.execute("PRAGMA user_version").fetchone() != (FORMAT,):
            db.executescript(f"BEGIN EXCLUSIVE; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
        yield Index(db)


def _field(sort: str) -> tuple[str, str]:
    """Return the field that a query sorts by, as in `orders`, and the direction."""
    if sort in ("name", "size"):
        return sort, "ASC"
    return f"metric {sort}", "ASC" if sort in LOWER_IS_BETTER else "DESC"


def _keys(entry: Entry, text: str, newest: bool) -> Iterator[Key]:
    """Yield the sets that a version belongs to."""
    if newest:
        yield _NEWEST
    if entry.yanked is None:
        yield _STANDING
    yield from (("backbone", entry.backbone), ("fingerprint", entry.fingerprint))
    yield ("task", entry.task or "")
    for kind, words in (
        ("method", entry.methods), ("tag", (*entry.tags, *entry.topics)), ("metric", entry.metrics),
        ("text", words_in(text)),
    ):  # fmt: skip
        yield from ((kind, word) for word in dict.fromkeys(words))


def _wanted(query: Query) -> Iterator[Key]:
    """Yield the sets that a version must belong to."""
    if query.backbone is not None:
        yield "fingerprint" if is_fingerprint(query.backbone) else "backbone", query.backbone
    metric = None if query.sort in ("name", "size") else query.sort
    one = (("task", query.task), ("method", query.method), ("metric", query.metric))
    for kind, word in (*one, ("metric", metric), *(("tag", tag) for tag in query.tags)):
        if word is not None:
            yield kind, word


def entries_from_json(text: str) -> list[Entry]:
    """Parse a JSON list of entries, each written by `json.dumps(asdict(entry))`."""
    found = json.loads(text)
    for fields in found:
        for name in ("methods", "tags", "language", "topics"):
            fields[name] = tuple(fields[name])
    return [Entry(**fields) for fields in found]
