"""`ah.publish`, `ah.push` and `ah.sign`: add an adapter to a registry or a hub, and sign it.

The publisher's metadata becomes part of the manifest and so of the version: the same adapter with
another licence is another version.

An adapter is published after those that it was trained on: its manifest names versions in the same
registry, or of the same owner on the same hub, so the name of the top adapter is enough to get all
of them. An adapter trained in a folder is recognized by its content, since publication adds a
licence and changes its digest.
"""

from __future__ import annotations

import hashlib
import operator
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from adapterhub.errors import (
    ConfigError,
    NotPublishedError,
    RegistryError,
    SignatureError,
    unknown,
    warn_user,
)
from adapterhub.files.atomic import explained, replace_file
from adapterhub.files.card import CARD_FILE, InPeft, card, card_bytes, read_card
from adapterhub.files.manifest import (
    FoundationRef,
    Manifest,
    to_json,
)
from adapterhub.files.native import (
    BESIDE,
    BESIDE_FILE,
    BESIDE_SIGNATURE,
    MANIFEST_FILE,
    PEFT_FILES,
    SIGNATURE_FILE,
    Saved,
    copy_of,
)
from adapterhub.files.shown_table import TEST
from adapterhub.files.signature import (
    PrivateKey,
    Signature,
    Statement,
    read_private_key,
    sign_statement,
    signatures_to_json,
)
from adapterhub.interchange.peft.files import CONFIG_FILE, kind_of_config, peft_bytes
from adapterhub.registry.local import LocalRegistry, registry_at, store_of
from adapterhub.registry.pull import fetch, read_reference
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import (
    Entry,
    Publication,
    Query,
    Reference,
    Store,
    choose_version,
    is_name,
    parse_reference,
    version_number,
)
from adapterhub.registry.trust import same_name
from adapterhub.registry.version_files import (
    PUBLISHED,
    beside_bytes,
    merged_signatures,
    name_to_publish,
)

_MOST = 10_000  # versions to compare for one backbone
_SIGNS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
_NOT_REQUESTED = "it was published without peft's files"
_NOT_SIGNED = "its signature does not cover peft's files; --sign KEY signs them"

Note = Callable[[str], None]
"""Receives one-line messages for the user, other than errors."""


@dataclass(frozen=True)
class PublicationInfo:
    """Metadata that a publisher adds; fields that are None or empty keep the manifest's value.

    Attributes:
        description: one sentence for the card and the listing.
        license: an identifier such as apache-2.0.
        language: language codes such as en.
        topics: search keywords.
    """

    description: str | None = None
    license: str | None = None
    language: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()

    def apply(self, manifest: Manifest) -> Manifest:
        """Return a copy of the manifest with this metadata."""
        fields = {name: value for name, value in asdict(self).items() if value}
        if "topics" in fields:
            fields["tags"] = fields.pop("topics")
        return replace(manifest, **fields)


def silent(text: str) -> None:
    """Ignore a message."""


def publish(
    folder: str | Path,
    name: str | None = None,
    *,
    version: str | None = None,
    tags: tuple[str, ...] = (),
    registry: str | Path | None = None,
    listing: PublicationInfo | None = None,
    sign: str | Path | PrivateKey | None = None,
    allow_findings: tuple[str, ...] = (),
    peft: bool | None = None,
    backbone: str | None = None,
    only_if: str | None = None,
    note: Note = silent,
) -> Entry:
    """Publish the adapter in a folder to a local registry; the same bytes keep their version.

    Args:
        folder: the adapter's folder, or the folder of its training run.
        name: the name to publish it under, by default its own name, or the name of its run's folder
            if it has none.
        version: the version, such as `v2`; the next one if None.
        tags: movable names for this version.
        registry: the folder of the registry, if not the default one.
        listing: description, licence, languages and topics; they become part of the manifest, and
            so of the version.
        sign: the file of a private key, or the key: sign the version.
        allow_findings: codes, from the error, of texts that look private but are not.
        peft: make peft's two files and publish them too (True), leave them out (False), or publish
            those in the folder (None).
        backbone: for `peft`, the folder or Hub id of the backbone, if not the recorded one.
        only_if: `METRIC >= TAG`, or a number in place of the tag; also with >, <= and <. Nothing is
            published if the recorded score is not so. A tag that no version has yet passes.
        note: receives messages for the user.

    Raises:
        FileError: the folder holds no valid adapter, or its files contain private information.
        ConfigError: the name, version, condition or a tag is invalid.
        BackboneError: `backbone` cannot be read.
        OutputError: `listing` is invalid, or the registry cannot be written.
        SignatureError: `sign` is missing, and the folder's signature is for other contents.
        RegistryError: the version is taken by other bytes, an adapter that this one was trained on
            is not in the registry, or `only_if` is not met.
    """
    saved, store = Saved.of(folder), registry_at(registry)
    name = name or name_to_publish(saved)
    _check_condition(only_if, saved.manifest, store, name, note)
    on = published_foundations(saved, store, Reference("local", name))
    publication = Publication(name, version, tuple(tags), allowed=tuple(allow_findings))
    files, in_peft = _files_of_peft(saved, peft, backbone, sign, note)
    words = in_peft if files or peft else None  # for the card
    info = listing or PublicationInfo()
    with prepared_folder(saved, info, name, words, on, files) as prepared:
        entry = put_signed(store, prepared, publication, saved, sign)
        _warn_of_another_version(version, entry)
        return entry


def _warn_of_another_version(version: str | None, entry: Entry) -> None:
    """Warn if the bytes already have another version than the requested one."""
    if version and version.lstrip("v") != entry.version.lstrip("v"):
        warn_user(
            f"no new version {version}: these bytes are {entry.reference} already; "
            f"adapterhub tag {entry.reference} NAME gives it another name",
            stacklevel=3,
        )


def _check_condition(
    condition: str | None, manifest: Manifest, store: Registry, name: str, note: Note
) -> None:
    """Check a condition on the recorded scores, such as `accuracy >= best`; None always holds.

    A registry keeps no predictions, so recorded scores are compared; the digests of the rows in
    both records show whether they are of the same rows.

    Raises:
        ConfigError: the condition is invalid, or an adapter has no such score.
        RegistryError: the condition is not met.
    """
    if condition is None:
        return
    parts = re.fullmatch(r"\s*([^\s<>=]+)\s*([<>]=?)\s*([^\s<>=]+)\s*", condition)
    if parts is None:
        raise ConfigError(
            f"invalid condition {condition!r}",
            expected="METRIC, one of >= > <= <, and a tag or a number",
            hint='--if "accuracy >= best", only_if="accuracy >= best"',
        )
    metric, sign, bound = parts.groups()
    if metric not in manifest.metrics:
        raise unknown("metric of this adapter", metric, manifest.metrics)
    try:
        least, place = float(bound), ""
    except ValueError:
        holder = _holder(store, name, bound, manifest.backbone.fingerprint)
        if holder is None:
            note(f"no version of {name} has the tag {bound!r} yet: nothing to compare with")
            return
        if metric not in holder.metrics:
            hint = "--if with a score that both have"
            raise ConfigError(f"{holder.reference} has no score {metric!r}", hint=hint) from None
        least, place = holder.metrics[metric], f" of {holder.reference} ({bound})"
        if (doubt := _rows_doubt(metric, manifest, holder)) is not None:
            note(f"{metric} is compared as recorded: {doubt}")
    value = manifest.metrics[metric]
    if not _SIGNS[sign](value, least):
        raise RegistryError(
            f"not published: {metric} {value:.4f} is not {sign} {least:.4f}{place}",
            expected=condition.strip(),
            hint="leave out the tag and the condition to publish it as a version without the tag",
        )


def _holder(store: Registry, name: str, tag: str, backbone: str) -> Entry | None:
    """Return the version of an adapter that has a tag or this number."""
    if isinstance(store, LocalRegistry) and not store.root.is_dir():
        return None
    try:
        return choose_version(store.versions(name, backbone=backbone), name, tag)
    except NotPublishedError:
        return None


def _rows_doubt(metric: str, manifest: Manifest, holder: Entry) -> str | None:
    """Return the reason to doubt that two scores are of the same rows; None if they are."""
    record, is_test = manifest.training.get("data"), metric.startswith(TEST)
    digests = record if isinstance(record, Mapping) else {}
    own = digests.get("test_sha256" if is_test else "eval_sha256")
    other = holder.test if is_test else holder.evaluation
    if own is None or other is None:
        return f"the rows are not recorded, and may differ from those of {holder.reference}"
    return None if own == other else f"{holder.reference} was scored on other rows"


def push(
    folder: str | Path,
    reference: str,
    *,
    visibility: Literal["public", "private"] = "public",
    tags: tuple[str, ...] = (),
    listing: PublicationInfo | None = None,
    peft: bool | None = None,
    backbone: str | None = None,
    allow_findings: tuple[str, ...] = (),
    note: Note = silent,
    sign: str | Path | PrivateKey | None = None,
) -> Entry:
    """Publish the adapter in a folder on a hub, as one commit.

    The commit contains our files, the card and, if present, peft's two files, which make the
    repository loadable with plain peft. `adapter.save(folder, peft=True)` and `peft=True` make
    them. Where peft cannot express the adapter, or is installed and computes other outputs, `note`
    and the card give the reason. `sign` also signs them; a folder that was already signed is pushed
    without them.

    Args:
        folder: the adapter's folder, or the folder of its training run.
        reference: `hf:owner/name` or `https://host/owner/name`.
        visibility: the visibility of a repository that does not exist yet.
        tags: git tags to set on this version.
        listing: description, licence, languages and topics; they become part of the manifest.
        peft: make peft's files and push them too (True), leave them out (False), or push those
            in the folder (None).
        backbone: the folder or Hub id of the backbone, whose configuration peft's files need; by
            default the one recorded with the adapter. Unless `peft` is False, they are made.
        allow_findings: codes, from the error, of texts that look private but are not.
        note: receives messages for the user.
        sign: the file of a private key, or the key: sign the version.

    Raises:
        ConfigError: the reference is not on a hub.
        FileError: the folder holds no valid adapter, or its files contain private information.
        BackboneError: `backbone` cannot be read.
        OutputError: `listing` is invalid.
        SignatureError: `sign` is missing, and the folder's signature is for other contents.
        RegistryError: the hub denies access or cannot be reached, or an adapter that this one was
            trained on is missing.
    """
    parsed = _hub_reference(reference, folder)
    saved, store = Saved.of(folder), _writable(parsed)
    on = published_foundations(saved, store, parsed)
    files, in_peft = _files_of_peft(saved, peft, backbone, sign, note)
    if not files and peft is None and in_peft.problems == (_NOT_REQUESTED,):
        note(f"without peft's files: adapterhub push {folder} {reference} --peft adds them")
    allowed = tuple(allow_findings)
    publication = Publication(parsed.name, parsed.version, tuple(tags), visibility, allowed)
    target, info = str(replace(parsed, version=None)), listing or PublicationInfo()
    with prepared_folder(saved, info, target, in_peft, on, files) as prepared:
        return put_signed(store, prepared, publication, saved, sign)


def _writable(parsed: Reference) -> Store:
    """Open a hub and check the write permission before computing anything.

    Raises:
        RegistryError: the token may not write, or the hub cannot be reached.
    """
    from adapterhub.registry.hub import HubStore  # huggingface_hub is slow to import

    store = store_of(parsed)
    assert isinstance(store, HubStore)
    store.check_writer(parsed.name)
    return store


def _hub_reference(reference: str, folder: str | Path) -> Reference:
    parsed = parse_reference(reference)
    if parsed.kind not in ("hub", "server"):
        raise ConfigError(
            f"{reference!r} is not on a hub",
            expected="hf:owner/name or https://host/owner/name",
            hint=f"adapterhub publish {folder} for the local registry",
        )
    return parsed


def _files_of_peft(
    saved: Saved,
    make: bool | None,
    backbone: str | None,
    key: str | Path | PrivateKey | None,
    note: Note,
) -> tuple[dict[str, bytes], InPeft]:
    """Return peft's files to publish with an adapter, by name, and the card's note on peft.

    Files in the folder are used, unless `make` or a backbone requests new ones.
    """
    if make is False:
        return {}, InPeft(None, (_NOT_REQUESTED,))
    make = make or backbone is not None
    files = {} if make else saved.beside()
    if not make and not files.keys() >= set(PEFT_FILES):
        return {}, InPeft(None, (_NOT_REQUESTED,))
    if key is None and BESIDE_SIGNATURE not in files and saved.signatures():
        files, in_peft = {}, InPeft(None, (_NOT_SIGNED,))
    elif make:
        files, in_peft = peft_files(saved, backbone)
    else:
        in_peft = InPeft(kind_of_config(files.get(CONFIG_FILE, b"")))
    note(_peft_note(in_peft, compared=not make or bool(find_spec("peft"))))
    return files, in_peft


def _peft_note(in_peft: InPeft, *, compared: bool) -> str:
    if not in_peft.problems:
        words = "" if compared else "; outputs not compared, peft is not installed"
        return f"plain peft can load it: peft's two files are included{words}"
    more = f" (and {len(in_peft.problems) - 1} more)" if len(in_peft.problems) > 1 else ""
    return f"plain peft cannot load it: {in_peft.problems[0]}{more}"


@contextmanager
def prepared_folder(
    saved: Saved,
    info: PublicationInfo,
    reference: str,
    peft: InPeft | None = None,
    on: tuple[FoundationRef, ...] = (),
    beside: Mapping[str, bytes] | None = None,
) -> Iterator[Saved]:
    """Provide the adapter in its published form, for the duration of the context.

    The source is used unchanged if nothing differs. `reference` loads the adapter, for the card;
    `beside` are peft's files to publish with it, by name.

    Raises:
        FileError: the tensors differ from the manifest.
        OutputError: the metadata is invalid.
    """
    manifest = saved.manifest
    published = replace(info.apply(manifest), on=on)
    is_own_name = reference.rpartition("/")[2] == manifest.name  # the title of its card
    has_others = any(os.path.lexists(saved.folder / name) for name in BESIDE)
    if published == manifest and peft is None and is_own_name and not has_others:
        yield saved
        return
    text = card(published, read_card(saved.folder), reference=reference, peft=peft)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        files = {
            MANIFEST_FILE: to_json(published),
            CARD_FILE: card_bytes(text),
            **(beside or {}),
        }
        saved.copy_to(folder, files)
        yield Saved.at(folder)


def peft_files(saved: Saved, backbone: str | None) -> tuple[dict[str, bytes], InPeft]:
    """Convert an adapter to peft's files.

    `backbone` is the folder or Hub id of the backbone, if not the one in the manifest.

    Returns:
        peft's files by name, empty if peft cannot express the adapter, and the reasons for the
        card.

    Raises:
        FileError: the tensors differ from the manifest.
        BackboneError: `backbone` cannot be read.
    """
    from adapterhub.adapters.export import in_peft  # imports torch and transformers

    conversion = in_peft(saved, backbone)
    summary = InPeft(conversion.kind, conversion.problems)
    if conversion.files is None:
        return {}, summary
    return peft_bytes(conversion.files), summary


def put_signed(
    store: Store,
    saved: Saved,
    publication: Publication,
    source: Saved,
    key: str | Path | PrivateKey | None,
) -> Entry:
    """Publish an adapter with the signatures of its source, and with a new one.

    `source` is the original. Without a key, no signature is added.

    Raises:
        SignatureError: the key is missing, and a signature in `source` is for other contents.
        RegistryError: the version is taken by other bytes, or the store denies write access.
        FileError: the adapter is damaged, or the key cannot be read.
    """
    private = None if key is None else read_private_key(key)
    digest, signatures = saved.digest, source.signatures()
    carried = [s for s in signatures if _is_about(s.statement, digest, publication.name)]
    if private is None and len(carried) < len(signatures):
        raise SignatureError(
            f"{source.folder / SIGNATURE_FILE} is not for what is published as {publication.name}",
            offenders=[f"it is for {s.statement.name}" for s in signatures if s not in carried],
            hint=f"--sign KEY to sign it again, or delete {SIGNATURE_FILE}",
        )
    if private is None and not carried:
        return store.put(saved, publication)
    stated = (s.statement.version for s in carried if s.statement.version)
    publication = replace(publication, version=publication.version or next(stated, None))
    version, is_published = store.version_for(saved, publication)
    if private is not None:
        carried.append(sign_statement(Statement(digest, publication.name, version), private))
    publication = replace(publication, version=version)
    entry = _put_with(store, saved, publication, carried, private)
    if is_published:
        store.add_signatures(entry, carried)
    return entry


def _is_about(statement: Statement, digest: str, name: str) -> bool:
    return statement.digest == digest and same_name(statement.name, name)


def _put_with(
    store: Store,
    saved: Saved,
    publication: Publication,
    signatures: Sequence[Signature],
    key: PrivateKey | None,
) -> Entry:
    """Publish an adapter with exactly these signatures; a key also signs peft's files in it."""
    with tempfile.TemporaryDirectory() as path:
        copy = Path(path)
        for name in (*PUBLISHED, *BESIDE):
            if name != SIGNATURE_FILE and (saved.folder / name).is_file():
                _link(saved.folder / name, copy / name)
        (copy / SIGNATURE_FILE).write_bytes(signatures_to_json(signatures))
        saved = replace(saved, folder=copy)
        beside = {file: data for file, data in saved.beside().items() if file in PEFT_FILES}
        if key is not None and beside:
            for file in (BESIDE_FILE, BESIDE_SIGNATURE):  # signatures of an earlier publication
                (copy / file).unlink(missing_ok=True)
            data = beside_bytes(saved.digest, beside)
            statement = Statement(
                hashlib.sha256(data).hexdigest(), publication.name, publication.version
            )
            (copy / BESIDE_FILE).write_bytes(data)
            signature = signatures_to_json([sign_statement(statement, key)])
            (copy / BESIDE_SIGNATURE).write_bytes(signature)
        return store.put(saved, publication)


def _link(source: Path, target: Path) -> None:
    """Link a file, which may be large, or copy it to another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def published_foundations(
    saved: Saved, store: Store, target: Reference
) -> tuple[FoundationRef, ...]:
    """Return the records of the adapters below one, for its published manifest.

    The adapter is to be published in `store` as `target`.

    Raises:
        RegistryError: an adapter below is not published there, or is yanked.
        FileError: the files of one cannot be read.
    """
    return tuple(_published_ref(saved, ref, store, target) for ref in saved.manifest.on)


def _published_ref(
    saved: Saved, ref: FoundationRef, store: Store, target: Reference
) -> FoundationRef:
    manifest = saved.manifest
    copy, content = copy_of(saved.folder, ref), None
    if (copy / MANIFEST_FILE).is_file():
        content = _content(Saved.at(copy, ref.digest).manifest)
    for entry in _candidates(manifest, ref, store, target):
        if entry.yanked is not None or not entry.fingerprint:
            continue
        if entry.digest != ref.digest:
            parsed = parse_reference(entry.reference)
            if content is None or content != _content(fetch(parsed, store, entry).own().manifest):
                continue
        return FoundationRef(entry.name, entry.digest, entry.version, entry.reference)
    command = _command(ref, target)
    raise RegistryError(
        f"{manifest.name!r} was trained on {ref.name!r}, which is not published with it",
        offenders=[f"{ref}, sha256 {ref.digest[:12]}"],
        expected="the adapters below it in the same registry, or of the same owner on the hub",
        hint=f"{command.format(copy if content else 'FOLDER')} first, then this one",
    )


def _candidates(
    manifest: Manifest, ref: FoundationRef, store: Store, target: Reference
) -> Iterator[Entry]:
    """Yield the versions that may be an adapter below, the newest first."""
    if isinstance(store, Registry):
        query = Query(all_versions=True, sort="newest", limit=_MOST)
        is_new = isinstance(store, LocalRegistry) and not store.root.is_dir()
        entries = [] if is_new else store.search(query)
        yield from (entry for entry in entries if _may_be(entry, manifest))
        return
    recorded = parse_reference(ref.reference) if ref.reference else target
    same_hub = (recorded.kind, recorded.host) == (target.kind, target.host)
    names = [recorded.name] if same_hub and ref.reference else []
    names.append(f"{target.name.partition('/')[0]}/{ref.name.rpartition('/')[2]}")
    for name in dict.fromkeys(names):
        try:
            yield from reversed(store.versions(name))
        except RegistryError:  # no adapter has this name
            continue


def _may_be(entry: Entry, manifest: Manifest) -> bool:
    backbone = manifest.backbone
    return entry.fingerprint == backbone.fingerprint or entry.backbone == backbone.id


def _content(manifest: Manifest) -> Manifest:
    """Return a manifest without the fields that publishing may change."""
    return replace(manifest, name="", on=(), description=None, license=None, language=(), tags=())


def _command(ref: FoundationRef, target: Reference) -> str:
    name = ref.name.rpartition("/")[2]
    if target.kind == "local":
        return f"adapterhub publish {{}} --name {name if is_name(name) else 'NAME'}"
    owner = replace(target, name=f"{target.name.partition('/')[0]}/{name}", version=None)
    return f"adapterhub push {{}} {owner}"


def sign(
    reference: str | Path,
    key: str | Path | PrivateKey,
    *,
    name: str | None = None,
    version: str | None = None,
    backbone: str | None = None,
    registry: str | Path | None = None,
) -> Signature:
    """Sign the adapter in a folder, or a version in a local registry.

    Args:
        reference: the folder of an adapter or a run, or a name in a local registry.
        key: the file of the private key, or the key.
        name: for a folder, the name to sign, if not the adapter's own.
        version: for a folder, the version to sign, such as `v3`; any if None.
        backbone: a backbone's id or fingerprint, to choose between adapters of the same name.
        registry: the folder of the local registry, if not the default one.

    Returns:
        The signature, which is also written next to the manifest.

    Raises:
        ConfigError: the reference is on a hub, or has its own name and version.
        FileError: the adapter is damaged, or the key cannot be read.
        RegistryError: no such adapter.
        OutputError: the signature cannot be written.
    """
    parsed = read_reference(reference, registry)
    if parsed.kind == "folder":
        return _sign_folder(Saved.of(parsed.name).check(), read_private_key(key), name, version)
    if parsed.kind != "local":
        raise ConfigError(
            f"{reference} is on a hub: sign the files that you have, not those a hub gives",
            hint=f"adapterhub push FOLDER {replace(parsed, version=None)} --sign KEY",
        )
    if name or version:
        raise ConfigError(f"{reference} has its own name and version", expected="a folder")
    store = store_of(parsed, registry)
    entry = store.resolve(parsed.name, parsed.version, backbone=backbone)
    store.get(entry)
    signature = sign_statement(
        Statement(entry.digest, entry.name, entry.version), read_private_key(key)
    )
    store.add_signatures(entry, [signature])
    return signature


def _sign_folder(saved: Saved, key: PrivateKey, name: str | None, version: str | None) -> Signature:
    if version is not None and version_number(version) is None:
        raise ConfigError(f"invalid version {version!r}", expected="v1, v2, ...")
    number = version and f"v{version_number(version)}"
    own = name or name_to_publish(saved)
    signature = sign_statement(Statement(saved.digest, own, number), key)
    with explained(saved.folder):
        data = merged_signatures(saved.signatures(), [signature], saved.digest)
        replace_file(saved.folder / SIGNATURE_FILE, data)
    return signature
