"""The folder of one name in a local registry: its versions, tags and yanked versions.

    v1/  v2/  ...      the files of an adapter as saved; they never change
    names.json         {"tags": {"best": "v1"}, "yanked": {"v2": "trained on the dev set"}}

A version's folder is created by one atomic rename, and `names.json` is replaced atomically. A file
lock serializes the writers of a name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock

from adapterhub.errors import ConfigError, FileError
from adapterhub.files.atomic import (
    UnreadableError,
    check_place,
    explained,
    put_in_place,
    read_file,
    replace_file,
    staging,
    write_files,
)
from adapterhub.files.manifest import MAX_MANIFEST_BYTES, from_json
from adapterhub.files.native import (
    CARD_FILE,
    MANIFEST_FILE,
    MAX_CARD_BYTES,
    MAX_HEADER_BYTES,
    MAX_TENSOR_BYTES,
    TENSORS_FILE,
    read_adapter,
    read_manifest,
)
from adapterhub.files.schema import canonical_json
from adapterhub.registry.store import Entry, free_version, version_number

PUBLISHED = (CARD_FILE, MANIFEST_FILE, TENSORS_FILE)
_NAMES = "names.json"
_STAGED = ".adapterhub-"
_MAX_FILE_BYTES = 8 + MAX_HEADER_BYTES + MAX_TENSOR_BYTES  # of another library's adapter
_TAG = re.compile(r"(?!v?[0-9]+$)[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass
class Names:
    """The contents of `names.json`: version by tag, and reason by yanked version."""

    tags: dict[str, str] = field(default_factory=dict)
    yanked: dict[str, str] = field(default_factory=dict)


class NameFolder:
    """The folder of one name, `<root>/<backbone>/<name>`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def versions(self) -> list[Entry]:
        """List all versions, oldest first.

        Raises:
            FileError: the manifest of a version cannot be read.
        """
        names = self._names()
        return [self._entry(folder, names) for folder in self.folders()]

    def folders(self) -> list[Path]:
        """List the folders of all versions, oldest first."""
        if not self.path.is_dir():
            return []
        paths = [p for p in self.path.iterdir() if version_number(p.name) and p.name[0] == "v"]
        return sorted(paths, key=lambda p: version_number(p.name) or 0)

    def add(self, folder: Path, version: str | None, tags: tuple[str, ...]) -> Entry:
        """Add an adapter as a new version, or find the existing version with the same bytes.

        Args:
            folder: the adapter's folder.
            version: the version number for new bytes; the next one if None.
            tags: the tags to set on the version.

        Raises:
            RegistryError: `version` is taken by other bytes.
            ConfigError: the version or a tag is invalid.
        """
        check_tags(tags)
        with self.writing():
            entries = self.versions()
            digest = digest_of(folder)
            existing = next((entry.version for entry in entries if entry.digest == digest), None)
            published = existing or free_version(self.name, version, entries)
            if existing is None:
                copy_adapter(folder, self.path / published, digest)
            self.change(tags=dict.fromkeys(tags, published))
            return next(entry for entry in self.versions() if entry.version == published)

    def change(
        self, *, tags: Mapping[str, str] | None = None, yanked: Mapping[str, str] | None = None
    ) -> None:
        """Set tags, or mark versions as yanked; call it inside `writing()`."""
        check_tags(tuple(tags or ()))
        names = self._names()
        changed = Names({**names.tags, **(tags or {})}, {**names.yanked, **(yanked or {})})
        if changed != names:
            replace_file(self.path / _NAMES, canonical_json(asdict(changed)))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock that serializes the writers of this name."""
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path / ".lock"):
                yield

    def stamp(self) -> str:
        """Return a text that changes whenever the folder changes: its modification times."""
        times = (os.stat(p).st_mtime_ns for p in (self.path, self.path / _NAMES) if p.exists())
        return " ".join(map(str, times))

    def clean(self) -> list[Path]:
        """Remove the staging folders of interrupted writers, and return their paths."""
        if not list(self.path.glob(f"{_STAGED}*")):
            return []
        with self.writing():  # no writer is active while we hold the lock
            leftovers = sorted(self.path.glob(f"{_STAGED}*"))
            for path in leftovers:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return leftovers

    def _names(self) -> Names:
        try:
            tree = json.loads((self.path / _NAMES).read_bytes())
            names = Names(dict(tree["tags"]), dict(tree["yanked"]))
        except FileNotFoundError:
            return Names()
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FileError(
                f"{self.path / _NAMES} cannot be read: {error}",
                expected='{"tags": {TAG: VERSION}, "yanked": {VERSION: REASON}}',
                hint="delete it; tags and yanks are lost, versions are not",
            ) from error
        return names

    def _entry(self, folder: Path, names: Names) -> Entry:
        return entry_of(
            manifest_bytes(folder),
            reference=f"{self.name}@{folder.name}",
            name=self.name,
            version=folder.name,
            tags=tuple(sorted(tag for tag, v in names.tags.items() if v == folder.name)),
            yanked=names.yanked.get(folder.name),
        )


def entry_of(
    data: bytes,
    *,
    reference: str,
    name: str,
    version: str,
    tags: tuple[str, ...] = (),
    yanked: str | None = None,
) -> Entry:
    """Build the entry of an adapter from its manifest.

    Args:
        data: the contents of the manifest.
        reference: the text to type to get this version.
        name: the adapter's name in its store.
        version: the version in its store.
        tags: the tags of the version.
        yanked: the reason, if the version was yanked.

    Raises:
        FileError: the manifest cannot be read.
    """
    manifest = from_json(data, f"{MANIFEST_FILE} of {reference}")
    tensors = manifest.tensors.values()
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
        size=len(data) + sum(info.nbytes for info in tensors),
        parameters=sum(math.prod(info.shape) for info in tensors),
        yanked=yanked,
        description=manifest.description,
        license=manifest.license,
        language=manifest.language,
        topics=manifest.tags,
    )


def digest_of(folder: Path) -> str:
    """Compute the sha256 of an adapter's manifest, which contains the sha256 of its tensors."""
    return hashlib.sha256(manifest_bytes(folder)).hexdigest()


def manifest_bytes(folder: Path) -> bytes:
    """Read the bytes of an adapter's manifest.

    Raises:
        FileError: it is missing, not a regular file, or too large.
    """
    return _read(folder / MANIFEST_FILE, 0, MAX_MANIFEST_BYTES, None)


def copy_adapter(source: Path, folder: Path, digest: str) -> Path:
    """Copy the files of an adapter to a new folder atomically.

    The bytes that are written are those that were verified, so `source` may change at any time.

    Args:
        source: the adapter's folder.
        folder: the new folder.
        digest: the sha256 of the manifest that was published.

    Raises:
        OutputError: `folder` exists or cannot be written.
        FileError: `source` holds no valid adapter, or not the published one.
    """
    payload = _adapter_payload(source, digest)
    return _write_copy(folder, payload, read_adapter)


def copy_files(source: Path, folder: Path, names: Sequence[str]) -> Path:
    """Copy the named files that exist to a new folder, atomically.

    Args:
        source: the folder to copy from.
        folder: the new folder.
        names: the names of the files to copy; missing ones are skipped.

    Raises:
        OutputError: `folder` exists or cannot be written.
        FileError: a file is a link, not a regular file, empty or too large.
    """
    paths = {name: source / name for name in names if os.path.lexists(source / name)}
    payload = {name: _read(path, 0, _MAX_FILE_BYTES, None) for name, path in paths.items()}
    return _write_copy(folder, payload)


def _adapter_payload(source: Path, digest: str) -> dict[str, bytes]:
    """Read the files of an adapter, each at most as large as that of a valid one."""
    read_manifest(source)  # refuses links in the folder
    data = manifest_bytes(source)
    check_digest(source, data, digest)
    manifest = from_json(data, str(source / MANIFEST_FILE))
    size = sum(info.nbytes for info in manifest.tensors.values())
    sha256 = manifest.files[TENSORS_FILE]
    tensors = _read(source / TENSORS_FILE, size, 8 + MAX_HEADER_BYTES + size, sha256)
    payload = {MANIFEST_FILE: data, TENSORS_FILE: tensors}
    for name in PUBLISHED:
        if name not in payload and os.path.lexists(source / name):
            payload[name] = _read(source / name, 0, MAX_CARD_BYTES, None)
    return payload


def check_digest(folder: Path, manifest: bytes, digest: str) -> None:
    """Check that a manifest is the published one.

    Args:
        folder: the adapter's folder, for the error message.
        manifest: the bytes of its manifest.
        digest: the sha256 of the published manifest.

    Raises:
        FileError: it is another one.
    """
    if hashlib.sha256(manifest).hexdigest() != digest:
        raise FileError(
            f"{folder} is not what was published",
            expected=f"a manifest with sha256 {digest}",
            hint="adapterhub registry verify",
        )


def _read(path: Path, low: int, most: int, sha256: str | None) -> bytes:
    try:
        return read_file(path, low, most, sha256)
    except UnreadableError as error:
        raise FileError(f"{path}: {error}", expected="a regular file as published") from None


def _write_copy(
    folder: Path,
    payload: Mapping[str, bytes],
    verify: Callable[[Path], object] = lambda copy: None,
) -> Path:
    """Write files to a new folder; an error that `verify` raises leaves nothing."""
    with explained(folder):
        check_place(folder, False, ())
        with staging(folder) as staged:
            write_files(staged, payload)
            verify(staged)
            put_in_place(staged, folder, overwrite=False)
    return folder


def check_tags(tags: Sequence[str]) -> None:
    """Refuse invalid tags.

    Raises:
        ConfigError: a tag has other characters, or is a version number.
    """
    if invalid := [repr(tag) for tag in tags if not _TAG.fullmatch(tag)]:
        raise ConfigError(
            "invalid tags",
            offenders=invalid,
            expected="1 to 64 letters, digits and . _ -, starting with a letter or digit, and not a"
            " version number",
        )
