"""The files of a published version: which they are, their digest, and verified copies of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from adapterhub.errors import FileError
from adapterhub.files.atomic import (
    UnreadableError,
    check_place,
    explained,
    put_in_place,
    read_file,
    staging,
    write_files,
)
from adapterhub.files.manifest import (
    MAX_HEADER_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_TENSOR_BYTES,
    Manifest,
    from_json,
)
from adapterhub.files.native import (
    CARD_FILE,
    MANIFEST_FILE,
    MAX_CARD_BYTES,
    SIGNATURE_FILE,
    TENSORS_FILE,
    check_adapter,
    read_manifest,
)
from adapterhub.files.signature import Signature, read_signatures, signatures_to_json
from adapterhub.registry.reference import is_name
from adapterhub.registry.store import DATE_FORMAT, Entry

# When a version was published. Hidden: neither part of the adapter nor in its digest.
DATE_FILE = ".published"
PUBLISHED = (CARD_FILE, MANIFEST_FILE, TENSORS_FILE, SIGNATURE_FILE)
UNNAMED = "default"  # the name of an adapter that was given none
MAX_DATE_BYTES = 64
_MAX_FILE_BYTES = 8 + MAX_HEADER_BYTES + MAX_TENSOR_BYTES  # of another library's adapter


def entry_of(
    data: bytes,
    *,
    reference: str,
    name: str,
    version: str,
    tags: tuple[str, ...] = (),
    yanked: str | None = None,
    published: str | None = None,
) -> Entry:
    """Build the entry of an adapter from its manifest.

    Args:
        data: the contents of the manifest.
        reference: the text to type to get this version.
        name: the adapter's name in its store.
        version: the version in its store.
        tags: the tags of the version.
        yanked: the reason, if the version was yanked.
        published: when it was published, in UTC.

    Raises:
        FileError: the manifest cannot be read.
    """
    manifest = from_json(data, f"{MANIFEST_FILE} of {reference}")
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
    )


def date_now() -> bytes:
    """Return the contents of a version's date file: this second, in UTC."""
    return f"{datetime.now(timezone.utc).strftime(DATE_FORMAT)}\n".encode()


def publication_date(folder: Path) -> str | None:
    """Read when a version was published; None if that is not recorded, or not a date."""
    try:
        return parse_date(read_file(folder / DATE_FILE, 1, MAX_DATE_BYTES, None))
    except UnreadableError:
        return None


def parse_date(data: bytes) -> str | None:
    """Return the date in the contents of a date file, or None."""
    try:
        text = data.decode("ascii").strip()
        datetime.strptime(text, DATE_FORMAT)
    except ValueError:  # it is only shown: no reason to refuse the version
        return None
    return text


def digest_of(folder: Path) -> str:
    """Compute the sha256 of an adapter's manifest, which contains the sha256 of its tensors."""
    return hashlib.sha256(manifest_bytes(folder)).hexdigest()


def name_to_publish(folder: Path, manifest: Manifest) -> str:
    """Return the name to publish an adapter by: its own, or that of its run if it was given none.

    Args:
        folder: the adapter's folder.
        manifest: its manifest.
    """
    path = folder.resolve()
    run = path.parent.name if path.name == "adapter" else path.name
    return run if manifest.name == UNNAMED and is_name(run) else manifest.name


def manifest_bytes(folder: Path) -> bytes:
    """Read the bytes of an adapter's manifest.

    Raises:
        FileError: it is missing, not a regular file, or too large.
    """
    return _read(folder / MANIFEST_FILE, 0, MAX_MANIFEST_BYTES, None)


def copy_adapter(source: Path, folder: Path, digest: str, *, date: bytes | None = None) -> Path:
    """Copy the files of an adapter to a new folder atomically.

    The bytes that are written are those that were verified, so `source` may change at any time.

    Args:
        source: the adapter's folder.
        folder: the new folder.
        digest: the sha256 of the manifest that was published.
        date: the contents of a date file, for a new version.

    Raises:
        OutputError: `folder` exists or cannot be written.
        FileError: `source` holds no valid adapter, or not the published one.
    """
    payload = adapter_payload(source, digest) | ({DATE_FILE: date} if date else {})
    return _write_copy(folder, payload, _read_all)


def _read_all(folder: Path) -> None:
    check_adapter(folder)
    read_signatures(folder)


def merged_signatures(old: Sequence[Signature], new: Sequence[Signature], digest: str) -> bytes:
    """Return the contents of a signature file with new signatures, without those of other files.

    Args:
        old: the signatures so far.
        new: the signatures to add.
        digest: the sha256 of the manifest.

    Raises:
        OutputError: they are too many.
    """
    return signatures_to_json(s for s in (*old, *new) if s.statement.digest == digest)


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


def adapter_payload(source: Path, digest: str) -> dict[str, bytes]:
    """Read the files of an adapter, each at most as large as that of a valid one.

    Args:
        source: the adapter's folder.
        digest: the sha256 of the manifest that was published.

    Raises:
        FileError: the folder holds no valid adapter, or not the published one.
    """
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
