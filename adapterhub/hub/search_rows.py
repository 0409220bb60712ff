"""Search rows: one row per repository for lists and searches, updated with each change.

A row has tokens: labels, such as `_tag_<hex>`, and the words of its texts. A search requires all of
some labels and word prefixes. If few rows match, the full-text index finds them and they are
sorted. If many match, rows are read in the order of the search and their tokens compared until
enough match. Together both methods stay fast for a hundred thousand rows; neither does alone.

A repository is described by its card and by the tags that clients of the Hub search. Tools
overwrite cards, so the description of an adapter comes from its own files if they contain it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Integer, bindparam, delete, insert, select, text

from adapterhub.errors import AdapterhubError
from adapterhub.files import schema
from adapterhub.files.card import CARD_FILE, MAX_CARD_BYTES, parse_front_matter, split_card
from adapterhub.files.manifest import MAX_MANIFEST_BYTES, Manifest, from_json
from adapterhub.files.native import MANIFEST_FILE, SIGNATURE_FILE
from adapterhub.files.shown_table import ScoreError
from adapterhub.files.signature import MAX_SIGNATURE_BYTES, parse_signatures
from adapterhub.hub.commits import CommitRecord, Tree, branch_head, commit_at, read_tree
from adapterhub.hub.database import facet_counts, facets, full_text_of, listings
from adapterhub.hub.repositories import (
    HubRepository,
    HubVersion,
    ReadBlob,
    versions_of,
)
from adapterhub.pages.page import lower_is_better
from adapterhub.pages.versions import (
    FIELDS,
    ListedVersion,
    MainScore,
    PublishedVersion,
)
from adapterhub.registry.foreign import CONFIG_FILE, MAX_CONFIG_BYTES, entry_of_foreign
from adapterhub.registry.store import Entry, Reference, word_text
from adapterhub.registry.trust import CheckedSignature, Trust, checked_signatures, signed_subject
from adapterhub.registry.version_files import SIGNATURES_FOLDER, entry_of, entry_of_row, row_of
from adapterhub.web.errors import HubRefusal

ORDERS = {
    "name": "l.name",
    "newest": "l.modified DESC",
    "size": "l.size",
    "score": "l.score DESC NULLS LAST",
}
MOST_METADATA = 64 << 10
_MOST_TAGS, _MOST_TAG = 200, 200
_FEW = 4_096  # matches; sorting more is slower than reading rows in order
_MOST_TERMS = 32  # of a search
_MOST_CARD = 20_000  # characters of a card that a search covers


@dataclass(frozen=True)
class HubDescription:
    """The description of a commit.

    Attributes:
        card: the metadata of its card.
        tags: the tags that clients filter by.
        library: the library that loads it.
        pipeline: the Hub's name of its task.
        files: the paths of its files.
    """

    card: Mapping[str, Any]
    tags: tuple[str, ...]
    library: str | None
    pipeline: str | None
    files: tuple[str, ...]

    def text(self) -> str:
        """Format the description for the database."""
        return json.dumps(vars(self), ensure_ascii=False, default=str)


def parse_description(text: str) -> HubDescription:
    """Parse a description from the database."""
    fields: dict[str, Any] = json.loads(text)
    fields |= {name: tuple(fields[name]) for name in ("tags", "files")}
    return HubDescription(**fields)


def describe_tree(tree: Tree, read: ReadBlob) -> HubDescription:
    """Describe the files of a commit."""
    card = card_of(tree, read)
    config = _peft_config(tree, read)
    manifest = manifest_in(tree, read)
    library = _text(card.get("library_name"))
    if config and library in (None, "transformers"):
        library = "peft"
    elif library is None:
        library = "adapterhub" if manifest else "transformers" if "config.json" in tree else None
    pipeline = _text(card.get("pipeline_tag"))
    tags = dict.fromkeys(
        tag[:_MOST_TAG] for tag in _tags(card, config, manifest, tree, library, pipeline) if tag
    )
    return HubDescription(card, (*tags,)[:_MOST_TAGS], library, pipeline, (*sorted(tree),))


def card_of(tree: Tree, read: ReadBlob) -> dict[str, Any]:
    """Return the metadata of a commit's card; empty if it cannot be read."""
    blob = tree.get(CARD_FILE)
    if blob is None or blob.size > 2 * MAX_CARD_BYTES:
        return {}
    text = read(blob.sha256, 2 * MAX_CARD_BYTES).decode("utf-8", "replace")
    if front_matter_size(text) > MOST_METADATA:
        return {}
    metadata: dict[str, Any] = json.loads(json.dumps(split_card(text)[0], default=str))
    return metadata


def card_problem(card: str) -> str:
    """Return the problem with the metadata of a card, or ""."""
    size = front_matter_size(card)
    if size > MOST_METADATA:
        return f"the metadata has more than {MOST_METADATA:,} characters"
    try:
        parse_front_matter(card[4:size])
    except AdapterhubError as error:
        return error.problem
    return ""


def front_matter_size(card: str) -> int:
    """Return the approximate length of a card's metadata: parsing long ones takes seconds."""
    if not card.startswith("---"):
        return 0
    end = card.find("\n---", 3)
    return end if end >= 0 else 0


def manifest_in(tree: Tree, read: ReadBlob) -> Manifest | None:
    """Return the manifest of a commit; None if it has no manifest in our format."""
    blob = tree.get(MANIFEST_FILE)
    if blob is None or blob.size > MAX_MANIFEST_BYTES:
        return None
    try:
        return from_json(read(blob.sha256, MAX_MANIFEST_BYTES))
    except AdapterhubError:
        return None


def _peft_config(tree: Tree, read: ReadBlob) -> dict[str, Any]:
    blob = tree.get(CONFIG_FILE)
    if blob is None or blob.size > MAX_CONFIG_BYTES:
        return {}
    return schema.parse_object(read(blob.sha256, MAX_CONFIG_BYTES), MAX_CONFIG_BYTES)[0]


def _tags(
    card: Mapping[str, Any],
    config: Mapping[str, Any],
    manifest: Manifest | None,
    tree: Tree,
    library: str | None,
    pipeline: str | None,
) -> Iterator[str]:
    if manifest is not None:
        yield "adapterhub"
    yield from filter(None, (library, pipeline))
    if any(path.endswith(".safetensors") for path in tree):
        yield "safetensors"
    if method := _text(config.get("peft_type")):
        yield method.lower()
    if manifest is not None:
        yield from (method for spec in manifest.methods for method in spec)
    yield from _texts(card.get("tags"))
    yield from _texts(card.get("language"))
    yield from (f"dataset:{name}" for name in _texts(card.get("datasets")))
    yield from (f"license:{name}" for name in _texts(card.get("license")))
    is_adapter = bool(config) or manifest is not None
    for name in dict.fromkeys(_backbones(card, config, manifest)):
        yield f"base_model:{name}"
        relation = card.get("base_model_relation") or ("adapter" if is_adapter else None)
        if isinstance(relation, str):
            yield f"base_model:{relation}:{name}"


def _backbones(
    card: Mapping[str, Any], config: Mapping[str, Any], manifest: Manifest | None
) -> Iterator[str]:
    yield from _texts(card.get("base_model"))
    named = config.get("base_model_name_or_path")
    if isinstance(named, str) and named.count("/") <= 1:
        yield named
    if manifest is not None and "/" in manifest.backbone.id:
        yield manifest.backbone.id


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


@dataclass(frozen=True)
class HubQuery:
    """The conditions of a search, its order and its page.

    Attributes:
        type: the type of repositories.
        labels: required labels, as (kind, value).
        text: word prefixes.
        order: a key of `ORDERS`.
        namespaces: the namespaces whose private repositories are visible; None for all.
        scope: the only namespace whose repositories are visible; None for all.
        limit: the number of rows.
        offset: the number of rows to skip.
    """

    type: str = "models"
    labels: Sequence[tuple[str, str]] = ()
    text: str = ""
    order: str = "newest"
    namespaces: Sequence[int] | None = ()
    scope: int | None = None
    limit: int = 50
    offset: int = 0


@dataclass(frozen=True)
class HubListing:
    """A search row: a repository with the values that lists show."""

    repository: int
    name: str
    is_private: bool
    modified: str
    head: str
    about: HubDescription
    listed: ListedVersion | None = field(compare=False)


def search_listings(connection: Connection, query: HubQuery) -> list[HubListing]:
    """Return the repositories that match a query, in its order.

    Raises:
        HubRefusal: the query has too many words.
    """
    index = full_text_of(connection)
    prefixes = word_text([query.text]).split()
    labels = [_label(kind, value) for kind, value in query.labels]
    if len(prefixes) + len(labels) > _MOST_TERMS:
        raise HubRefusal(f"a search has at most {_MOST_TERMS} words and filters")
    match = index.match(connection, labels, prefixes)
    parts = [f" {label} " for label in labels] + [f" {prefix}" for prefix in prefixes]
    is_few = bool(match) and index.count(connection, match, _FEW) < _FEW
    values: dict[str, Any] = {"type": query.type, "limit": query.limit, "offset": query.offset}
    values |= {"match": match} if is_few else {"tokens": json.dumps(parts)}
    seen = "TRUE"
    if query.namespaces is not None:
        seen, values["seen"] = "(NOT l.is_private OR l.namespace IN :seen)", [*query.namespaces]
    if query.scope is not None:
        seen, values["scope"] = f"({seen} AND l.namespace = :scope)", query.scope
    statement = text(index.search(seen, ORDERS[query.order], sorts=is_few))
    if query.namespaces is not None:
        statement = statement.bindparams(bindparam("seen", type_=Integer, expanding=True))
    return [_listing(row) for row in connection.execute(statement, values)]


def listing_of(connection: Connection, repository: int) -> HubListing | None:
    """Return the row of a repository; None before its first commit."""
    row = connection.execute(select(listings).where(listings.c.repository == repository)).first()
    return _listing(row) if row else None


def values_of_facets(connection: Connection, most: int) -> dict[str, list[tuple[str, int]]]:
    """Return the most frequent values of each field among public repositories."""
    facets: dict[str, list[tuple[str, int]]] = {}
    for name in FIELDS:
        rows = connection.execute(
            select(facet_counts.c.value, facet_counts.c.number)
            .where(facet_counts.c.field == name)
            .order_by(facet_counts.c.number.desc(), facet_counts.c.value)
            .limit(most)
        )
        facets[name] = [(row.value, row.number) for row in rows]
    return facets


def refresh_listing(connection: Connection, repository: HubRepository, read: ReadBlob) -> None:
    """Update the row of a repository; call it inside the transaction of its change."""
    remove_listing(connection, repository.id)
    head = branch_head(connection, repository.id)
    if head is None:
        return
    tree = read_tree(connection, head.tree)
    about, listed = describe_tree(tree, read), None
    if repository.type == "models":
        listed = current_version(connection, repository, head, tree, read)
    row = {
        "repository": repository.id,
        "type": repository.type,
        "name": repository.name,
        "namespace": repository.namespace,
        "is_private": repository.is_private,
        "modified": head.created,
        "size": listed.entry.size if listed else sum(blob.size for blob in tree.values()),
        "score": _order_of(listed.score) if listed and listed.score else None,
        "head": head.oid,
        "about": about.text(),
        "entry": _listed_text(listed) if listed else None,
        "tokens": _tokens(repository, about, listed, tree, read),
    }
    connection.execute(insert(listings).values(**row))
    full_text_of(connection).write(connection, repository.id, str(row["tokens"]))
    if listed is not None and not repository.is_private:
        _add_facets(connection, repository.id, listed)


def current_version(
    connection: Connection,
    repository: HubRepository,
    head: CommitRecord,
    tree: Tree,
    read: ReadBlob,
) -> ListedVersion | None:
    """Return the version that lists show: the newest that is not yanked, or else the head."""
    numbered = [v for v in versions_of(connection, repository.id, read) if v.yanked is None]
    if numbered:
        newest = numbered[-1]
        commit = commit_at(connection, repository.id, newest.commit)
        shown = shown_version(
            repository, newest, commit, read_tree(connection, commit.tree), tree, read
        )
    else:
        shown = shown_version(repository, None, head, tree, tree, read)
    if shown is None:
        return None
    if isinstance(shown, Entry):
        return ListedVersion(shown, None, (), True)
    return ListedVersion(shown.entry, shown.score, shown.signers, True)


def shown_version(
    repository: HubRepository,
    version: HubVersion | None,
    commit: CommitRecord,
    tree: Tree,
    head: Tree,
    read: ReadBlob,
) -> PublishedVersion | Entry | None:
    """Return a version for its page; only an entry for an adapter of another library."""
    name, number = repository.name, version.name if version else commit.oid
    place: dict[str, Any] = {"reference": f"{name}@{number}", "name": name, "version": number}
    try:
        if MANIFEST_FILE in tree:
            data = read(tree[MANIFEST_FILE].sha256, MAX_MANIFEST_BYTES)
            manifest = from_json(data)
            entry = entry_of(
                data,
                manifest,
                **place,
                tags=version.tags if version else (),
                yanked=version.yanked if version else None,
                published=f"{commit.created[:19]}Z",
            )
            card = tree.get(CARD_FILE)
            words = read(card.sha256, MAX_CARD_BYTES).decode("utf-8", "replace") if card else ""
            signatures, unchecked = _signatures(entry, tree, head, read)
            return PublishedVersion(entry, manifest, words, signatures, unchecked, len(data))
        if CONFIG_FILE in tree:
            data = read(tree[CONFIG_FILE].sha256, MAX_CONFIG_BYTES)
            return entry_of_foreign(data, **place)
    except AdapterhubError:
        return None
    return None


def _signatures(
    entry: Entry, tree: Tree, head: Tree, read: ReadBlob
) -> tuple[tuple[CheckedSignature, ...], str]:
    places = (tree.get(SIGNATURE_FILE), head.get(f"{SIGNATURES_FOLDER}/{entry.version}.sig"))
    if places == (None, None):
        return (), ""
    subject = signed_subject(
        Reference("server", entry.name, entry.version), entry.digest, entry.name, entry.version
    )
    try:
        signatures = [
            signature
            for blob in places
            if blob is not None
            for signature in parse_signatures(read(blob.sha256, MAX_SIGNATURE_BYTES))
            if signature.statement.digest == entry.digest
        ]
        return tuple(checked_signatures(signatures, subject, Trust())), ""
    except AdapterhubError as error:
        return (), error.problem


def remove_listing(connection: Connection, repository: int) -> None:
    """Remove the row of a repository, with its texts and counts."""
    old = connection.execute(
        select(listings.c.tokens).where(listings.c.repository == repository)
    ).first()
    if old is None:
        return
    own = facets.c.repository == repository
    rows = connection.execute(select(facets.c.field, facets.c.value).where(own)).mappings().all()
    if rows:
        _count_facets(connection, [{**row} for row in rows], -1)
        connection.execute(delete(facets).where(own))
    full_text_of(connection).erase(connection, repository, old.tokens)
    connection.execute(delete(listings).where(listings.c.repository == repository))


def _add_facets(connection: Connection, repository: int, listed: ListedVersion) -> None:
    pairs = {
        (name, str(value)[:300]) for name, (_, read) in FIELDS.items() for value in read(listed)
    }
    if pairs:
        rows = [{"field": name, "value": value} for name, value in sorted(pairs)]
        connection.execute(insert(facets), [{**row, "repository": repository} for row in rows])
        _count_facets(connection, rows, 1)


def _count_facets(connection: Connection, rows: Sequence[Mapping[str, str]], change: int) -> None:
    """Increment or decrement the counts of field values."""
    connection.execute(
        text(
            "INSERT INTO facet_counts VALUES (:field, :value, :change) ON CONFLICT (field, value)"
            " DO UPDATE SET number = facet_counts.number + :change"
        ),
        [{**row, "change": change} for row in rows],
    )
    if change < 0:
        connection.execute(delete(facet_counts).where(facet_counts.c.number <= 0))


def _tokens(
    repository: HubRepository,
    about: HubDescription,
    listed: ListedVersion | None,
    tree: Tree,
    read: ReadBlob,
) -> str:
    labels = [_label("author", repository.name.partition("/")[0])]
    labels += [_label("tag", tag) for tag in about.tags]
    words: list[str] = [repository.name, *about.tags, str(about.card.get("description", ""))]
    if about.pipeline:
        labels.append(_label("pipeline", about.pipeline))
    if listed is not None:
        labels.append(_label("adapter", "yes"))
        words += listed.entry.words
        for name, (_, values) in FIELDS.items():
            labels += [_label(name, str(value)[:300]) for value in values(listed)]
    if CARD_FILE in tree:
        card = read(tree[CARD_FILE].sha256, MAX_CARD_BYTES).decode("utf-8", "replace")
        words.append(card[:_MOST_CARD])
    return f" {' '.join(dict.fromkeys(labels))}{word_text(words)} "


def _label(kind: str, value: str) -> str:
    """Encode a value as a token; the underscore keeps it apart from words and their prefixes."""
    return f"_{kind}_{value.encode('utf-8', 'surrogatepass').hex()}"


def _order_of(score: MainScore) -> float:
    return -score.value if lower_is_better(score.metric) else score.value


def _listed_text(listed: ListedVersion) -> str:
    entry, score = listed.entry, listed.score
    return json.dumps(
        {
            "name": entry.name,
            "version": entry.version,
            "row": row_of(entry),
            "score": None if score is None else [score.metric, score.value],
            "error": vars(score.error) if score and score.error else None,
            "signers": listed.signers,
        }
    )


def _listing(row: Any) -> HubListing:
    return HubListing(
        row.repository,
        row.name,
        bool(row.is_private),
        row.modified,
        row.head,
        parse_description(row.about),
        _listed(row.entry) if row.entry else None,
    )


def _listed(written: str) -> ListedVersion:
    fields: Mapping[str, Any] = json.loads(written)
    score = None
    if fields["score"]:
        error = ScoreError(**fields["error"]) if fields["error"] else None
        metric, value = fields["score"]
        score = MainScore(metric, value, error)
    entry = entry_of_row(fields["name"], fields["version"], fields["row"])
    return ListedVersion(entry, score, tuple(fields["signers"]), True)
