"""The files of a registry: versions, names and the index.

    BACKBONE/NAME/v1/       PUBLISHED, and BESIDE (other libraries' files); `copy_adapter` copies
                            verified bytes
    BACKBONE/NAME/names.json   {"highest": 2, "tags": {"best": "v1"},
                                "yanked": {"v2": "trained on the dev set"}}
    BACKBONE/index.json     {"adapters": {NAME: {"v1": {...}, "v2": {"broken": true}}},
                             "backbone": BACKBONE, "index": 1}
    index.json              {"backbones": ["acme--bert-small"], "index": 1}

`highest` is the highest version ever published, so that the number of a deleted version is never
used again; files of earlier releases have no such field.

A search reads an index instead of listing folders. A version has the non-empty fields of its
`Entry`. The file has one line per name, so git can merge it. The index is derived: the folder of a
version and its digest are authoritative.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from adapterhub.backbones.hub_network import SHA256
from adapterhub.config.options import from_file, option, to_dict
from adapterhub.errors import ConfigError, FileError
from adapterhub.files import schema
from adapterhub.files.atomic import (
    UnreadableError,
    check_place,
    explained,
    open_regular,
    pieces_of,
    put_in_place,
    read_file,
    staging,
    write_files,
)
from adapterhub.files.card import CARD_FILE, MAX_CARD_BYTES
from adapterhub.files.manifest import (
    MAX_TENSOR_FILE_BYTES,
    Manifest,
    from_json,
)
from adapterhub.files.native import BESIDE_FILE, MANIFEST_FILE, SIGNATURE_FILE, TENSORS_FILE, Saved
from adapterhub.files.schema import CRLF, with_lf
from adapterhub.files.signature import Signature, parse_signatures, signatures_to_json
from adapterhub.registry.store import (
    DATE_FORMAT,
    MOST_VERSIONS,
    TAG,
    TAG_RULE,
    Entry,
    folder_of_id,
    is_backbone_folder,
    is_name,
    is_version_folder,
    version_number,
)

# The date of publication, the number of the version and the start of its digest, so that files of
# another version in its folder are detected. Hidden: neither part of the adapter nor in its digest.
# Older releases read 64 bytes of it.
DATE_FILE = ".published"
PUBLISHED = (CARD_FILE, MANIFEST_FILE, TENSORS_FILE, SIGNATURE_FILE)
# Files of a repository on a hub: the yanked versions with the reasons, and signatures added after
# publication, one file per version, such as v3.sig.
YANKED_FILE = "yanked.json"
SIGNATURES_FOLDER = "signatures"
MAX_YANKED_BYTES = 1 << 20
MAX_DATE_BYTES = 64
_STAMP_DIGITS = 32
MAX_BESIDE_BYTES = 16 << 10
_digest = schema.text(r"[0-9a-f]{64}", "a sha256 in lower-case hexadecimal")
_file_name = schema.text(r"[A-Za-z0-9_.-]{1,100}", "the name of a file")


@dataclass(frozen=True)
class FilesBeside:
    """Digests of the manifest and of the files published next to it, by name."""

    manifest: Annotated[str, _digest]
    files: Annotated[Mapping[str, str], schema.mapping(_file_name, _digest)]
    version: Annotated[int, schema.integer(1, 1)] = 1


def beside_bytes(manifest: str, files: Mapping[str, bytes]) -> bytes:
    """Return the list of the files published next to the manifest with this digest."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return schema.canonical_json(to_dict(FilesBeside(manifest, digests)))


def parse_beside(data: bytes) -> FilesBeside:
    """Parse the list of the files next to a manifest.

    Raises:
        FileError: it cannot be read.
    """
    beside, offenders = schema.parse_record(FilesBeside, data, MAX_BESIDE_BYTES)
    if beside is None:
        raise FileError(f"{BESIDE_FILE} is not a list of files", offenders=offenders)
    return beside


def entry_of(
    data: bytes,
    manifest: Manifest | None = None,
    *,
    reference: str,
    name: str,
    version: str,
    tags: tuple[str, ...] = (),
    yanked: str | None = None,
    published: str | None = None,
    signers: tuple[str, ...] = (),
) -> Entry:
    """Build the entry of an adapter from the bytes of its manifest, parsed already or not.

    Raises:
        FileError: the manifest cannot be read.
    """
    manifest = manifest or from_json(data, f"{MANIFEST_FILE} of {reference}")
    rows = manifest.training.get("data")
    digests = rows if isinstance(rows, dict) else {}
    return Entry(
        reference=reference,
        name=name,
        version=version,
        digest=hashlib.sha256(data).hexdigest(),
        backbone=manifest.backbone.id,
        fingerprint=manifest.backbone.fingerprint,
        methods=tuple(method for spec in manifest.methods for method in spec),
        task=manifest.task,
        metrics=dict(manifest.metrics),
        tags=tags,
        size=len(data) + manifest.nbytes,
        parameters=manifest.parameters,
        yanked=yanked,
        description=manifest.description,
        license=manifest.license,
        language=manifest.language,
        topics=manifest.tags,
        published=published,
        signers=signers,
        data=_sha256(digests.get("sha256")),
        evaluation=_sha256(digests.get("eval_sha256")),
        test=_sha256(digests.get("test_sha256")),
    )


def _sha256(value: object) -> str | None:
    """Return a digest of the record of a training run, which any program may have written."""
    return value if isinstance(value, str) and SHA256.fullmatch(value) else None


def date_now() -> bytes:
    """Return the contents of a version's date file: this second, in UTC."""
    return date_bytes(datetime.now(timezone.utc).strftime(DATE_FORMAT))


def date_bytes(date: str) -> bytes:
    """Return the contents of a version's date file."""
    return f"{date}\n".encode()


def stamp_bytes(version: str, digest: str) -> bytes:
    """Return the line of a date file that identifies the version."""
    return f"{version} {digest[:_STAMP_DIGITS]}".encode()


def check_stamp(folder: Path, digest: str) -> None:
    """Check that the files with a digest belong to the version that a folder is named after.

    The folder is opened once, since it may be replaced at any time. Folders published by older
    releases have no stamp and pass.

    Raises:
        FileError: they belong to another version, or the folder does not exist.
    """
    data = b""
    try:
        place = os.open(folder, os.O_RDONLY) if os.open in os.supports_dir_fd else None
    except OSError as error:
        raise FileError(f"{folder} cannot be read: {error.strerror or error}") from None
    try:
        file = folder / DATE_FILE if place is None else Path(DATE_FILE)
        with suppress(UnreadableError), open_regular(file, 1, MAX_DATE_BYTES, place) as opened:
            data = opened.read()
    finally:
        if place is not None:
            os.close(place)
    match = re.fullmatch(rb"[^\n]*\n(v\d{1,9}) ([0-9a-f]{32})\s*", data)
    if match is None or b" ".join(match.groups()) == stamp_bytes(folder.name, digest):
        return
    other = match[1].decode()
    problem = f"has the files of {other}" if other != folder.name else "is not what was published"
    raise FileError(
        f"{folder} {problem}",
        expected=f"the files that were published as {folder.name}",
        hint="versions never change: git status, or a backup",
    )


def parse_date(data: bytes) -> str | None:
    """Return the date in the contents of a date file, or None."""
    try:
        text = data.decode("ascii").partition("\n")[0].strip()
        datetime.strptime(text, DATE_FORMAT)
    except ValueError:  # only displayed: not a reason to refuse the version
        return None
    return text


def is_intact(folder: Path, digest: str) -> bool:
    """Return whether a folder still has the files of an adapter that were verified."""
    try:
        Saved.at(folder, digest).check()
    except FileError:
        return False
    return True


def name_to_publish(saved: Saved) -> str:
    """Return the name to publish an adapter under: its own or, by default, its run's name."""
    path, manifest = saved.folder.resolve(), saved.manifest
    run = path.parent.name if path.name == "adapter" else path.name
    return run if manifest.is_unnamed and is_name(run) else manifest.name


def copy_adapter(
    source: Path | Saved,
    folder: Path,
    digest: str,
    *,
    date: bytes | None = None,
    beside: bool = False,
) -> Path:
    """Copy the files of an adapter to a new folder atomically.

    The verified bytes are written, so `source` may change at any time.
    `digest` is the sha256 of the published manifest; `date` makes a date file, for a new version.
    `beside` also copies the files of another library.

    Raises:
        OutputError: `folder` exists or cannot be written.
        FileError: `source` does not contain a valid adapter, or not the published one.
    """
    saved = Saved.at(source)
    source = saved.folder
    check_digest(source, saved.data, digest)
    files = {MANIFEST_FILE: saved.data} | ({DATE_FILE: date} if date else {})
    for name in (CARD_FILE, SIGNATURE_FILE):
        if os.path.lexists(source / name):
            files[name] = _read(source / name, 0, MAX_CARD_BYTES, None)
    if SIGNATURE_FILE in files:
        parse_signatures(files[SIGNATURE_FILE], str(source / SIGNATURE_FILE))
    files |= saved.beside() if beside else {}
    with _new_copy(folder) as staged:
        saved.copy_to(staged, files)
    return folder


def merged_signatures(old: Sequence[Signature], new: Sequence[Signature], digest: str) -> bytes:
    """Return the contents of a signature file with new signatures; drop signatures of other files.

    Raises:
        OutputError: there are too many.
    """
    return signatures_to_json(s for s in (*old, *new) if s.statement.digest == digest)


def copy_files(source: Path, folder: Path, names: Sequence[str]) -> Path:
    """Copy the named files that exist to a new folder, atomically.

    Raises:
        OutputError: `folder` exists or cannot be written.
        FileError: a file is a link, not a regular file, empty or too large.
    """
    with ExitStack() as stack:
        payload: dict[str, Iterable[bytes]] = {}
        for path in (source / name for name in names if os.path.lexists(source / name)):
            with _refused(path):
                file = stack.enter_context(open_regular(path, 0, MAX_TENSOR_FILE_BYTES))
            payload[path.name] = pieces_of(file, os.fstat(file.fileno()).st_size)
        with _refused(source), _new_copy(folder) as staged:
            write_files(staged, payload)
    return folder


def check_digest(folder: Path | str, manifest: bytes, digest: str) -> None:
    """Check that a manifest is the published one.

    Raises:
        FileError: it differs.
    """
    if hashlib.sha256(manifest).hexdigest() != digest:
        same = hashlib.sha256(with_lf(manifest)).hexdigest() == digest
        raise FileError(
            f"{folder} is not what was published{f': {CRLF}' * same}",
            expected=f"a manifest with sha256 {digest}",
            hint="adapterhub registry verify",
        )


def _read(path: Path, low: int, most: int, sha256: str | None) -> bytes:
    with _refused(path):
        return read_file(path, low, most, sha256)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Return the error for a file that cannot be used."""
    try:
        yield
    except UnreadableError as error:
        raise FileError(f"{path}: {error}", expected="a regular file as published") from None


@contextmanager
def _new_copy(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder that is renamed at the end; an error leaves nothing."""
    with explained(folder):
        check_place(folder, False, ())
        with staging(folder) as staged:
            yield staged
            put_in_place(staged, folder, overwrite=False)


NAMES_FILE = "names.json"
# Room for 10,000 tags; a longer file only delays every command.
MAX_NAMES_BYTES = 1 << 20
_Tag = Annotated[str, schema.text(TAG, f"a tag: {TAG_RULE}")]
_Version = Annotated[str, schema.text(r"v[1-9][0-9]{0,8}", "a version: v1, v2, ...")]
# The longest reason is as long as the longest description of an adapter.
_Reason = Annotated[str, schema.text(r"(?s).{0,2000}", "a reason")]


@dataclass
class Names:
    """The contents of `names.json`: version by tag, reason by yanked version, highest version."""

    tags: dict[_Tag, _Version] = field(default_factory=dict)
    yanked: dict[_Version, _Reason] = field(default_factory=dict)
    highest: Annotated[int, schema.integer(0, MOST_VERSIONS)] = option(0, omitted=True)

    def without(self, version: str) -> Names:
        """Return the names after a version is deleted."""
        tags = {tag: at for tag, at in self.tags.items() if at != version}
        yanked = {at: reason for at, reason in self.yanked.items() if at != version}
        return Names(tags, yanked, self.highest)


@dataclass(frozen=True)
class Contents:
    """The readable contents of one name.

    `entries` are the versions, oldest first. `broken` maps the numbers of the others to their
    errors. If `names.json` cannot be read, `broken` has only its error, and there are no entries.
    `words` has the searchable text of a version (`word_text`), if it is more than the entry.
    """

    entries: list[Entry]
    broken: dict[str, FileError]
    names: Names = field(default_factory=Names)
    words: dict[str, str] = field(default_factory=dict)

    def raise_broken(self, name: str, version: str | None) -> None:
        """Raise the error of the version that a reference resolves to, if it cannot be read.

        Without a number or tag, it resolves to the newest version that is not yanked.

        Raises:
            FileError: that version, or a file needed to resolve it, cannot be read.
        """
        if NAMES_FILE in self.broken:
            raise self.broken[NAMES_FILE]
        number = version_number(version or "")
        available = {*self.broken, *(entry.version for entry in self.entries)}
        if version is None:
            newest = max(
                available - self.names.yanked.keys(),
                key=lambda each: version_number(each) or 0,
                default="",
            )
            if newest in self.broken:
                problem = self.broken[newest]
                raise FileError(
                    f"the newest version, {name}@{newest}, cannot be read: {problem.problem}",
                    hint=f"restore it, remove its folder, or name another version: {name}@v1",
                    offenders=problem.offenders,
                )
        elif error := self.broken.get(f"v{number}" if number else self.names.tags.get(version, "")):
            raise error


def parse_names(data: bytes, source: str) -> Names:
    """Parse the contents of `names.json`; `source` names the file in errors.

    Raises:
        FileError: they are not valid.
    """
    names, problems = schema.parse_record(Names, data, MAX_NAMES_BYTES)
    if names is None:
        raise FileError(
            f"{source} cannot be read",
            expected='{"tags": {TAG: VERSION}, "yanked": {VERSION: REASON}}',
            hint="restore it, or delete it; tags and yanks are then lost, versions are not",
            offenders=schema.shorten(problems),
        )
    return names


def names_bytes(names: Names, name: str) -> bytes:
    """Return the contents of `names.json` of the adapter `name`.

    Raises:
        ConfigError: a reader would refuse them.
    """
    _, problems = from_file(Names, names)
    if not problems and len(data := schema.canonical_json(asdict(names))) > MAX_NAMES_BYTES:
        problems.append(f"{len(data)} bytes, more than {MAX_NAMES_BYTES}")
    if problems:
        raise ConfigError(f"invalid tags or yanks of {name}", offenders=schema.shorten(problems))
    return data


MAX_INDEX_BYTES = 128 << 20  # of one backbone: 200,000 versions
_FORMAT = 1
_BROKEN = "broken"
_KEYS = ("reference", "name", "version")  # implied by the place of a row
_FIELDS = {f.name: f for f in fields(Entry) if f.name not in _KEYS}
_MOST_TEXT, _MOST_ITEMS = 4_000, 1_000


def root_bytes(backbones: Iterable[str]) -> bytes:
    """Return the content of the root index, which lists the folders of the backbones."""
    return f"{json.dumps({'backbones': sorted(backbones), 'index': _FORMAT})}\n".encode()


def parse_backbones(data: bytes, source: str) -> list[str]:
    """Return the backbones' folders in the index of the root.

    Raises:
        FileError: `data` is not such an index.
    """
    folders = _parse(data, source).get("backbones")
    if not isinstance(folders, list) or not all(map(_is_folder, folders)):
        raise _error(source, "it does not list folders of backbones")
    return folders


def index_bytes(backbone: str, by_name: Mapping[str, Contents]) -> bytes:
    """Build the index of a backbone's folder from the contents of its names."""
    return _dump(backbone, {name: _rows(contents) for name, contents in by_name.items()})


def index_with(data: bytes, source: str, backbone: str, new: Mapping[str, Contents]) -> bytes:
    """Return an index with the rows of some names replaced; names without versions have no row.

    Raises:
        FileError: `data` is not the index of this backbone.
    """
    adapters = _adapters(data, source, backbone)
    _contents(adapters, source, backbone)  # damaged rows are dropped
    changed = adapters | {name: _rows(each) for name, each in new.items()}
    return _dump(backbone, {name: rows for name, rows in changed.items() if rows})


def parse_index(data: bytes, source: str, backbone: str) -> dict[str, Contents]:
    """Parse the index in a backbone's folder, by name.

    Raises:
        FileError: `data` is not the index of this backbone.
    """
    with without_collection():
        return _contents(_adapters(data, source, backbone), source, backbone)


def _contents(adapters: Mapping[str, Any], source: str, backbone: str) -> dict[str, Contents]:
    by_name: dict[str, Contents] = {}
    numbers = cache(version_number)  # nearly all are v1
    for name, rows in adapters.items():
        if not is_name(name) or not isinstance(rows, dict):
            raise _error(source, "it contains an invalid adapter name")
        contents = by_name[name] = Contents([], {})
        for version in sorted(rows, key=lambda version: numbers(version) or 0):
            row = rows[version]
            if not (version[:1] == "v" and numbers(version)) or not isinstance(row, dict):
                raise _error(source, "it contains an invalid version")
            if row.get(_BROKEN):
                contents.broken[version] = FileError("it could not be read when it was indexed")
                continue
            try:
                contents.entries.append(entry_of_row(name, version, row))
            except ValueError as error:
                raise _error(source, f"the row of {name}@{version} is damaged: {error}") from None
            if folder_of_id(contents.entries[-1].backbone) != backbone:
                raise _error(source, f"{name}@{version} is of another backbone")
    return by_name


def row_of(entry: Entry) -> dict[str, Any]:
    """Return the non-empty fields of an entry, except those implied by its place."""
    return {name: value for name in _FIELDS if (value := getattr(entry, name)) or value == ""}


def entry_of_row(name: str, version: str, row: Mapping[str, Any]) -> Entry:
    """Return the entry of a row; fields of later versions are ignored.

    Raises:
        ValueError: a field is missing or has the wrong type.
    """
    known: dict[str, Any] = {"task": None}
    for key, value in row.items():
        if key in _CHECKS:
            if not _CHECKS[key](value):
                raise ValueError(key)
            known[key] = tuple(value) if isinstance(value, list) else value
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
        raise _error(source, "it is not JSON; it may be a login page") from None
    if not isinstance(tree, dict) or tree.get("index") != _FORMAT:
        raise _error(source, f'it lacks "index": {_FORMAT}')
    return tree


def _dump(backbone: str, adapters: Mapping[str, Any]) -> bytes:
    line = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
    lines = ",\n".join(f"{line(name)}:{line(adapters[name])}" for name in sorted(adapters))
    return (
        f'{{"adapters":{{\n{lines}\n}},"backbone":{line(backbone)},"index":{_FORMAT}}}\n'.encode()
    )


def _rows(contents: Contents) -> dict[str, Any]:
    # The reason is omitted: errors name folders of a machine.
    broken: dict[str, Any] = {version: {_BROKEN: True} for version in contents.broken}
    rows = {entry.version: row_of(entry) for entry in contents.entries}
    return {version: row for version, row in (broken | rows).items() if is_version_folder(version)}


def _is_folder(value: object) -> bool:
    return isinstance(value, str) and is_backbone_folder(value)


def _is_text(value: object) -> bool:
    """Return whether a value is text that can be encoded (no lone surrogates)."""
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


# Without files/schema.py, which takes 90 µs per entry: there may be 10,000 entries.
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
    """Pause garbage collection while thousands of long-lived objects are created: twice as fast."""
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
        hint="adapterhub registry index rebuilds it from the folders",
    )
