"""Bring along the adapters that another one was trained on.

Each is found by its digest: in the copies of a saved folder, or as the version that the manifest
names, in the registry or on the hub that the adapter above came from. The digest is part of that
one's manifest, and so of its signature: a signature of the adapter on top covers all below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adapterhub.errors import AdapterhubError, FileError, RegistryError, one_line
from adapterhub.files.foundation import Foundation, copy_of
from adapterhub.files.manifest import MOST_FOUNDATIONS, FoundationRef, Manifest
from adapterhub.files.native import MANIFEST_FILE, check_tensor_file, read_manifest
from adapterhub.registry.fetch import fetch
from adapterhub.registry.reference import Reference, parse_reference
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Entry, Store, version_number
from adapterhub.registry.stores import store_of


@dataclass(frozen=True)
class Origins:
    """Where the adapters below one are looked for.

    Attributes:
        asked: the reference of the adapter on top.
        registry: the folder of the local registry, if not the default one.
        pinned: whether a lock file pins them: versions that were yanked since give a warning.
        hub: the hub that `hf:` stands for, if not this machine's.
    """

    asked: Reference
    registry: str | Path | None = None
    pinned: bool = False
    hub: Store | None = None

    def bring(self, folder: Path, digest: str | None = None) -> tuple[Foundation, ...]:
        """Find the adapters that the one in a folder was trained on, and verify them.

        Args:
            folder: the files of the adapter on top.
            digest: the sha256 of its manifest, if it was verified.

        Raises:
            RegistryError: one is missing or yanked, or its store cannot be reached.
            FileError: the files of one were altered, or they are on each other in a circle.
        """
        return self._below(folder, read_manifest(folder, digest), (digest or "", str(self.asked)))

    def _below(
        self, folder: Path, manifest: Manifest, above: tuple[str, ...]
    ) -> tuple[Foundation, ...]:
        """Find what one adapter was trained on; `above` are digests and references on the way."""
        found = []
        for ref in manifest.on:
            _refuse_circle(manifest, ref, above)
            try:
                own = self._files(folder, ref)
                below = read_manifest(own, ref.digest)
            except AdapterhubError as error:
                raise _in_context(error, manifest, ref) from error
            way = (*above, ref.digest, *([ref.reference] if ref.reference else []))
            found.append(Foundation(ref, own, self._below(own, below, way)))
        return tuple(found)

    def _files(self, folder: Path, ref: FoundationRef) -> Path:
        """Return the verified files of an adapter: a copy in the folder above, or published."""
        copy = copy_of(folder, ref)
        if (copy / MANIFEST_FILE).is_file():
            check_tensor_file(copy, read_manifest(copy, ref.digest))
            return copy
        if ref.reference is None:
            raise RegistryError(
                f"{copy} is missing, and {ref.name!r} was not published when it was used",
                expected="the folder of an adapter with the copies that it was saved with",
                hint="copy the whole folder again",
            )
        parsed = parse_reference(ref.reference)
        self._refuse_other_host(parsed)
        own = self.hub if parsed.kind == "hub" else None
        store = own or store_of(parsed, self.registry)
        entry = _published(store, parsed, ref)
        if entry.yanked is not None and not self.pinned:
            raise RegistryError(
                f"{entry.reference} was yanked: {one_line(entry.yanked)}",
                hint="ask the publisher for a version that is on another one",
            )
        return fetch(parsed, store, entry).folder

    def _refuse_other_host(self, parsed: Reference) -> None:
        """Refuse to call a host because an adapter of another one names it."""
        remote = self.asked.kind in ("hub", "server")
        if remote and (parsed.kind, parsed.host) != (self.asked.kind, self.asked.host):
            raise RegistryError(
                f"{parsed} is not on the hub that {self.asked} comes from",
                expected="adapters that are published together",
                hint="ask the publisher to push it to the same hub",
            )


def foundation_of(
    reference: Reference, folder: Path, digest: str, on: tuple[Foundation, ...]
) -> Foundation:
    """Return an adapter as one that others are trained on.

    Args:
        reference: where it was found, with its version.
        folder: its verified files.
        digest: the sha256 of its manifest.
        on: what it was trained on itself.
    """
    if reference.kind == "folder":
        return Foundation(FoundationRef(read_manifest(folder, digest).name, digest), folder, on)
    ref = FoundationRef(reference.name, digest, reference.version, str(reference))
    return Foundation(ref, folder, on)


def _published(store: Store, parsed: Reference, ref: FoundationRef) -> Entry:
    """Find the published version with a digest.

    Raises:
        RegistryError: there is no such version.
        FileError: the version has another digest, or cannot be read.
    """
    if isinstance(store, Registry):  # a name may have versions for several backbones
        number = version_number(parsed.version or "")
        entries = store.versions(parsed.name)
        same = [e for e in entries if version_number(e.version) == number]
        entry = next((e for e in same if e.digest == ref.digest), None)
        entry = entry or (same[0] if same else store.resolve(parsed.name, parsed.version))
    else:
        entry = store.resolve(parsed.name, parsed.version)
    if entry.digest != ref.digest:
        raise FileError(
            f"{entry.reference} is not the one that was trained on: sha256 {entry.digest[:12]}",
            expected=f"a manifest with sha256 {ref.digest[:12]}",
            hint="adapterhub registry verify, or ask the publisher",
        )
    return entry


def _refuse_circle(manifest: Manifest, ref: FoundationRef, above: tuple[str, ...]) -> None:
    if ref.digest in above or (ref.reference is not None and ref.reference in above):
        raise FileError(
            f"{manifest.name!r} is on {ref}, which is on {manifest.name!r}: a circle",
            expected="an adapter and those that were trained before it",
            hint="the files were edited: ask the publisher for others",
        )
    if len(above) > 2 * MOST_FOUNDATIONS:
        raise FileError(
            f"{manifest.name!r} is on {ref}, below too many adapters",
            expected=f"at most {MOST_FOUNDATIONS} on each other",
        )


def _in_context(error: AdapterhubError, manifest: Manifest, ref: FoundationRef) -> AdapterhubError:
    """Return an error that says which adapter needs the one that it is about."""
    return type(error)(
        f"{manifest.name!r} was trained on {ref}, which cannot be used",
        offenders=[error.problem, *error.offenders],
        expected=error.expected,
        hint=error.hint,
    )
