"""A store in a bucket, laid out like one in a folder: either can be copied to the other.

    <prefix>/<backbone>/<name>/v1/adapter.json, adapter.safetensors, ...
    <prefix>/<backbone>/<name>/names.json        tags, yanks, and the highest version so far

Nothing is locked. A publisher takes the next number by replacing names.json on the condition that
nobody else has since it was read, so two of them never share a version; then it uploads the files,
the manifest last. A version exists when its manifest does: an upload that is interrupted leaves a
number that is not used again. The same bytes, published twice at the same moment, may become two
versions.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from adapterhub.errors import (
    AdapterhubError,
    OutputError,
    RegistryError,
    did_you_mean,
    one_line,
    warn_user,
)
from adapterhub.files.native import (
    MANIFEST_FILE,
    SIGNATURE_FILE,
    check_adapter,
)
from adapterhub.files.signature import MAX_SIGNATURE_BYTES, Signature, parse_signatures
from adapterhub.registry.bucket import Bucket, Stored
from adapterhub.registry.bucket_versions import BucketVersions, bucket_cache, path_of
from adapterhub.registry.file_names import backbone_folder
from adapterhub.registry.local_versions import check_tags
from adapterhub.registry.names_file import (
    Names,
)
from adapterhub.registry.published_files import (
    PUBLISHED,
    copy_adapter,
    digest_of,
    merged_signatures,
)
from adapterhub.registry.reference import check_name
from adapterhub.registry.secrets import published_texts, refuse_leaks
from adapterhub.registry.store import (
    Entry,
    Publication,
    Query,
    Registry,
    choose_version,
    filter_entries,
    version_number,
)


class BucketRegistry(Registry):
    """A store in a bucket; see `Store` for the methods that all stores have.

    Args:
        url: s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.
        bucket: the bucket, if it is open already.
    """

    def __init__(self, url: str, bucket: Bucket | None = None) -> None:
        self._bucket = bucket or Bucket(url)
        self._versions = BucketVersions(self._bucket)

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
        cached = bucket_cache() / "adapters" / entry.digest
        target = folder or cached
        if folder is None and _is_intact(cached, entry.digest):
            return cached
        if folder is None:
            shutil.rmtree(cached, ignore_errors=True)  # a damaged copy
        with TemporaryDirectory(prefix="adapterhub-") as staged:
            self._versions.download(entry, Path(staged))
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
        digest = digest_of(folder)
        entries, _ = self._versions.read_name(path)
        version = next((entry.version for entry in entries if entry.digest == digest), None)
        if version is None:
            with TemporaryDirectory(prefix="adapterhub-") as staged:
                copy = copy_adapter(folder, Path(staged) / publication.name, digest)
                version = self._versions.take_number(path, publication, entries)
                self._versions.upload(f"{path}/{version}", copy)
        if publication.tags:
            tags = dict.fromkeys(publication.tags, version)
            self._versions.change(path, lambda names: replace(names, tags={**names.tags, **tags}))
        files = self._versions.files(path).get(version, {})
        return self._versions.read_version(path, version, files, self._versions.names(path)[0])

    def search(self, query: Query) -> list[Entry]:
        """Return the versions that match a query, in its order; warn of those that are broken."""
        found, broken = self._versions.read_all()
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
        for path in self._versions.paths(name):
            entries, problems = self._versions.read_name(path)
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
        return any(self._versions.files(path) for path in self._versions.paths(name))

    def yank(self, entry: Entry, reason: str) -> None:
        """Exclude a version from searches and from references without a version."""
        yanked = {entry.version: reason}
        path = path_of(entry)
        self._versions.change(path, lambda names: replace(names, yanked={**names.yanked, **yanked}))

    def tag(self, entry: Entry, tag: str) -> None:
        """Move a tag to a version.

        Raises:
            ConfigError: the tag is invalid.
            RegistryError: the version was deleted meanwhile.
        """
        check_tags((tag,))
        path = path_of(entry)
        if entry.version not in self._versions.files(path):
            raise RegistryError(f"{entry.reference} was deleted")
        self._versions.change(
            path, lambda names: replace(names, tags={**names.tags, tag: entry.version})
        )

    def untag(self, entry: Entry, tag: str) -> None:
        """Remove a tag of the name of a version."""

        def without(names: Names) -> Names:
            return replace(names, tags={k: v for k, v in names.tags.items() if k != tag})

        self._versions.change(path_of(entry), without)

    def delete(self, name: str, version: str, *, backbone: str | None = None) -> None:
        """Delete a version for good, also one that cannot be read; its number is not used again.

        Raises:
            RegistryError: no such version, or the name has it for several backbones.
        """
        number = f"v{version_number(version)}"
        paths = [
            path
            for path in self._versions.paths(name, backbone)
            if number in self._versions.files(path)
        ]
        if len(paths) > 1:
            raise RegistryError(f"{name!r} exists for several backbones", offenders=paths)
        if not paths:
            raise RegistryError(f"{self.location} has no {name}@{number}")
        (path,) = paths
        files = self._versions.files(path)[number]
        self._versions.change(path, lambda names: _without_version(names, number))
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

        self._versions.retry(attempt, path)

    def exists(self) -> bool:
        """Return whether the bucket can be read.

        Raises:
            RegistryError: it cannot.
        """
        self._bucket.folders()
        return True

    def verify(self) -> list[str]:
        """Download all versions, and list the problems."""
        entries, broken = self._versions.read_all()
        problems = [f"{path}: {error.problem}" for path, error in broken.items()]
        for entry in entries:
            with TemporaryDirectory(prefix="adapterhub-") as staged:
                try:
                    self._versions.download(entry, Path(staged))
                    check_adapter(Path(staged))
                except AdapterhubError as error:
                    problems.append(f"{path_of(entry)}/{entry.version}: {one_line(error.problem)}")
        return problems

    def _signature_path(self, entry: Entry) -> str:
        return f"{path_of(entry)}/{entry.version}/{SIGNATURE_FILE}"

    def _signatures(self, entry: Entry) -> tuple[tuple[Signature, ...], Stored | None]:
        path = self._signature_path(entry)
        stored = self._bucket.read(path, MAX_SIGNATURE_BYTES)
        return (parse_signatures(stored.data, path) if stored else ()), stored

    def _not_found(self, name: str, backbone: str | None, others: Iterable[Entry]) -> RegistryError:
        offenders = sorted({f"it has one for {e.backbone}, {e.fingerprint}" for e in others})
        near = "" if offenders else did_you_mean(name, self._versions.all_names())
        detail = f" for {backbone}" if offenders else near
        return RegistryError(
            f"{self.location} has no adapter {name!r}{detail}",
            offenders=offenders,
            hint=f"adapterhub list --registry {self.location}",
        )

    def _warn(self, broken: dict[str, Any]) -> None:
        if broken:
            lines = "; ".join(f"{path}: {one_line(e.problem)}"[:300] for path, e in broken.items())
            warn_user(
                f"these versions in {self.location} cannot be read and are left out: {lines}",
                stacklevel=3,
            )


def _without_version(names: Names, version: str) -> Names:
    """Return the names after a version is deleted, whose number stays taken."""
    return Names(
        {tag: at for tag, at in names.tags.items() if at != version},
        {at: reason for at, reason in names.yanked.items() if at != version},
        max(names.highest, version_number(version) or 0),
    )


def _is_intact(folder: Path, digest: str) -> bool:
    with suppress(AdapterhubError):
        check_adapter(folder)
        return digest_of(folder) == digest
    return False
