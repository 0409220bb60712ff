"""`ah.pull`: fetch the verified files of an adapter, and those that it was trained on.

Each adapter below is found by its digest: in the copies of a saved folder, or as the version that
the manifest names, in the registry or on the hub that the adapter above came from. The digest is
part of that one's manifest, and so of its signature: a signature of the adapter on top covers all
below it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from adapterhub.config.user_folders import expanded
from adapterhub.errors import AdapterhubError, FileError, RegistryError, one_line
from adapterhub.files.foundation import Foundation, copy_of, write_copies
from adapterhub.files.manifest import MOST_FOUNDATIONS, FoundationRef, Manifest
from adapterhub.files.native import MANIFEST_FILE, check_tensor_file, read_manifest
from adapterhub.registry.fetch import Fetched, fetch, fetch_folder
from adapterhub.registry.other_formats import copy_foreign
from adapterhub.registry.published_files import copy_adapter, digest_of
from adapterhub.registry.reference import Reference, parse_reference
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Entry, Store, version_number
from adapterhub.registry.stores import read_reference, store_of


def pull(
    reference: str | Path,
    folder: str | Path | None = None,
    *,
    backbone: str | None = None,
    registry: str | Path | None = None,
    allow_pickle: bool = False,
    signed: bool = False,
) -> Path:
    """Return a folder with the verified files of an adapter, downloaded if necessary.

    A yanked version is returned with a warning that gives the reason.

    Args:
        reference: a folder, or an adapter in a registry or on a hub.
        folder: a new folder to copy the files to; by default the store's own copy is returned.
        backbone: a backbone's id or fingerprint, to choose between adapters of the same name.
        registry: the folder of the local registry, if not the default one.
        allow_pickle: accept another library's adapter as a pickle if it has no safetensors file.
        signed: require a signature by a trusted key, also where the configuration does not.

    Raises:
        ConfigError: not a reference.
        RegistryError: not found, or the store cannot be reached.
        FileError: the files differ from the published ones.
        SignatureError: a signature is required, and there is none by a trusted key.
        OutputError: `folder` exists or cannot be written.
    """
    options = {"backbone": backbone, "registry": registry, "allow_pickle": allow_pickle}
    target = None if folder is None else expanded(folder)
    return pull_verified(reference, target, signed=signed, **options).folder  # type: ignore[arg-type]


def pull_verified(
    reference: str | Path | Reference,
    folder: Path | None = None,
    *,
    backbone: str | None = None,
    registry: str | Path | None = None,
    allow_pickle: bool = False,
    signed: bool = False,
) -> Fetched:
    """Return what `pull` does, with the digest that was verified, to load exactly these bytes.

    Args:
        reference: see `pull`.
        folder: see `pull`.
        backbone: see `pull`.
        registry: see `pull`.
        allow_pickle: see `pull`.
        signed: see `pull`.
    """
    parsed = read_reference(reference, registry, signed=signed)
    if parsed.kind == "folder":
        asked, source = parsed, fetch_folder(expanded(parsed.name), signed=signed)
        found = source if folder is None else _copied(source, folder, allow_pickle)
    else:
        store = store_of(parsed, registry, allow_pickle=allow_pickle)
        entry = store.resolve(parsed.name, parsed.version, backbone=backbone)
        found = source = fetch(parsed, store, entry, folder, signed=signed)
        asked = replace(parsed, version=entry.version)  # also where it was named by a tag
    if not (found.folder / MANIFEST_FILE).is_file():
        return found  # another library's
    try:
        on = Origins(asked, registry).bring(source.folder, source.digest)
        if folder is not None:
            write_copies(folder, on)
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # it is new
        raise
    return replace(found, reference=asked, on=on)


def _copied(fetched: Fetched, folder: Path, allow_pickle: bool) -> Fetched:
    """Copy the adapter of a folder to a new one, as `Store.get` does."""
    if not (fetched.folder / MANIFEST_FILE).is_file():
        return Fetched(copy_foreign(fetched.folder, folder, allow_pickle=allow_pickle))
    digest = fetched.digest or digest_of(fetched.folder)
    return Fetched(copy_adapter(fetched.folder, folder, digest), digest, fetched.signers)


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
