"""The files of a published version: which they are, their digest, and verified copies of them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

from adapterhub.backbones.origins import SHA256
from adapterhub.config.options import to_dict
from adapterhub.errors import FileError
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
from adapterhub.files.manifest import (
    MAX_TENSOR_BYTES,
    MAX_TENSOR_FILE_BYTES,
    from_json,
)
from adapterhub.files.native import (
    CARD_FILE,
    MANIFEST_FILE,
    MAX_CARD_BYTES,
    PEFT_FILES,
    SIGNATURE_FILE,
    Saved,
)
from adapterhub.files.schema import CRLF, with_lf
from adapterhub.files.signature import Signature, parse_signatures, signatures_to_json
from adapterhub.files.tensor_file import TENSORS_FILE
from adapterhub.registry.reference import is_name
from adapterhub.registry.store import DATE_FORMAT, Entry

# When a version was published, and which it is: its number and the start of its digest, so that the
# files of another version in its folder are noticed. Hidden: neither part of the adapter nor in its
# digest. Older releases read 64 bytes of it.
DATE_FILE = ".published"
PUBLISHED = (CARD_FILE, MANIFEST_FILE, TENSORS_FILE, SIGNATURE_FILE)
# Of a repository on a hub: the yanked versions with the reasons, and the signatures that were added
# after a version, one file for each, such as v3.sig.
YANKED_FILE = "yanked.json"
SIGNATURES_FOLDER = "signatures"
# The digests of the files of another library beside a manifest, and the signatures of that list, by
# whoever signed the manifest.
BESIDE_FILE, BESIDE_SIGNATURE = "beside.json", "beside.sig"
BESIDE = (*PEFT_FILES, BESIDE_FILE, BESIDE_SIGNATURE)  # published with an adapter, never pulled
MAX_YANKED_BYTES = 1 << 20
MAX_DATE_BYTES = 64
_STAMP_DIGITS = 32
MAX_BESIDE_BYTES = 16 << 10
_digest = schema.text(r"[0-9a-f]{64}", "a sha256 in lower-case hexadecimal")
_file_name = schema.text(r"[A-Za-z0-9_.-]{1,100}", "the name of a file")


@dataclass(frozen=True)
class FilesBeside:
    """Files that were published beside a manifest: their digests by name, and the manifest's."""

    manifest: Annotated[str, _digest]
    files: Annotated[Mapping[str, str], schema.mapping(_file_name, _digest)]
    version: Annotated[int, schema.integer(1, 1)] = 1


def beside_bytes(manifest: str, files: Mapping[str, bytes]) -> bytes:
    """Return the list of files that are published beside the manifest with a digest."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return schema.canonical_json(to_dict(FilesBeside(manifest, digests)))


def parse_beside(data: bytes) -> FilesBeside:
    """Parse the list of files beside a manifest.

    Raises:
        FileError: it cannot be read.
    """
    found, offenders = schema.parse_record(FilesBeside, data, MAX_BESIDE_BYTES)
    if found is None:
        raise FileError(f"{BESIDE_FILE} is not a list of files", offenders=offenders)
    return found


def entry_of(
    data: bytes,
    *,
    reference: str,
    name: str,
    version: str,
    tags: tuple[str, ...] = (),
    yanked: str | None = None,
    published: str | None = None,
    signers: tuple[str, ...] = (),
) -> Entry:
    """Build the entry of an adapter from its manifest.

    Raises:
        FileError: the manifest cannot be read.
    """
    manifest = from_json(data, f"{MANIFEST_FILE} of {reference}")
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
    """Return the line of a date file that says which version it is of."""
    return f"{version} {digest[:_STAMP_DIGITS]}".encode()


def check_stamp(folder: Path, digest: str) -> None:
    """Check that the files with a digest are those of the version that a folder is named after.

    The folder is opened once: another one may take its place at any time. One that an older release
    published says nothing.

    Raises:
        FileError: they are not, or the folder is not there.
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
    found = re.fullmatch(rb"[^\n]*\n(v\d{1,9}) ([0-9a-f]{32})\s*", data)
    if found is None or b" ".join(found.groups()) == stamp_bytes(folder.name, digest):
        return
    other = found[1].decode()
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
    except ValueError:  # it is only shown: no reason to refuse the version
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
    """Return an adapter's name to publish it by: its own, or that of its run if it has none."""
    path, manifest = saved.folder.resolve(), saved.manifest
    run = path.parent.name if path.name == "adapter" else path.name
    return run if manifest.is_unnamed and is_name(run) else manifest.name


def copy_adapter(
    source: Path, folder: Path, digest: str, *, date: bytes | None = None, beside: bool = False
) -> Path:
    """Copy the files of an adapter to a new folder atomically.

    The bytes that are written are those that were verified, so `source` may change at any time.
    `digest` is the sha256 of the published manifest; `date` makes a date file, for a new version.
    `beside` copies the files of another library, too.

    Raises:
        OutputError: `folder` exists or cannot be written.
        FileError: `source` holds no valid adapter, or not the published one.
    """
    saved = Saved.at(source)
    check_digest(source, saved.data, digest)
    files = {MANIFEST_FILE: saved.data} | ({DATE_FILE: date} if date else {})
    for name in (CARD_FILE, SIGNATURE_FILE):
        if os.path.lexists(source / name):
            files[name] = _read(source / name, 0, MAX_CARD_BYTES, None)
    if SIGNATURE_FILE in files:
        parse_signatures(files[SIGNATURE_FILE], str(source / SIGNATURE_FILE))
    files |= files_beside(source) if beside else {}
    with _new_copy(folder) as staged:
        saved.copy_to(staged, files)
    return folder


def files_beside(folder: Path) -> dict[str, bytes]:
    """Read the files of another library that are in an adapter's folder, by name.

    Raises:
        FileError: one is a link, not a regular file, or too large.
    """
    names = (name for name in BESIDE if os.path.lexists(folder / name))
    return {name: _read(folder / name, 0, MAX_TENSOR_BYTES, None) for name in names}


def merged_signatures(old: Sequence[Signature], new: Sequence[Signature], digest: str) -> bytes:
    """Return the contents of a signature file with new signatures, without those of other files.

    Raises:
        OutputError: they are too many.
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
        FileError: it is another one.
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
    """Name the file that cannot be used."""
    try:
        yield
    except UnreadableError as error:
        raise FileError(f"{path}: {error}", expected="a regular file as published") from None


@contextmanager
def _new_copy(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes a new one at the end; an error leaves nothing."""
    with explained(folder):
        check_place(folder, False, ())
        with staging(folder) as staged:
            yield staged
            put_in_place(staged, folder, overwrite=False)
