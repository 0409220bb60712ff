"""The schema: every table of a hub, and nothing that reads or writes them.

A namespace is a user or an organisation and has repositories. A repository has commits, each with a
tree of files, and refs to them. A file is a blob; a repository may only name blobs that it was
granted. Versions, listings and facets are derived from the commits that tags and `main` name, for
searches and pages.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.types import TypeEngine

SCHEMA_REVISION = "0002"
"""The newest of `migrations/versions`: what these tables are."""

metadata = MetaData()


def _words(length: int) -> TypeEngine[str]:
    """Return the type of a text, which every database orders by its characters."""
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
    found = max(int(kept or 0), connection.scalar(select(func.max(table.c.id))) or 0) + 1
    if kept is None:
        connection.execute(insert(settings).values(key=own, value=str(found)))
    else:
        connection.execute(update(settings).where(settings.c.key == own).values(value=str(found)))
    return found


def _own_id() -> Column[int]:
    return Column("id", Integer, primary_key=True, default=_next_id)


namespaces = Table(
    "namespaces",
    metadata,
    _own_id(),
    Column("name", _words(96), nullable=False),
    Column("folded", _words(96), nullable=False, unique=True),  # two may not differ by case alone
    Column("kind", _words(8), nullable=False),  # user, org, or mirror
    Column("is_admin", Boolean, nullable=False, default=False),  # a user who may change everything
    Column("rules", Text, nullable=False, default="{}"),  # see accepted.py
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
    _owned_by("scope", "namespaces.id"),  # the only namespace that it is for
    Column("created", _words(20), nullable=False),
    Column("expires", _words(20)),
    Column("used", _words(20)),
)

sessions = Table(
    "sessions",
    metadata,
    Column("sha256", _words(64), primary_key=True),  # of the cookie
    _owned_by("token", "tokens.id", nullable=False, index=True),  # with which it was begun
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
    Column("highest", Integer, nullable=False, default=0),  # of all versions there ever were
    UniqueConstraint("type", "folded"),
)

retired = Table(
    "retired",
    metadata,
    Column("type", _words(8), primary_key=True),
    Column("folded", _words(200), primary_key=True),
    Column("highest", Integer, nullable=False),  # of the versions of a repository that is gone
)

renamed = Table(
    "renamed",
    metadata,
    Column("type", _words(8), primary_key=True),
    Column("folded", _words(200), primary_key=True),  # a name that the repository had
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
    "promises",  # room that is kept for uploads
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
    Column("digest", _words(64), nullable=False),  # "" where it has no manifest of ours
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
    Column("about", Text, nullable=False),  # see described.py
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
    Column("token", _words(96), nullable=False),  # its name
    Column("action", _words(40), nullable=False),
    Column("target", _words(300), nullable=False),
    Column("address", _words(64), nullable=False),
)
