"""`ah.pull`, `ah.load` and `ah.verify`: get an adapter from a folder or a store, and check it.

All checks are made here: `pull`, `load`, `lock`, `sync` and the commands get adapters only through
`fetch` and `fetch_folder`, which warn of yanked versions and check signatures.

`pull` also fetches the adapters that an adapter was trained on. Each is found by its digest, either
in the copies of a saved folder or as the version named in the manifest, in the registry or hub of
the adapter above it. The digest is part of the manifest above and so of its signature: a signature
of the top adapter covers all adapters below it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterhub.config.user_folders import expanded, is_file, is_folder
from adapterhub.errors import (
    AdapterhubError,
    FileError,
    RegistryError,
    YankedError,
    one_line,
    warn_user,
)
from adapterhub.files.manifest import MOST_FOUNDATIONS, FoundationRef, Manifest
from adapterhub.files.native import (
    MANIFEST_FILE,
    Foundation,
    Saved,
    copy_of,
    write_copies,
)
from adapterhub.interchange.pipeline_files import is_diffusers
from adapterhub.registry.foreign import CONFIG_FILE, copy_foreign
from adapterhub.registry.local import registry_at, store_of
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import (
    Entry,
    Reference,
    Store,
    holds_adapter,
    is_name,
    is_remote,
    parse_reference,
    version_number,
)
from adapterhub.registry.trust import (
    CheckedSignature,
    SignedSubject,
    check_enough,
    checked_signatures,
    current_trust,
    published_signatures,
    refuse_foreign,
    signatures_beside,
    subject_of,
)
from adapterhub.registry.version_files import copy_adapter

if TYPE_CHECKING:
    from torch import nn

    from adapterhub.adapters.adapter import Adapter


def read_reference(
    location: str | Path | Reference,
    registry: str | Path | None = None,
    *,
    signed: bool = False,
) -> Reference:
    """Parse a path or a reference; an existing folder may be written without a leading ./.

    A bare name is the folder of that name in the working directory if it contains an adapter.
    Otherwise it is in the local registry; if the registry lacks it, the error lists the contents of
    the folder. It is always in the registry

     - with a version or a tag (`name@v1`), or if the registry is named (`--registry`);
     - if signatures are required: a stranger's folder must not stand for the published adapter.

    Lock files name published versions only, and hubs are never folders. `signed` tells that the
    caller requires a signature.

    Raises:
        ConfigError: a text that has none of the four forms.
    """
    if isinstance(location, Reference):
        return location
    if isinstance(location, Path):
        return Reference("folder", str(location))
    # A folder in the current one never stands for a hub: a stranger's project may have hf:a/b.
    if not is_remote(location) and is_folder(location):
        if "/" in location or os.sep in location:
            return Reference("folder", location)
        if registry is None and "@" not in location and _is_folder(location, signed):
            return Reference("folder", f"./{location}")
    return parse_reference(location)


def named_reference(text: str, registry: str | Path | None = None) -> tuple[str, Reference]:
    """Parse `NAME=ADAPTER` or `ADAPTER`, whose name is then "".

    A folder whose path contains a `=`, such as a sweep's, is an ADAPTER.

    Raises:
        ConfigError: the adapter is not a reference.
    """
    name, equals, rest = text.partition("=")
    if not equals or is_folder(text) or "/" in name or "\\" in name:
        return "", read_reference(text, registry)
    return name, read_reference(rest, registry)


def _is_folder(name: str, signed: bool) -> bool:
    """Return whether a bare name stands for the existing folder of that name."""
    folder = Path(name)
    if not is_name(name):  # such as "my run", which is not valid in a registry
        return True
    published = registry_at(None).has(name)
    if not holds_adapter(folder):
        return not published  # raises the error of a folder without an adapter
    if current_trust(signed=signed).required:
        return False
    if published:
        warn_user(
            f"{name!r} is the folder ./{name} here; write {name}@VERSION for the published one"
        )
    return True


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
        folder: a new folder to copy the files to, or one that has them already; by default the
            store's own copy is returned.
        backbone: a backbone's id or fingerprint, to choose between adapters of the same name.
        registry: the folder of the local registry, if not the default one.
        allow_pickle: accept another library's adapter as a pickle if it has no safetensors file.
        signed: require a signature by a trusted key, also where the configuration does not.

    Raises:
        ConfigError: not a reference.
        RegistryError: not found, or the store cannot be reached.
        FileError: the files differ from the published ones.
        SignatureError: a signature by a trusted key is required but missing.
        OutputError: `folder` contains other files, or cannot be written.
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
    refuse_yanked: bool = False,
) -> Fetched:
    """Pull an adapter and return the verified digest with it, to load exactly these bytes.

    `refuse_yanked` raises an error for a yanked version.
    """
    parsed = read_reference(reference, registry, signed=signed)
    is_there = False
    if parsed.kind == "folder":
        requested, source = parsed, fetch_folder(expanded(parsed.name), signed=signed)
        fetched = source if folder is None else _copied(source, folder, allow_pickle)
    else:
        store = store_of(parsed, registry, allow_pickle=allow_pickle)
        entry = store.resolve(parsed.name, parsed.version, backbone=backbone)
        if refuse_yanked and entry.yanked is not None:
            raise YankedError(f"{entry.reference} was yanked: {one_line(entry.yanked)}")
        is_there = folder is not None and _holds(folder, entry.digest)
        source = fetch(parsed, store, entry, None if is_there else folder, signed=signed)
        fetched = source.copied_to(folder) if is_there and folder is not None else source
        requested = replace(parsed, version=entry.version)  # also if requested by a tag
    if fetched.saved is None or source.saved is None:
        return fetched  # another library's
    try:
        on = Origins(requested, registry).bring(source.saved)
        if folder is not None and not is_there:
            write_copies(folder, on)
    except BaseException:
        if folder is not None and not is_there:
            shutil.rmtree(folder, ignore_errors=True)  # it is new
        raise
    return replace(fetched, reference=requested, saved=replace(fetched.saved, on=on))


def _holds(folder: Path, digest: str) -> bool:
    """Return whether a folder has the files of a version that is on no other adapter."""
    try:
        return not Saved.at(folder, digest).check().manifest.on
    except FileError:
        return False


def _copied(fetched: Fetched, folder: Path, allow_pickle: bool) -> Fetched:
    """Copy the adapter of a folder to a new one, as `Store.get` does."""
    if fetched.saved is None:
        return Fetched(copy_foreign(fetched.folder, folder, allow_pickle=allow_pickle))
    copy_adapter(fetched.folder, folder, fetched.saved.digest)
    return fetched.copied_to(folder)


def load(
    model: nn.Module,
    reference: str | Path,
    *,
    name: str | None = None,
    any_backbone: bool = False,
    registry: str | Path | None = None,
    allow_pickle: bool = False,
    signed: bool = False,
    frozen: bool = False,
    **options: Any,
) -> Adapter:
    """Attach a saved adapter to a model, with its head and labels, and activate it.

    The adapters that it was trained on are attached as well, frozen and below it.

    If a name in the local registry exists for several backbones, the adapter for this model is
    loaded.

    Args:
        model: the backbone.
        reference: a folder, or an adapter in a registry: `"./out/polite"`, `"polite@v2"`,
            `"hf:someone/polite"`.
        name: the name to attach it under, by default the saved name; an adapter trained without a
            name has the name of its publication.
        any_backbone: skip the fingerprint check. The adapter was trained on other weights, and its
            outputs on these are not guaranteed.
        registry: the folder of the local registry, if not the default one.
        allow_pickle: accept another library's adapter as a pickle if it has no safetensors file;
            its code is not run.
        signed: require a signature by a trusted key, also where the configuration does not.
        frozen: load it without its head and frozen, for `attach(model, method, on=[NAME])`.
        options: `tokenizer`, unless `load_backbone` loaded it with the model; `any_tokenizer=True`
            skips its check; `head=False` leaves the model's own head, `head="rte"` loads this one
            of several.

    Raises:
        ConfigError: not a reference, or several heads and none is named.
        RegistryError: not found, or not for this backbone.
        FileError: the files are broken.
        SignatureError: a signature by a trusted key is required but missing.
        MismatchError: the files are valid but for another backbone; every tensor that does not fit
            is listed.
        AttachError: the name is already used on this model, or the model is not from transformers.
    """
    from adapterhub.adapters.load import load_folder
    from adapterhub.adapters.state import require_model  # imports torch, as the next

    require_model(model)
    parsed = read_reference(reference, registry, signed=signed)
    in_registry = parsed.kind == "local" and not any_backbone
    chosen = _backbone_of(model, parsed, registry) if in_registry else None
    store = {"backbone": chosen, "registry": registry, "allow_pickle": allow_pickle}
    fetched = pull_verified(parsed, signed=signed, **store)  # type: ignore[arg-type]
    name = name or _published_name(parsed, fetched.saved)
    options |= {"any_backbone": any_backbone, "allow_pickle": allow_pickle}
    options["foundation"] = _foundation(fetched) if frozen else None
    return load_folder(model, fetched.source, name=name, **options)


def _foundation(fetched: Fetched) -> Foundation:
    """Return a pulled adapter as a foundation for others.

    Raises:
        FileError: it is another library's.
    """
    if fetched.reference is None or fetched.saved is None:
        raise FileError(
            f"{fetched.folder} is another library's adapter, which has no digest",
            hint=f"adapterhub import {fetched.folder} --output DIR, and load that",
        )
    return foundation_of(fetched.reference, fetched.saved)


def _published_name(reference: Reference, saved: Saved | None) -> str | None:
    """Return the published name of an adapter trained without a name, or None."""
    if reference.kind == "folder" or saved is None or not saved.manifest.is_unnamed:
        return None
    return reference.name.rpartition("/")[2]


def _backbone_of(model: nn.Module, reference: Reference, registry: str | Path | None) -> str | None:
    """Return the fingerprint whose adapter of a name in a registry fits a model.

    None if the name has only one fingerprint: the error of `load_folder` then lists how the
    backbone differs.
    """
    from adapterhub.adapters.compatibility import backbone_differences
    from adapterhub.adapters.state import find_state, new_state

    store = registry_at(registry)
    fingerprints = {entry.fingerprint for entry in store.versions(reference.name)}
    if len(fingerprints) == 1:
        return None
    state = find_state(model) or new_state(model)
    for entry in _newest_first(store, reference, fingerprints):
        if not backbone_differences(Saved.at(store.get(entry)).manifest, state):
            return entry.fingerprint
    return state.fingerprint()


def _newest_first(
    store: Registry, reference: Reference, fingerprints: Iterable[str]
) -> list[Entry]:
    """List the versions of a reference for each fingerprint; a backbone may have two over time."""
    entries = []
    for fingerprint in fingerprints:
        with contextlib.suppress(RegistryError):  # this version is for another backbone
            entry = store.resolve(reference.name, reference.version, backbone=fingerprint)
            entries.append(entry)
    return sorted(entries, key=lambda entry: version_number(entry.version) or 0, reverse=True)


@dataclass(frozen=True)
class Origins:
    """Locations to search for the adapters below another one.

    Attributes:
        asked: the reference of the adapter on top.
        registry: the folder of the local registry, if not the default one.
        pinned: whether a lock file pins them: versions yanked since then only give a warning.
        hub: the hub behind `hf:`, if not this machine's.
    """

    asked: Reference
    registry: str | Path | None = None
    pinned: bool = False
    hub: Store | None = None

    def bring(self, saved: Saved) -> tuple[Foundation, ...]:
        """Find the adapters that one was trained on, and verify them.

        Raises:
            RegistryError: one is missing or yanked, or its store cannot be reached.
            FileError: the files of one were altered, or the adapters depend on each other in a
                cycle.
        """
        return self._below(saved, (saved.digest, str(self.asked)))

    def _below(self, saved: Saved, above: tuple[str, ...]) -> tuple[Foundation, ...]:
        """Find the adapters that one was trained on; `above` is the path so far."""
        foundations, manifest = [], saved.manifest
        for ref in manifest.on:
            _refuse_circle(manifest, ref, above)
            try:
                below = self._files(saved.folder, ref)
            except AdapterhubError as error:
                raise _in_context(error, manifest, ref) from error
            way = (*above, ref.digest, *([ref.reference] if ref.reference else []))
            foundations.append(Foundation(ref, replace(below, on=self._below(below, way))))
        return tuple(foundations)

    def _files(self, folder: Path, ref: FoundationRef) -> Saved:
        """Return the verified files of an adapter, from the folder above or a published version."""
        copy = copy_of(folder, ref)
        if (copy / MANIFEST_FILE).is_file():
            return Saved.at(copy, ref.digest).check()
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
        return fetch(parsed, store, entry).own()

    def _refuse_other_host(self, parsed: Reference) -> None:
        """Refuse to contact a host named by an adapter from another host."""
        remote = self.asked.kind in ("hub", "server")
        if remote and (parsed.kind, parsed.host) != (self.asked.kind, self.asked.host):
            raise RegistryError(
                f"{parsed} is not on the hub that {self.asked} comes from",
                expected="adapters that are published together",
                hint="ask the publisher to push it to the same hub",
            )


def foundation_of(reference: Reference, saved: Saved) -> Foundation:
    """Return the adapter found at a versioned `reference` as a foundation for others."""
    if reference.kind == "folder":
        return Foundation(FoundationRef(saved.manifest.name, saved.digest), saved)
    ref = FoundationRef(reference.name, saved.digest, reference.version, str(reference))
    return Foundation(ref, saved)


def _published(store: Store, parsed: Reference, ref: FoundationRef) -> Entry:
    """Find the published version with a digest.

    Raises:
        RegistryError: the version does not exist.
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
    """Return an error that also names the adapter that needs the missing one."""
    return type(error)(
        f"{manifest.name!r} was trained on {ref}, which cannot be used",
        offenders=[error.problem, *error.offenders],
        expected=error.expected,
        hint=error.hint,
    )


@dataclass(frozen=True)
class Fetched:
    """The folder of an adapter, its contents, and its valid signers.

    `saved` is None for another library's adapter. `signers` are public keys, trusted ones first;
    empty unless signatures were checked. `pull_verified` sets `reference`, with the version, and
    the adapters that it was trained on.
    """

    folder: Path
    saved: Saved | None = None
    signers: tuple[str, ...] = ()
    reference: Reference | None = None

    @property
    def digest(self) -> str | None:
        """The sha256 of the manifest."""
        return self.saved.digest if self.saved else None

    @property
    def source(self) -> Saved | Path:
        """The argument for `load_folder`."""
        return self.saved or self.folder

    def own(self) -> Saved:
        """Return the contents of an adapter of adapterhub.

        Raises:
            FileError: it is another library's.
        """
        return self.saved or Saved.at(self.folder)

    def copied_to(self, folder: Path) -> Fetched:
        """Return the same adapter with its files in another folder."""
        saved = self.saved and replace(self.saved, folder=folder)
        return replace(self, folder=folder, saved=saved)


def fetch_folder(path: Path, *, signed: bool = False) -> Fetched:
    """Return the folder of an adapter on this machine: `path`, or its subfolder `adapter`.

    `signed` requires a signature, also if the configuration does not.

    Raises:
        FileError: the adapter is missing, or its manifest or signatures cannot be read.
        SignatureError: a signature by a trusted key is required but missing.
    """
    trust = current_trust(signed=signed)
    native = is_file(path / MANIFEST_FILE)
    if not native and (is_file(path / CONFIG_FILE) or is_diffusers(path)):
        refuse_foreign(str(path), trust)
        return Fetched(path)
    saved = Saved.of(path)
    if not trust.required:
        return Fetched(saved.folder, saved)
    subject = SignedSubject(Reference("folder", str(saved.folder)), saved.digest)
    checked = checked_signatures(saved.signatures(), subject, trust)
    return Fetched(saved.folder, saved, check_enough(checked, subject, trust))


def fetch(
    requested: Reference,
    store: Store,
    entry: Entry,
    folder: Path | None = None,
    *,
    signed: bool = False,
    find_signers: bool = False,
) -> Fetched:
    """Return the verified files of a published version, after all checks.

    They are in `folder`, which is new, or in the store's own copy. `signed` requires a signature
    also if the configuration does not; `find_signers` looks for them also if none is required.

    Raises:
        RegistryError: the store cannot be reached.
        FileError: the files differ from the published ones, or a signature file is broken.
        SignatureError: a signature by a trusted key is required but missing.
        OutputError: `folder` cannot be written.
    """
    trust = current_trust(signed=signed)
    if entry.yanked is not None:
        warn_user(f"{entry.reference} was yanked: {one_line(entry.yanked)}", stacklevel=3)
    if not entry.fingerprint:
        refuse_foreign(entry.reference, trust)
        return Fetched(store.get(entry, folder))
    signers: tuple[str, ...] = ()
    if trust.required or find_signers:
        checked = published_signatures(requested, store, entry, store.get(entry), trust)
        signers = check_enough(checked, subject_of(requested, entry), trust)
    path = store.get(entry, folder)
    return Fetched(path, Saved.at(path, entry.digest), signers)


@dataclass(frozen=True)
class Verification:
    """The signatures of an adapter whose files are intact.

    Attributes:
        reference: the adapter.
        digest: the sha256 of its manifest.
        signatures: the signatures, each compared with the digest.
    """

    reference: str
    digest: str
    signatures: tuple[CheckedSignature, ...]

    @property
    def is_trusted(self) -> bool:
        """Whether the adapter is signed by a trusted key."""
        return any(checked.is_valid and checked.is_trusted for checked in self.signatures)


def verify(
    reference: str | Path,
    *,
    backbone: str | None = None,
    registry: str | Path | None = None,
) -> Verification:
    """Verify the files of an adapter, and check its signatures without requiring any.

    Args:
        reference: a folder, or an adapter in a registry or on a hub.
        backbone: a backbone's id or fingerprint, to choose between adapters of the same name.
        registry: the folder of the local registry, if not the default one.

    Raises:
        FileError: the files are damaged, or of another library.
        RegistryError: not found, or the store cannot be reached.
    """
    parsed = read_reference(reference, registry)
    if parsed.kind == "folder":
        saved = Saved.of(parsed.name).check()
        checked = signatures_beside(parsed, saved)
        return Verification(str(saved.folder), saved.digest, tuple(checked))
    store = store_of(parsed, registry)
    entry = store.resolve(parsed.name, parsed.version, backbone=backbone)
    if not entry.fingerprint:
        raise FileError(f"{entry.reference} is another library's adapter, which cannot be signed")
    checked = published_signatures(parsed, store, entry, store.get(entry), current_trust())
    return Verification(entry.reference, entry.digest, tuple(checked))
