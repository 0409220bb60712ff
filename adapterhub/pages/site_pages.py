"""HTML pages of a registry; site.py writes them to files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapterhub.errors import one_line
from adapterhub.files.card import CARD_FILE, built_from, own_text, started_from, taught_by
from adapterhub.files.compare import differing_fields, field_row, value_text
from adapterhub.files.native import MANIFEST_FILE, TENSORS_FILE
from adapterhub.files.shown_table import ShownTable, TableCell, score_text
from adapterhub.pages.card_html import card_html
from adapterhub.pages.leaderboards import Leaderboard
from adapterhub.pages.page import Tile, framed_page, number_text, submapping
from adapterhub.pages.usage_snippets import citation, ways_to_load
from adapterhub.pages.versions import (
    FIELDS,
    ListedVersion,
    PublishedName,
    PublishedVersion,
    field_values,
    listing,
    score_words,
    size_text,
)
from adapterhub.registry.store import Entry
from adapterhub.registry.trust import CheckedSignature

SORTS_SHOWN = ("newest", "score", "size", "name")
MOST_VERSIONS_COMPARED = 12
MOST_COMPARED = 24
_MOST_SHOWN = 60  # rows on the front page
_MOST_VALUES = 60  # values of a form field, before the script adds the others
_MOST_BACKBONES = 60
_MOST_VERSIONS_SHOWN = 60
_MOST_TEXT = 300  # characters of a value in a table
_MOST_TILES = 8

Links = Sequence[tuple[str, str]]
"""Titles and paths, relative to the root of the site."""


@dataclass(frozen=True)
class SitePlace:
    """The place of a page in a site.

    Attributes:
        root: the path from the page to the root.
        navigation: the pages linked from every page.
        registry: the name of the registry for readers; None for their own.
        is_answered: whether a server handles forms; otherwise a script does.
        adapter_path: returns the path of an adapter's page, if it is not a file of the site.
        backbone_page: returns the path of a backbone's page, likewise.
    """

    root: str
    navigation: Links
    registry: str | None = None
    is_answered: bool = False
    adapter_path: Callable[[Entry], str] | None = None
    backbone_page: Callable[[str], str] | None = None


@dataclass(frozen=True)
class ListPart:
    """A table of a page, with its title, a sentence, and the class that aligns its columns."""

    title: str
    table: ShownTable
    note: str = ""
    is_sortable: bool = False
    kind: str = "left"


@dataclass(frozen=True)
class AdapterLinks:
    """The links on the page of an adapter, and the command of its recipe."""

    links: Links = ()
    command: str | None = None


def front_page(
    place: SitePlace,
    title: str,
    versions: Sequence[ListedVersion],
    counts: Mapping[str, int],
    boards: Iterable[tuple[str, str, str]],
    *,
    rows: str = "",
    chosen: Mapping[str, str] | None = None,
    choices: Mapping[str, Sequence[str]] | None = None,
    count: str = "",
    links: Links = (),
    first: str = "",
) -> str:
    """Return the page for browsing and searching.

    Args:
        place: the place of the page.
        title: the name of the registry.
        versions: the versions found, in order; all versions if a script searches.
        counts: the number of adapters of each backbone, by its folder and id.
        boards: titles, paths and remarks of leaderboards.
        rows: the address of the script with the rows; "" if a server searches.
        chosen: the form fields that are set.
        choices: the values of the form fields; by default, the values of the versions.
        count: the text about the number of versions shown.
        links: links to other pages of results.
        first: the commands that push a first adapter to an empty registry.
    """
    current = [each for each in versions if each.is_current]
    shown = (current if rows else versions)[:_MOST_SHOWN]
    values = choices or {name: field_values(name, versions) for name in FIELDS}
    fields = [
        {"name": name, "title": head, "choices": values[name][:_MOST_VALUES]}
        for name, (head, _) in FIELDS.items()
    ]
    total = sum(counts.values()) if choices else len(current if rows else versions)
    number = f"{total:,} adapter{'s' * (total != 1)}"
    return _page(
        "site_front.html",
        place,
        "Adapters",
        title,
        f"{number} for {len(counts):,} backbone{'s' * (len(counts) != 1)}",
        scripts=("filter.js",),
        rows_script=rows,
        chosen=dict(chosen or {}),
        fields=[each for each in fields if each["choices"]],
        sorts=SORTS_SHOWN,
        most=_MOST_SHOWN,
        count=count or (f"The newest {len(shown)}:" if len(shown) < total else ""),
        table=listing(shown, place.root, place.adapter_path),
        links=links,
        backbones=backbone_table(place, counts, _MOST_BACKBONES),
        boards=list(boards),
        first=first,
    )


def backbone_table(place: SitePlace, counts: Mapping[str, int], most: int) -> ShownTable:
    """Return a table of backbones and their numbers of adapters, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]
    rows = [
        (
            TableCell(backbone, link=place.root + (place.backbone_page or backbone_path)(backbone)),
            TableCell(f"{count:,}", count),
        )
        for backbone, count in ordered
    ]
    return ShownTable(("backbone", "adapters"), rows, numbers=True)


def backbone_path(backbone: str) -> str:
    """Return the path of the page of a backbone."""
    return f"backbones/{backbone.replace('/', '--')}/index.html"


def list_page(
    place: SitePlace,
    here: str,
    title: str,
    subtitle: str,
    parts: Sequence[ListPart],
    *,
    links: Links = (),
    numbers: Links = (),
    card: str = "",
) -> str:
    """Return a page of tables, and a card below them.

    `numbers` are the pages of the list; the current page has no path.
    """
    return _page(
        "site_list.html",
        place,
        here,
        title,
        subtitle,
        scripts=("sort.js",),
        parts=parts,
        links=links,
        numbers=numbers,
        card=card_html(card) if card else "",
    )


def leaderboard_page(
    place: SitePlace,
    title: str,
    subtitle: str,
    boards: Sequence[Leaderboard],
    links: Links = (),
) -> str:
    """Return a page of leaderboards."""
    return _page(
        "site_leaderboard.html",
        place,
        "Leaderboards",
        title,
        subtitle,
        scripts=("sort.js",),
        boards=boards,
        links=links,
    )


def compare_page(
    place: SitePlace, title: str, subtitle: str, versions: Sequence[PublishedVersion]
) -> str:
    """Return a page that compares adapters side by side, one per column."""
    entries = [version.entry for version in versions]
    facts = {
        "version": [entry.version for entry in entries],
        "published": [(entry.published or "-")[:10] for entry in entries],
        "score": [_score_words(version) for version in versions],
        "trained": [f"{entry.parameters:,}" for entry in entries],
        "size": [size_text(entry.size) for entry in entries],
        "evaluated on": [(version.entry.evaluation or "unknown rows")[:12] for version in versions],
        "signed by": [", ".join(version.signers) or "-" for version in versions],
    }
    skipped = re.compile(
        r"(name|metrics|description|parameters|bytes|training\.data\.eval_sha256)$"
    )
    fields = differing_fields([version.manifest for version in versions])
    kept = {path: values for path, values in fields.items() if not skipped.match(path)}
    rows = [[name, *values] for name, values in facts.items()]
    # Fields that few versions have come last, since their columns may be hidden.
    for path in sorted(kept, key=lambda path: kept[path].count(None)):
        rows.append(field_row(path, kept[path], _MOST_TEXT))
    return _page(
        "site_compare.html",
        place,
        "",
        title,
        subtitle,
        scripts=("columns.js",),
        table=ShownTable(("field", *(entry.name for entry in entries)), rows),
        note="Facts, and each field that is not the same in all. Choose two to six columns.",
    )


def adapter_page(place: SitePlace, name: PublishedName, about: AdapterLinks) -> str:
    """Return the page of an adapter name for one backbone."""
    version = name.current
    entry, manifest = version.entry, version.manifest
    card = own_text(version.card)
    several = len(name.versions) > 1
    return _page(
        "site_adapter.html",
        place,
        "",
        entry.name,
        " · ".join(filter(None, (entry.version, entry.backbone, entry.task, *entry.methods))),
        scripts=("copy.js", "columns.js"),
        version=entry.version,
        yanked=entry.yanked,
        description=manifest.description,
        links=about.links,
        tiles=_tiles(version),
        ways=ways_to_load(version, place.registry),
        card=card_html(card) if card else "",
        provenance=_provenance(version),
        command=about.command,
        files=_files(version),
        signatures=[*map(_signature_text, version.signatures), *filter(None, [version.unchecked])],
        versions=_versions(name),
        differences=_differences(name) if several else None,
        diff_command=_diff_command(name, place.registry) if several else "",
        citation=citation(version),
    )


def form_page(
    place: SitePlace,
    title: str,
    note: str,
    action: str,
    button: str,
    *,
    field: str = "",
    table: ShownTable | None = None,
    subtitle: str = "",
) -> str:
    """Return a page with one button, a table, and a field for a secret if it has a name."""
    return _page(
        "site_form.html",
        place,
        title,
        title,
        subtitle,
        note=note,
        action=action,
        button=button,
        field=field,
        table=table,
    )


def problems_page(place: SitePlace, broken: Mapping[str, str], most: int = 400) -> str:
    """Return the page of unreadable versions, with their errors."""
    rows = [(path, one_line(text, _MOST_TEXT)) for path, text in [*broken.items()][:most]]
    part = ListPart("Versions that cannot be read", ShownTable(("version", "problem"), rows))
    note = f"{len(broken):,} of them; adapterhub registry verify lists all problems"
    return list_page(place, "Problems", "Problems", note, [part])


def _page(
    template: str, place: SitePlace, here: str, title: str, subtitle: str, **values: Any
) -> str:
    return framed_page(
        template,
        name=title,
        subtitle=subtitle,
        here=here,
        root=place.root,
        navigation=place.navigation,
        is_answered=place.is_answered,
        facts=[],
        **values,
    )


def _tiles(version: PublishedVersion) -> list[Tile]:
    """Return the scores, the main one first, and the size of the adapter."""
    main = version.score.metric if version.score else ""
    names = sorted(version.manifest.metrics, key=lambda name: (name != main, name))
    errors = version.errors
    tiles = [
        Tile(
            one_line(name, 40),
            number_text(version.manifest.metrics[name]),
            str(errors.get(name, "")),
        )
        for name in names[:_MOST_TILES]
    ]
    entry = version.entry
    return [
        *tiles,
        Tile("trained parameters", f"{entry.parameters:,}"),
        Tile("size", size_text(entry.size)),
    ]


def _provenance(version: PublishedVersion) -> list[tuple[str, str]]:
    manifest, entry = version.manifest, version.entry
    training, backbone = manifest.training, manifest.backbone
    data = submapping(training, "data")
    revision = f" at {backbone.revision}" if backbone.revision else ""
    facts: dict[str, Any] = {
        "backbone": f"{backbone.id}{revision}",
        "weights": f"fingerprint {backbone.fingerprint}",
        "trained in": backbone.quantization or backbone.dtype,
        "method": "; ".join(value_text(spec, _MOST_TEXT) for spec in manifest.methods),
        "starts from": started_from(manifest),
        "teacher": taught_by(manifest),
        "on top of": "; ".join(f"{ref}, sha256 {ref.digest[:12]}" for ref in manifest.on),
        "built from": "; ".join(built_from(manifest)),
        "labels": ", ".join(manifest.labels),
        "training rows": _count(data.get("train")),
        "evaluation rows": _count(data.get("eval")),
        "data": data.get("sha256") and f"sha256 {data['sha256']}",
        "evaluated on": version.entry.evaluation and f"sha256 {version.entry.evaluation}",
        "seed": training.get("seed"),
        "steps": _count(training.get("steps")),
        "versions": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()),
        "licence": manifest.license or "not stated by the publisher",
        "language": ", ".join(manifest.language),
        "published": entry.published,
    }
    return [(name, _cut(str(value))) for name, value in facts.items() if value not in (None, "")]


def _files(version: PublishedVersion) -> ShownTable:
    entry, manifest = version.entry, version.manifest
    rows = [
        (MANIFEST_FILE, size_text(version.manifest_size), entry.digest),
        (
            TENSORS_FILE,
            size_text(entry.size - version.manifest_size),
            manifest.files.get(TENSORS_FILE, "-"),
        ),
    ]
    if version.card:
        size = len(version.card.encode("utf-8", "replace"))
        rows.append((CARD_FILE, size_text(size), "not covered: the author may change it"))
    return ShownTable(("file", "size", "sha256"), rows)


def _signature_text(checked: CheckedSignature) -> str:
    statement = checked.signature.statement
    name = " ".join(filter(None, (statement.name, statement.version)))
    return f"key {checked.signature.signer.id} for {name}: {checked.problem or 'valid'}"


def _versions(name: PublishedName) -> ShownTable:
    rows: list[list[str | TableCell]] = []
    for version in reversed(name.versions[-_MOST_VERSIONS_SHOWN:]):
        entry = version.entry
        withdrawn = (
            f"withdrawn: {one_line(entry.yanked, _MOST_TEXT)}" if entry.yanked is not None else ""
        )
        rows.append(
            [
                entry.version,
                (entry.published or "-")[:10],
                _score_words(version),
                f"{entry.parameters:,}",
                ", ".join(entry.tags),
                ", ".join(version.signers) or "-",
                withdrawn,
                entry.digest[:12],
            ]
        )
    rows += [
        [version, "", "", "", "", "", f"cannot be read: {one_line(text, _MOST_TEXT)}", ""]
        for version, text in [*name.broken.items()][:_MOST_VERSIONS_SHOWN]
    ]
    return ShownTable(
        ("version", "published", "score", "trained", "tags", "signed by", "state", "sha256"), rows
    )


def _differences(name: PublishedName) -> ShownTable | None:
    """Return the fields in which the versions differ, with a column for each version."""
    versions = name.versions[-MOST_VERSIONS_COMPARED:][::-1]
    fields = differing_fields([version.manifest for version in versions])
    rows = [field_row(path, values, _MOST_TEXT) for path, values in fields.items()]
    return ShownTable(("field", *(v.entry.version for v in versions)), rows) if rows else None


def _diff_command(name: PublishedName, registry: str | None) -> str:
    first, second = (version.entry.reference for version in name.versions[-2:])
    return f"adapterhub diff {first} {second}" + (f" --registry {registry}" if registry else "")


def _score_words(version: PublishedVersion) -> str:
    score = version.score
    return score_text(score_words(score), score.error) if score else "-"


def _count(value: Any) -> str | None:
    return f"{value:,}" if isinstance(value, int) else None


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
