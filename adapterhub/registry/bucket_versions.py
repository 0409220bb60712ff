"""The versions in a bucket: how their files are listed, read, cached and uploaded."""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from adapterhub.config.user_folders import user_folder
from adapterhub.errors import (
    AdapterhubError,
    FileError,
    RegistryError,
)
from adapterhub.files.atomic import UnreadableError, read_file, replace_file
from adapterhub.files.manifest import MAX_HEADER_BYTES, MAX_MANIFEST_BYTES, from_json
from adapterhub.files.native import (
    CARD_FILE,
    MANIFEST_FILE,
    MAX_CARD_BYTES,
    SIGNATURE_FILE,
)
from adapterhub.files.signature import MAX_SIGNATURE_BYTES
from adapterhub.files.tensor_file import TENSORS_FILE
from adapterhub.registry.bucket import Bucket, ConflictError, Stored
from adapterhub.registry.file_names import folder_of_id, is_backbone_folder
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
    check_digest,
    date_now,
    entry_of,
    parse_date,
)
from adapterhub.registry.reference import check_name, is_name
from adapterhub.registry.store import (
    Entry,
    Publication,
    free_version,
    is_fingerprint,
    version_number,
)

_VERSION = re.compile(r"v[1-9][0-9]{0,8}")
_ATTEMPTS = 60  # to change names.json while others do
_READERS = 16  # requests at the same time


class BucketVersions:
    """The versions of all names in a bucket. A path is <backbone>/<name>.

    Args:
        bucket: the bucket.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    @property
    def location(self) -> str:
        """The URL."""
        return self._bucket.url

    def paths(self, name: str, backbone: str | None = None) -> list[str]:
        """Return where a name may have versions: a path for each backbone."""
        if not is_name(name):
            return []
        folders = [folder for folder in self._bucket.folders() if is_backbone_folder(folder)]
        if backbone is not None and not is_fingerprint(backbone):
            folders = [folder for folder in folders if folder == folder_of_id(backbone)]
        paths = [f"{folder}/{name}" for folder in folders]
        if backbone is None or not is_fingerprint(backbone):
            return paths
        return [p for p in paths if any(e.fingerprint == backbone for e in self.read_name(p)[0])]

    def files(self, path: str) -> dict[str, dict[str, str]]:
        """Return the tag of each file of each version of a name, by version in their order."""
        return _by_version(path, self._bucket.e_tags(f"{path}/"))

    def read_name(self, path: str) -> tuple[list[Entry], dict[str, AdapterhubError]]:
        """Read the versions of a name, and the errors of those that cannot be read."""
        return self._read({path: self.files(path)})

    def read_all(self) -> tuple[list[Entry], dict[str, AdapterhubError]]:
        """Read the versions of all names, and the errors of those that cannot be read."""
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
            return self.names(path)[0]
        except FileError as error:
            return error

    def _entry_or_error(
        self, at: tuple[str, str, dict[str, str]], names: Names | FileError
    ) -> Entry | FileError:
        try:
            return names if isinstance(names, FileError) else self.read_version(*at, names)
        except FileError as error:
            return error

    def read_version(
        self, path: str, version: str, files: Mapping[str, str], names: Names
    ) -> Entry:
        """Read the entry of a version.

        Args:
            path: the path of the name.
            version: the version.
            files: the tags of its files.
            names: the tags and yanks of the name.

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
        cached = bucket_cache() / "files" / key
        with suppress(UnreadableError):
            return read_file(cached, 0, most, None)
        found = self._bucket.read(path, most)
        if found and found.e_tag == e_tag:
            with suppress(OSError):  # a cache that cannot be written
                cached.parent.mkdir(parents=True, exist_ok=True)
                replace_file(cached, found.data)
        return found.data if found else None

    def download(self, entry: Entry, folder: Path) -> None:
        """Download the files of a version, none of them larger than a valid one.

        Raises:
            FileError: a file is missing or too large, or the manifest is not the published one.
            RegistryError: the bucket cannot be read.
        """
        path = f"{path_of(entry)}/{entry.version}"
        limits = {CARD_FILE: MAX_CARD_BYTES, SIGNATURE_FILE: MAX_SIGNATURE_BYTES}
        manifest = self._bucket.read(f"{path}/{MANIFEST_FILE}", MAX_MANIFEST_BYTES)
        data = manifest.data if manifest else b""
        check_digest(Path(self.location) / path, data, entry.digest)
        (folder / MANIFEST_FILE).write_bytes(data)
        limits[TENSORS_FILE] = 8 + MAX_HEADER_BYTES + from_json(data, path).nbytes
        for name, most in limits.items():
            self._bucket.download(f"{path}/{name}", folder / name, most)

    def take_number(self, path: str, publication: Publication, entries: Sequence[Entry]) -> str:
        """Take the number of a new version, which no other publisher gets.

        Args:
            path: the path of the name.
            publication: what is published, with the number that it asks for, if any.
            entries: the versions of the name.
        """
        taken = ""

        def take(names: Names) -> Names:
            nonlocal taken
            highest = max([names.highest, *(version_number(v) or 0 for v in self.files(path))])
            taken = free_version(publication.name, publication.version, entries, highest)
            return replace(names, highest=version_number(taken) or 0)

        self.change(path, take)
        return taken

    def upload(self, path: str, folder: Path) -> None:
        """Upload the files of a version, the manifest last."""
        self._bucket.write(f"{path}/{DATE_FILE}", date_now())
        for file in sorted(folder.iterdir(), key=lambda file: file.name == MANIFEST_FILE):
            self._bucket.write(f"{path}/{file.name}", file)

    def names(self, path: str) -> tuple[Names, Stored | None]:
        """Read the names.json of a name, and the object that it was read from.

        Raises:
            FileError: it is not valid.
        """
        file = f"{path}/{NAMES_FILE}"
        stored = self._bucket.read(file, MAX_NAMES_BYTES)
        names = parse_names(stored.data, f"{self.location}/{file}") if stored else Names()
        return names, stored

    def change(self, path: str, update: Callable[[Names], Names]) -> None:
        """Change the names.json of a name; again from the start if another writer was first."""
        file = f"{path}/{NAMES_FILE}"

        def attempt() -> None:
            names, stored = self.names(path)
            changed = update(names)
            if changed != names:
                self._bucket.replace(file, names_bytes(changed, path), stored)

        self.retry(attempt, file)

    def retry(self, attempt: Callable[[], None], file: str) -> None:
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

    def all_names(self) -> set[str]:
        """List the names of all backbones."""
        return {parts[1] for file in self._bucket.e_tags() if len(parts := file.split("/")) == 4}


def _by_version(path: str, files: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Group the files of a name by version, the lowest number first."""
    found: dict[str, dict[str, str]] = {}
    for file, e_tag in files.items():
        version, _, name = file[len(path) + 1 :].partition("/")
        if _VERSION.fullmatch(version) and name:
            found.setdefault(version, {})[name] = e_tag
    return dict(sorted(found.items(), key=lambda item: int(item[0][1:])))


def path_of(entry: Entry) -> str:
    """Return the path of the name of a version."""
    check_name(entry.name)
    return f"{folder_of_id(entry.backbone)}/{entry.name}"


def bucket_cache() -> Path:
    """Return the folder of this user's copies of files in buckets."""
    return user_folder("cache") / "bucket"
