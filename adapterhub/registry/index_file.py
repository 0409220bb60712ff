"""`index.json`: what a registry has, one file for each backbone, so that a search need not list.

    index.json              {"backbones": ["acme--bert-small"], "index": 1}
    BACKBONE/index.json     {"adapters": {NAME: {"v1": {...}, "v2": {"broken": true}}},
                             "backbone": BACKBONE, "index": 1}

A version has the fields of its `Entry` that are not empty. The file has a line for each name, so
that git merges it. It is derived: what a version is, its own folder says, and its digest decides.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any

from adapterhub.errors import FileError
from adapterhub.registry.names_file import Contents
from adapterhub.registry.reference import folder_of_id, is_backbone_folder, is_name
from adapterhub.registry.store import Entry, is_version_folder, version_number

MAX_INDEX_BYTES = 128 << 20  # of one backbone: 200,000 versions
_FORMAT = 1
_BROKEN = "broken"
_KEYS = ("reference", "name", "version")  # that the place of a row says
_FIELDS = {f.name: f for f in fields(Entry) if f.name not in _KEYS}
_MOST_TEXT, _MOST_ITEMS = 4_000, 1_000


def root_bytes(backbones: Iterable[str]) -> bytes:
    """Return the contents of the index in the root: the folders of the backbones."""
    return f"{json.dumps({'backbones': sorted(backbones), 'index': _FORMAT})}\n".encode()


def parse_backbones(data: bytes, source: str) -> list[str]:
    """Return the backbones' folders in the index of the root.

    Raises:
        FileError: `data` is no such index.
    """
    found = _parse(data, source).get("backbones")
    if not isinstance(found, list) or not all(map(_is_folder, found)):
        raise _error(source, "it does not list folders of backbones")
    return found


def index_bytes(backbone: str, found: Mapping[str, Contents]) -> bytes:
    """Return the contents of the index of a backbone's folder, given what its names have."""
    return _dump(backbone, {name: _rows(contents) for name, contents in found.items()})


def index_with(data: bytes, source: str, backbone: str, new: Mapping[str, Contents]) -> bytes:
    """Return an index with the rows of some names written anew; one without versions has none.

    Raises:
        FileError: `data` is not the index of this backbone.
    """
    adapters = _adapters(data, source, backbone)
    _contents(adapters, source, backbone)  # what is damaged is not written again
    changed = adapters | {name: _rows(each) for name, each in new.items()}
    return _dump(backbone, {name: rows for name, rows in changed.items() if rows})


def parse_index(data: bytes, source: str, backbone: str) -> dict[str, Contents]:
    """Return what the index in a backbone's folder has of each name.

    Raises:
        FileError: `data` is not the index of this backbone.
    """
    with without_collection():
        return _contents(_adapters(data, source, backbone), source, backbone)


def _contents(adapters: Mapping[str, Any], source: str, backbone: str) -> dict[str, Contents]:
    found: dict[str, Contents] = {}
    numbers = cache(version_number)  # nearly all are v1
    for name, rows in adapters.items():
        if not is_name(name) or not isinstance(rows, dict):
            raise _error(source, "it has a name that no adapter has")
        contents = found[name] = Contents([], {})
        for version in sorted(rows, key=lambda version: numbers(version) or 0):
            row = rows[version]
            if not (version[:1] == "v" and numbers(version)) or not isinstance(row, dict):
                raise _error(source, "it has a version that is none")
            if row.get(_BROKEN):
                contents.broken[version] = FileError("it could not be read when it was indexed")
                continue
            try:
                contents.entries.append(entry_of_row(name, version, row))
            except ValueError as error:
                raise _error(source, f"the row of {name}@{version} is damaged: {error}") from None
            if folder_of_id(contents.entries[-1].backbone) != backbone:
                raise _error(source, f"{name}@{version} is of another backbone")
    return found


def row_of(entry: Entry) -> dict[str, Any]:
    """Return the fields of an entry that are not empty, without those that its place says."""
    return {name: value for name in _FIELDS if (value := getattr(entry, name)) or value == ""}


def entry_of_row(name: str, version: str, row: Mapping[str, Any]) -> Entry:
    """Return the entry of a row; fields of later versions are left out.

    Raises:
        ValueError: a field is missing, or of another kind.
    """
    known: dict[str, Any] = {"task": None}
    for field, value in row.items():
        if field in _CHECKS:
            if not _CHECKS[field](value):
                raise ValueError(field)
            known[field] = tuple(value) if isinstance(value, list) else value
    if missing := {"digest", "backbone", "fingerprint", "methods"} - known.keys():
        raise ValueError(f"no {min(missing)}")
    return Entry(reference=f"{name}@{version}", name=name, version=version, **known)


def _adapters(data: bytes, source: str, backbone: str) -> dict[str, Any]:
    tree = _parse(data, source)
    if tree.get("backbone") != backbone:
        raise _error(source, f"it is not the one of {backbone}")
    adapters = tree.get("adapters")
    if not isinstance(adapters, dict):
        raise _error(source, "it has no adapters")
    return adapters


def _parse(data: bytes, source: str) -> dict[str, Any]:
    if len(data) > MAX_INDEX_BYTES:
        raise _error(source, f"it has more than {MAX_INDEX_BYTES:,} bytes")
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        raise _error(source, "it is not JSON, but perhaps the page of a login") from None
    if not isinstance(tree, dict) or tree.get("index") != _FORMAT:
        raise _error(source, f'it does not say "index": {_FORMAT}')
    return tree


def _dump(backbone: str, adapters: Mapping[str, Any]) -> bytes:
    line = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
    lines = ",\n".join(f"{line(name)}:{line(adapters[name])}" for name in sorted(adapters))
    return (
        f'{{"adapters":{{\n{lines}\n}},"backbone":{line(backbone)},"index":{_FORMAT}}}\n'.encode()
    )


def _rows(contents: Contents) -> dict[str, Any]:
    # Why is not for everybody: errors name folders of a machine.
    broken: dict[str, Any] = {version: {_BROKEN: True} for version in contents.broken}
    rows = {entry.version: row_of(entry) for entry in contents.entries}
    return {version: row for version, row in (broken | rows).items() if is_version_folder(version)}


def _is_folder(value: object) -> bool:
    return isinstance(value, str) and is_backbone_folder(value)


def _is_text(value: object) -> bool:
    """Return whether a value is a text that can be written, without half of a character."""
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        return False
    return (
        value.isascii() or value.isprintable() or not any(0xD800 <= ord(c) < 0xE000 for c in value)
    )


def _is_list(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MOST_ITEMS and all(map(_is_text, value))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is_scores(value: object) -> bool:
    if not isinstance(value, dict) or len(value) > _MOST_ITEMS:
        return False
    return all(_is_text(name) and _is_number(score) for name, score in value.items())


# Not by files/schema.py, which takes 90 µs for an entry: there may be 10,000 of them.
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "str": _is_text,
    "str | None": lambda value: value is None or _is_text(value),
    "tuple[str, ...]": _is_list,
    "int": lambda value: type(value) is int and 0 <= value < 1 << 62,
    "dict[str, float]": _is_scores,
}


_CHECKS = {name: _KINDS[str(field.type)] for name, field in _FIELDS.items()}


@contextmanager
def without_collection() -> Iterator[None]:
    """Look for no garbage while thousands of objects are made that stay: it took half the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _error(source: str, problem: str) -> FileError:
    return FileError(
        f"{source} is not the index of a registry: {problem}",
        expected="the file as adapterhub wrote it",
        hint="adapterhub registry index writes it anew, from the folders",
    )
