"""Lists on the pages of a registry: one row for each version that can be found."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from adapterhub.files.shown_table import ShownTable, TableCell
from adapterhub.pages.page import lower_is_better, number_text
from adapterhub.pages.versions import (
    MainScore,
    PublishedName,
    datasets_of,
    topics_of,
)
from adapterhub.registry.store import Entry, folder_of_id, unportable

_TITLES = ("adapter", "backbone", "task", "method", "score", "trained", "size", "published", "tags")
_MOST_TEXT = 160  # characters of a description covered by the search


@dataclass(frozen=True)
class ListedVersion:
    """A version as shown in lists.

    Attributes:
        entry: its entry in the registry's list.
        score: its main score.
        signers: the ids of the keys with a valid signature.
        is_current: whether it is the newest version of its name that was not yanked.
    """

    entry: Entry
    score: MainScore | None
    signers: tuple[str, ...]
    is_current: bool


def listed_versions(name: PublishedName) -> list[ListedVersion]:
    """Return the versions of a name that match a search, the newest first."""
    return [
        ListedVersion(v.entry, v.score, v.signers, v is name.current)
        for v in reversed(name.versions)
        if v.entry.yanked is None
    ]


FIELDS: dict[str, tuple[str, Callable[[ListedVersion], Iterable[str]]]] = {
    "backbone": ("Backbone", lambda each: (each.entry.backbone,)),
    "task": ("Task", lambda each: filter(None, (each.entry.task,))),
    "method": ("Method", lambda each: each.entry.methods),
    "language": ("Language", lambda each: each.entry.language),
    "dataset": ("Dataset", lambda each: datasets_of(each.entry)),
    "tag": ("Tag", lambda each: topics_of(each.entry)),
    "signer": ("Signer", lambda each: each.signers),
}
"""A search filter: the name in the form, its title, and the values of a version."""


def field_values(field: str, versions: Iterable[ListedVersion]) -> list[str]:
    """Return the values of a field, the most frequent first."""
    read = FIELDS[field][1]
    counts = Counter(value for each in versions for value in read(each))
    return [value for value, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def newest_first(versions: Iterable[ListedVersion]) -> list[ListedVersion]:
    """Sort versions by date, the newest first; those without a date come last."""
    return sorted(versions, key=lambda v: (v.entry.published or "", v.entry.name), reverse=True)


def listing(
    versions: Sequence[ListedVersion], root: str, path_of: Callable[[Entry], str] | None = None
) -> ShownTable:
    """Return a table of versions; `root` is the path from the page to the root of the site.

    `path_of` returns the path of a version's page, by default the path of a file of the site.
    """
    return ShownTable(_TITLES, [_cells(v, root, path_of or adapter_page_path) for v in versions])


def _cells(each: ListedVersion, root: str, path_of: Callable[[Entry], str]) -> list[TableCell]:
    entry, score = each.entry, each.score
    at = "" if each.is_current else f"@{entry.version}"
    return [
        TableCell(f"{entry.name}{at}", link=root + path_of(entry)),
        TableCell(entry.backbone),
        TableCell(entry.task or "-"),
        TableCell(" + ".join(entry.methods) or "-"),
        TableCell(score_words(score), score.value if score else None),
        TableCell(f"{entry.parameters:,}", entry.parameters),
        TableCell(size_text(entry.size), entry.size),
        TableCell((entry.published or "-")[:10]),
        TableCell(", ".join(topics_of(entry))),
    ]


def score_words(score: MainScore | None) -> str:
    """Format a main score with the name of its metric."""
    return f"{score.metric} {number_text(score.value)}" if score else "-"


def size_text(size: int) -> str:
    """Format a number of bytes for lists."""
    if size < 1000:
        return f"{size} B"
    return f"{size / 1e3:.0f} kB" if size < 1e6 else f"{size / 1e6:.2f} MB"


def adapter_page_path(entry: Entry) -> str:
    """Return the path of an adapter's page, relative to the root of a site."""
    return f"adapters/{folder_of_id(entry.backbone)}/{entry.name}.html"


def file_part(text: str) -> str:
    """Return a path component for untrusted text; different texts get different components."""
    part = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60]
    if part == text and part and not unportable(part):
        return part
    return f"{part or 'x'}-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]}"


def rows_script(versions: Sequence[ListedVersion]) -> str:
    """Return the script that passes the rows to `filter.js`: texts once, and their indices.

    The versions of a name are consecutive, the newest first.
    """
    places: dict[str, int] = {}

    def at(text: str) -> int:
        return places.setdefault(text, len(places))

    def number(text: str | None) -> int:
        return -1 if not text else at(text)

    rows = [_row(each, at, number) for each in versions]
    values = {field: [at(value) for value in field_values(field, versions)] for field in FIELDS}
    data = {"strings": [*places], "rows": rows, "values": values}
    # ASCII only, and without <, which an HTML parser might read as the end of a script.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"adapterhubRows({text});\n"


def _row(
    each: ListedVersion, at: Callable[[str], int], number: Callable[[str | None], int]
) -> list[Any]:
    entry, score = each.entry, each.score
    return [
        entry.name,
        entry.version,
        number(entry.backbone),
        number(entry.task),
        [at(method) for method in entry.methods],
        number(score.metric if score else None),
        float(f"{score.value:.6g}") if score else None,
        entry.parameters,
        entry.size,
        (entry.published or "")[:10],
        [at(tag) for tag in topics_of(entry)],
        [at(dataset) for dataset in datasets_of(entry)],
        [at(language) for language in entry.language],
        [at(signer) for signer in each.signers],
        (entry.description or "")[:_MOST_TEXT],
        int(score is not None and lower_is_better(score.metric)),
        int(each.is_current),
    ]
