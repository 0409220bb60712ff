"""A store in a bucket, laid out like one in a folder: either can be copied to the other.

    <prefix>/<backbone>/<name>/v1/adapter.json, adapter.safetensors, ...
    <prefix>/<backbone>/<name>/names.json        tags, yanks, and the highest version so far

Nothing is locked. A publisher takes the next number by replacing names.json on the condition that
nobody else has since it was read, so two of them never share a version; then it uploads the files,
the manifest last. A version exists when its manifest does: an upload that is interrupted leaves a
number that is not used again. Versions that the same bytes are published as at the same moment may
be two.
"""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from platformdirs import user_cache_path

from adapterhub.errors import (
    AdapterhubError,
    FileError,
    OutputError,
    RegistryError,
    did_you_mean,
    one_line,
    warn_user,
)
from adapterhub.files.atomic import UnreadableError, read_file, replace_file
from adapterhub.files.manifest import MAX_HEADER_BYTES, MAX_MANIFEST_BYTES, from_json
from adapterhub.files.native import (
    CARD_FILE,
    MANIFEST_FILE,
    MAX_CARD_BYTES,
    SIGNATURE_FILE,
    TENSORS_FILE,
    check_adapter,
)
from adapterhub.files.signature import MAX_SIGNATURE_BYTES, Signature, parse_signatures
from adapterhub.registry.bucket import Bucket, ConflictError, Stored
from adapterhub.registry.file_names import backbone_folder, folder_of_id, is_backbone_folder
from adapterhub.registry.local_versions import check_tags
from adapterhub.registry.names_file import (
    MAX_NAMES_BYTES,
    NAMES_FILE,
    Names,
    names_bytes,
    parse_names,
)
from adapterhub.registry.published_files import (
    DATE_FILE,
    MAX_DATE_BYTES,
    PUBLISHED,
    adapter_payload,
    check_digest,
    copy_adapter,
    date_now,
    digest_of,
    entry_of,
    merged_signatures,
    parse_date,
)
from adapterhub.registry.reference import check_name, is_name
from adapterhub.registry.secrets import published_texts, refuse_leaks
from adapterhub.registry.store import (
    Entry,
    Publication,
    Query,
    Registry,
    choose_version,
    filter_entries,
    free_version,
    is_fingerprint,
    version_number,
)

_VERSION = re.compile(r"v[1-9][0-9]{0,8}")
_ATTEMPTS = 60  # to change names.json while others do
_READERS = 16  # requests at the same time


class BucketRegistry(Registry):
    """A store in a bucket; see `Store` for the methods that all stores have.

    Args:
        url: s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.
        bucket: the bucket, if it is open already.
    """

    def __init__(self, url: str, bucket: Bucket | None = None) -> None:
        self._bucket = bucket or Bucket(url)

    @property
    def location(self) -> str:
        """The URL."""
        return self._bucket.url

    def resolve(
        self, name: str, version: str | None = None, *, backbone: str | None = None
    ) -> Entry:
        """Find the version that a name refers to.

        Raises:
            RegistryError: no such name or version, or the name exists for several backbones.
            FileError: that version cannot be read.
        """
        entries = self.versions(name, backbone=backbone)
        if len(backbones := sorted({entry.backbone for entry in entries})) > 1:
            raise RegistryError(
                f"{name!r} exists for several backbones",
                offenders=backbones,
                hint=f"choose one: --backbone {backbones[0]}",
            )
        return choose_version(entries, name, version)

    def get(self, entry: Entry, folder: Path | None = None) -> Path:
        """Return the folder with the verified files of a version: `folder`, or a cached copy."""
        cached = _cache() / "adapters" / entry.digest
        target = folder or cached
        if folder is None and _is_intact(cached, entry.digest):
            return cached
        if folder is None:
            shutil.rmtree(cached, ignore_errors=True)  # a damaged copy
        with TemporaryDirectory(prefix="adapterhub-") as staged:
            self._download(entry, Path(staged))
            try:
                return copy_adapter(Path(staged), target, entry.digest)
            except OutputError:
                if folder is None and _is_intact(cached, entry.digest):  # another process did it
                    return cached
                raise

    def put(self, folder: Path, publication: Publication) -> Entry:
        """Publish an adapter's folder."""
        manifest = check_adapter(folder)
        check_name(publication.name)
        check_tags(publication.tags)
        refuse_leaks(published_texts(folder, PUBLISHED), publication.allowed)
        path = f"{backbone_folder(manifest.backbone.id)}/{publication.name}"
        payload = adapter_payload(folder, digest_of(folder))
        if SIGNATURE_FILE in payload:
            parse_signatures(payload[SIGNATURE_FILE], str(folder / SIGNATURE_FILE))
        entries, _ = self._read_name(path)
        digest = hashlib.sha256(payload[MANIFEST_FILE]).hexdigest()
        version = next((entry.version for entry in entries if entry.digest == digest), None)
        if version is None:
            version = self._take_number(path, publication, entries)
            self._upload(f"{path}/{version}", payload)
        if publication.tags:
            tags = dict.fromkeys(publication.tags, version)
            self._change(path, lambda names: replace(names, tags={**names.tags, **tags}))
        files = self._files(path).get(version, {})
        return self._read_version(path, version, files, self._names(path)[0])

    def search(self, query: Query) -> list[Entry]:
        """Return the versions that match a query, in its order; warn of those that are broken."""
        found, broken = self._read_all()
        self._warn(broken)
        if not query.all_versions:
            available = [entry for entry in found if entry.yanked is None]
            found = list({(entry.backbone, entry.name): entry for entry in available}.values())
        return filter_entries(found, query)

    def versions(self, name: str, *, backbone: str | None = None) -> Sequence[Entry]:
        """List all versions of a name, oldest first; warn of those that are broken.

        Raises:
            RegistryError: no adapter has this name.
            FileError: none of its versions can be read.
        """
        found: list[Entry] = []
        broken: dict[str, AdapterhubError] = {}
        for path in self._paths(name):
            entries, problems = self._read_name(path)
            found += entries
            broken |= problems
        entries = [e for e in found if backbone in (None, e.backbone, e.fingerprint)]
        if not entries and broken:
            raise next(iter(broken.values()))
        if not entries:
            raise self._not_found(name, backbone, found)
        self._warn(broken)
        return entries

    def has(self, name: str) -> bool:
        """Return whether there is a version of this name, readable or not."""
        return any(self._files(path) for path in self._paths(name))

    def yank(self, entry: Entry, reason: str) -> None:
        """Exclude a version from searches and from references without a version."""
        yanked = {entry.version: reason}
        path = _path_of(entry)
        self._change(path, lambda names: replace(names, yanked={**names.yanked, **yanked}))

    def tag(self, entry: Entry, tag: str) -> None:
        """Move a tag to a version.

        Raises:
            ConfigError: the tag is invalid.
            RegistryError: the version was deleted meanwhile.
        """
        check_tags((tag,))
        path = _path_of(entry)
        if entry.version not in self._files(path):
            raise RegistryError(f"{entry.reference} was deleted")
        self._change(path, lambda names: replace(names, tags={**names.tags, tag: entry.version}))

    def untag(self, entry: Entry, tag: str) -> None:
        """Remove a tag of the name of a version."""

        def without(names: Names) -> Names:
            return replace(names, tags={k: v for k, v in names.tags.items() if k != tag})

        self._change(_path_of(entry), without)

    def delete(self, name: str, version: str, *, backbone: str | None = None) -> None:
        """Delete a version for good, also one that cannot be read; its number is not used again.

        Raises:
            RegistryError: no such version, or the name has it for several backbones.
        """
        number = f"v{version_number(version)}"
        paths = [path for path in self._paths(name, backbone) if number in self._files(path)]
        if len(paths) > 1:
            raise RegistryError(f"{name!r} exists for several backbones", offenders=paths)
        if not paths:
            raise RegistryError(f"{self.location} has no {name}@{number}")
        (path,) = paths
        files = self._files(path)[number]
        self._change(path, lambda names: _without_version(names, number))
        for file in sorted(files, key=lambda file: file != MANIFEST_FILE):
            self._bucket.delete(f"{path}/{number}/{file}")

    def signatures(self, entry: Entry) -> Sequence[Signature]:
        """List the signatures of a version: those in the bucket may be newer than a cached copy's.

        Raises:
            RegistryError: the bucket cannot be read.
            FileError: the signature file is broken.
        """
        return self._signatures(entry)[0]

    def add_signatures(self, entry: Entry, signatures: Sequence[Signature]) -> None:
        """Add signatures to a published version."""
        path = self._signature_path(entry)

        def attempt() -> None:
            known, stored = self._signatures(entry)
            data = merged_signatures(known, signatures, entry.digest)
            self._bucket.replace(path, data, stored)

        self._retry(attempt, path)

    def exists(self) -> bool:
        """Return whether the bucket can be read.

        Raises:
            RegistryError: it cannot.
        """
        self._bucket.folders()
        return True

    def verify(self) -> list[str]:
        """Download all versions, and list the problems."""
        entries, broken = self._read_all()
        problems = [f"{path}: {error.problem}" for path, error in broken.items()]
        for entry in entries:
            with TemporaryDirectory(prefix="adapterhub-") as staged:
                try:
                    self._download(entry, Path(staged))
                    check_adapter(Path(staged))
                except AdapterhubError as error:
                    problems.append(f"{_path_of(entry)}/{entry.version}: {one_line(error.problem)}")
        return problems

    def _paths(self, name: str, backbone: str | None = None) -> list[str]:
        """Return where a name may have versions: a path for each backbone."""
        if not is_name(name):
            return []
        folders = [folder for folder in self._bucket.folders() if is_backbone_folder(folder)]
        if backbone is not None and not is_fingerprint(backbone):
            folders = [folder for folder in folders if folder == folder_of_id(backbone)]
        paths = [f"{folder}/{name}" for folder in folders]
        if backbone is None or not is_fingerprint(backbone):
            return paths
        return [p for p in paths if any(e.fingerprint == backbone for e in self._read_name(p)[0])]

    def _files(self, path: str) -> dict[str, dict[str, str]]:
        """Return the tag of each file of each version of a name, by version in their order."""
        return _by_version(path, self._bucket.e_tags(f"{path}/"))

    def _read_name(self, path: str) -> tuple[list[Entry], dict[str, AdapterhubError]]:
        """Read the versions of a name, and the errors of those that cannot be read."""
        return self._read({path: self._files(path)})

    def _read_all(self) -> tuple[list[Entry], dict[str, AdapterhubError]]:
        paths: dict[str, dict[str, str]] = {}
        for file, e_tag in self._bucket.e_tags().items():
            parts = file.split("/")
            if len(parts) == 4 and is_backbone_folder(parts[0]) and is_name(parts[1]):
                paths.setdefault(f"{parts[0]}/{parts[1]}", {})[file] = e_tag
        return self._read({path: _by_version(path, files) for path, files in paths.items()})

    def _read(
        self, files: dict[str, dict[str, dict[str, str]]]
    ) -> tuple[list[Entry], dict[str, AdapterhubError]]:
        """Read the manifests of complete versions, many requests at a time."""
        entries: list[Entry] = []
        broken: dict[str, AdapterhubError] = {}
        with ThreadPoolExecutor(_READERS) as pool:
            names = dict(zip(files, pool.map(self._names_or_error, files), strict=True))
            wanted = [
                (path, version, own)
                for path, versions in files.items()
                for version, own in versions.items()
                if MANIFEST_FILE in own
            ]
            results = pool.map(lambda at: self._entry_or_error(at, names[at[0]]), wanted)
            for (path, version, _), found in zip(wanted, results, strict=True):
                if isinstance(found, Entry):
                    entries.append(found)
                else:
                    broken[f"{path}/{version}"] = found
        return entries, broken

    def _names_or_error(self, path: str) -> Names | FileError:
        try:
            return self._names(path)[0]
        except FileError as error:
            return error

    def _entry_or_error(
        self, at: tuple[str, str, dict[str, str]], names: Names | FileError
    ) -> Entry | FileError:
        try:
            return names if isinstance(names, FileError) else self._read_version(*at, names)
        except FileError as error:
            return error

    def _read_version(
        self, path: str, version: str, files: Mapping[str, str], names: Names
    ) -> Entry:
        """Read the entry of a version; `files` has the tags of its files.

        Raises:
            FileError: its manifest is missing, or not valid.
        """
        name, folder = path.rpartition("/")[2], f"{path}/{version}"
        manifest = self._read_once(f"{folder}/{MANIFEST_FILE}", files, MAX_MANIFEST_BYTES)
        date = self._read_once(f"{folder}/{DATE_FILE}", files, MAX_DATE_BYTES)
        if manifest is None:
            raise FileError(f"{self.location}/{folder} has no {MANIFEST_FILE}")
        return entry_of(
            manifest,
            reference=f"{name}@{version}",
            name=name,
            version=version,
            tags=tuple(sorted(tag for tag, at in names.tags.items() if at == version)),
            yanked=names.yanked.get(version),
            published=parse_date(date) if date else None,
        )

    def _read_once(self, path: str, files: Mapping[str, str], most: int) -> bytes | None:
        """Read a file of a version, from this machine's cache if its tag is the same."""
        e_tag = files.get(path.rpartition("/")[2])
        if e_tag is None:
            return None
        key = hashlib.sha256("\n".join((self.location, path, e_tag)).encode()).hexdigest()
        cached = _cache() / "files" / key
        with suppress(UnreadableError):
            return read_file(cached, 0, most, None)
        found = self._bucket.read(path, most)
        if found and found.e_tag == e_tag:
            with suppress(OSError):  # a cache that cannot be written
                cached.parent.mkdir(parents=True, exist_ok=True)
                replace_file(cached, found.data)
        return found.data if found else None

    def _download(self, entry: Entry, folder: Path) -> None:
        """Download the files of a version, none of them larger than a valid one.

        Raises:
            FileError: a file is missing or too large, or the manifest is not the published one.
            RegistryError: the bucket cannot be read.
        """
        path = f"{_path_of(entry)}/{entry.version}"
        limits = {CARD_FILE: MAX_CARD_BYTES, SIGNATURE_FILE: MAX_SIGNATURE_BYTES}
        manifest = self._bucket.read(f"{path}/{MANIFEST_FILE}", MAX_MANIFEST_BYTES)
        data = manifest.data if manifest else b""
        check_digest(Path(self.location) / path, data, entry.digest)
        (folder / MANIFEST_FILE).write_bytes(data)
        limits[TENSORS_FILE] = 8 + MAX_HEADER_BYTES + from_json(data, path).nbytes
        for name, most in limits.items():
            if found := self._bucket.read(f"{path}/{name}", most):
                (folder / name).write_bytes(found.data)

    def _take_number(self, path: str, publication: Publication, entries: Sequence[Entry]) -> str:
        """Take the number of a new version, which no other publisher gets."""
        taken = ""

        def take(names: Names) -> Names:
            nonlocal taken
            highest = max([names.highest, *(version_number(v) or 0 for v in self._files(path))])
            taken = free_version(publication.name, publication.version, entries, highest)
            return replace(names, highest=version_number(taken) or 0)

        self._change(path, take)
        return taken

    def _upload(self, path: str, payload: dict[str, bytes]) -> None:
        """Upload the files of a version, the manifest last."""
        ordered = sorted(payload.items(), key=lambda item: item[0] == MANIFEST_FILE)
        for name, data in [(DATE_FILE, date_now()), *ordered]:
            self._bucket.write(f"{path}/{name}", data)

    def _names(self, path: str) -> tuple[Names, Stored | None]:
        file = f"{path}/{NAMES_FILE}"
        stored = self._bucket.read(file, MAX_NAMES_BYTES)
        names = parse_names(stored.data, f"{self.location}/{file}") if stored else Names()
        return names, stored

    def _change(self, path: str, update: Callable[[Names], Names]) -> None:
        """Change the names.json of a name; again from the start if another writer was first."""
        file = f"{path}/{NAMES_FILE}"

        def attempt() -> None:
            names, stored = self._names(path)
            changed = update(names)
            if changed != names:
                self._bucket.replace(file, names_bytes(changed, path), stored)

        self._retry(attempt, file)

    def _retry(self, attempt: Callable[[], None], file: str) -> None:
        """Repeat what another writer of a file was in the way of.

        Raises:
            RegistryError: others always were first.
        """
        for number in range(_ATTEMPTS):
            try:
                return attempt()
            except ConflictError:
                time.sleep(random.uniform(0, min(0.02 * 2**number, 1.0)))
        raise RegistryError(
            f"{self.location}/{file} changes all the time", hint="try again when others are done"
        )

    def _signature_path(self, entry: Entry) -> str:
        return f"{_path_of(entry)}/{entry.version}/{SIGNATURE_FILE}"

    def _signatures(self, entry: Entry) -> tuple[tuple[Signature, ...], Stored | None]:
        path = self._signature_path(entry)
        stored = self._bucket.read(path, MAX_SIGNATURE_BYTES)
        return (parse_signatures(stored.data, path) if stored else ()), stored

    def _not_found(self, name: str, backbone: str | None, others: Iterable[Entry]) -> RegistryError:
        offenders = sorted({f"it has one for {e.backbone}, {e.fingerprint}" for e in others})
        near = "" if offenders else did_you_mean(name, self._all_names())
        detail = f" for {backbone}" if offenders else near
        return RegistryError(
            f"{self.location} has no adapter {name!r}{detail}",
            offenders=offenders,
            hint=f"adapterhub list --registry {self.location}",
        )

    def _all_names(self) -> set[str]:
        return {parts[1] for file in self._bucket.e_tags() if len(parts := file.split("/")) == 4}

    def _warn(self, broken: dict[str, Any]) -> None:
        if broken:
            lines = "; ".join(f"{path}: {one_line(e.problem)}"[:300] for path, e in broken.items())
            warn_user(
                f"these versions in {self.location} cannot be read and are left out: {lines}",
                stacklevel=3,
            )


def _by_version(path: str, files: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Group the files of a name by version, the lowest number first."""
    found: dict[str, dict[str, str]] = {}
    for file, e_tag in files.items():
        version, _, name = file[len(path) + 1 :].partition("/")
        if _VERSION.fullmatch(version) and name:
            found.setdefault(version, {})[name] = e_tag
    return dict(sorted(found.items(), key=lambda item: int(item[0][1:])))


def _path_of(entry: Entry) -> str:
    check_name(entry.name)
    return f"{folder_of_id(entry.backbone)}/{entry.name}"


def _without_version(names: Names, version: str) -> Names:
    """Return the names after a version is deleted, whose number stays taken."""
    return Names(
        {tag: at for tag, at in names.tags.items() if at != version},
        {at: reason for at, reason in names.yanked.items() if at != version},
        max(names.highest, version_number(version) or 0),
    )


def _cache() -> Path:
    return user_cache_path("adapterhub", appauthor=False) / "bucket"


def _is_intact(folder: Path, digest: str) -> bool:
    with suppress(AdapterhubError):
        check_adapter(folder)
        return digest_of(folder) == digest
    return False
