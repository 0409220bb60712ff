"""The full-text index of listings: what both kinds of databases need other words for.

SQLite has FTS5, PostgreSQL a GIN index of a `tsvector`. Both hold the tokens of `listings.tokens`,
and find them whole or by how they begin.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate

from sqlalchemy import Connection, text

_MOST_WORDS = 64  # that a prefix is expanded to
_LONGEST, _MOST_BYTES = 500, 900_000  # characters of a term, bytes of all: a tsvector has limits
_LAST = "\U0010ffff"
_REST = "l.type = :type AND {seen} ORDER BY {order}, l.repository LIMIT :limit OFFSET :offset"


@dataclass(frozen=True)
class FullText:
    """The index of one kind of database, in its SQL.

    Attributes:
        created: statements that create it.
        add: adds a repository with its `:tokens`, or with these as a list of `:terms`.
        remove: removes them.
        matches: the condition of rows that match `:match`.
        join: from these to their listings.
        holds: the condition of a listing that has all of `:tokens`, without the index.
        quote: around a token of `:match`.
        begins: after a token, of which only the beginning is given.
        both: between what both must hold.
        either: between what one must hold.
        shortens: whether tokens are as `_terms` returns them.
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
        """Index a repository; its words are those that a prefix is expanded to."""
        found = [*dict.fromkeys(tokens.split())]
        values = {"repository": repository, "tokens": tokens, "terms": _terms(found)}
        given = {name: value for name, value in values.items() if f":{name}" in self.add}
        connection.execute(text(self.add), given)
        words = [{"word": word} for word in found if word[0] != "_" and len(word) <= _LONGEST]
        if words:
            statement = "INSERT INTO listing_words VALUES (:word) ON CONFLICT DO NOTHING"
            connection.execute(text(statement), words)

    def erase(self, connection: Connection, repository: int, tokens: str) -> None:
        """Remove a repository from the index, which has these tokens there."""
        values = {"repository": repository, "tokens": tokens}
        given = {name: value for name, value in values.items() if f":{name}" in self.remove}
        connection.execute(text(self.remove), given)

    def match(self, connection: Connection, labels: Iterable[str], prefixes: Iterable[str]) -> str:
        """Return what finds rows with all of these labels and words that begin so."""
        terms = [self._quoted(label) for label in labels]
        return self.both.join([*terms, *(self._word(connection, p) for p in prefixes)])

    def count(self, connection: Connection, match: str, most: int) -> int:
        """Return how many rows match, or `most` if they are more."""
        statement = f"SELECT count(*) FROM (SELECT 1 FROM listing_texts t WHERE {self.matches} "
        found = connection.execute(
            text(f"{statement} LIMIT :most) AS found"), {"match": match, "most": most}
        )
        return int(found.scalar_one())

    def search(self, seen: str, order: str, *, sorts: bool) -> str:
        """Return a search that sorts what matches, or one that reads all rows in their order.

        Args:
            seen: the condition of rows that may be seen.
            order: the column that they are ordered by.
            sorts: whether few rows match.
        """
        start = (
            f"SELECT l.* FROM listing_texts t {self.join} WHERE {self.matches}"
            if sorts
            else f"SELECT l.* FROM listings l WHERE {self.holds}"
        )
        return f"{start} AND {_REST.format(seen=seen, order=order)}"

    def _word(self, connection: Connection, prefix: str) -> str:
        """Return what finds a prefix: the words that have it, unless they are many."""
        chosen = "SELECT word FROM listing_words WHERE word >= :first AND word < :last LIMIT :most"
        values = {"first": prefix, "last": prefix + _LAST, "most": _MOST_WORDS + 1}
        rows = connection.execute(text(chosen), values).all()
        if 0 < len(rows) <= _MOST_WORDS:
            return f"({self.either.join(self._quoted(row.word) for row in rows)})"
        return f"{self._quoted(prefix)}{self.begins}"

    def _quoted(self, token: str) -> str:
        return f"{self.quote}{_terms([token])[0] if self.shortens else token}{self.quote}"


def _terms(tokens: Iterable[str]) -> list[str]:
    """Return tokens as a tsvector can have them: long ones by their digest, and not too many."""
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
    """Return the index of the database that a connection is to."""
    return POSTGRES if connection.dialect.name == "postgresql" else SQLITE
