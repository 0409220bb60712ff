"""A store on the Hugging Face Hub, or on a self-hosted hub with the same protocol.

A repository holds one adapter. A version is a git tag `v1`, `v2`, ... on a commit; all other git
tags are tags. Each publication is one commit on `main` whose parent is the head that the writer
saw. In repositories without such tags, created by other tools, a version is a commit.

A hub is not trusted: `hub_client` limits the size and time of responses and `hub_reader` checks
them. An adapter enters the cache only after its manifest matches the digest of its entry and its
tensors match the digest in the manifest. Each hub has its own cache and receives only its own
token.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapterhub.backbones.hub_network import is_commit
from adapterhub.errors import (
    AdapterhubError,
    ConfigError,
    FileError,
    NotPublishedError,
    OutputError,
    RegistryError,
    warn_user,
)
from adapterhub.files import schema
from adapterhub.files.atomic import sync_files
from adapterhub.files.card import CARD_FILE, MAX_CARD_BYTES
from adapterhub.files.manifest import (
    MAX_HEADER_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_TENSOR_BYTES,
    from_json,
)
from adapterhub.files.native import (
    BESIDE,
    MANIFEST_FILE,
    SIGNATURE_FILE,
    TENSORS_FILE,
    Saved,
    published_texts,
)
from adapterhub.files.signature import (
    MAX_SIGNATURE_BYTES,
    Signature,
    parse_signatures,
    signatures_to_json,
)
from adapterhub.registry.foreign import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    copy_foreign,
    entry_of_foreign,
    files_to_copy,
    foreign_digest,
)
from adapterhub.registry.hub_client import Expected, HubClient, UnreachableError
from adapterhub.registry.hub_reader import (
    MOST_RESULTS,
    HubCache,
    HubReader,
    Refs,
)
from adapterhub.registry.hub_writer import HubWriter, entry_from_card, hub_card
from adapterhub.registry.secrets import refuse_leaks
from adapterhub.registry.store import (
    Entry,
    Publication,
    Query,
    check_tags,
    choose_version,
    filter_entries,
    free_version,
    version_number,
)
from adapterhub.registry.tokens import token_for
from adapterhub.registry.version_files import (
    PUBLISHED,
    SIGNATURES_FOLDER,
    YANKED_FILE,
    copy_adapter,
    entry_of,
    is_intact,
    merged_signatures,
)

MOST_VERSIONS = 100  # in a list, since each needs a request; any version can be requested by number
MOST_LOOKUPS = 100  # repositories in a search whose cards are insufficient
_LISTED = {MANIFEST_FILE: MAX_MANIFEST_BYTES, CONFIG_FILE: MAX_CONFIG_BYTES}
MAX_SMALL_FILE_BYTES = 2 * MAX_CARD_BYTES  # a card gets metadata when it is pushed


class HubStore:
    """A store on a hub; adapter names have the form `owner/name`. See `Store` for the methods.

    `endpoint` is the URL of a hub other than huggingface_hub's default; `token` replaces the token
    that belongs to this hub; False sends none. `allow_pickle` accepts other libraries' adapters as
    pickles if they have no safetensors file.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        token: str | bool | None = None,
        *,
        allow_pickle: bool = False,
    ) -> None:
        from huggingface_hub import constants  # slow to import

        base = (endpoint or constants.ENDPOINT).rstrip("/")
        own_token = token if isinstance(token, str) else None
        if token is None or token is True:
            own_token = token_for(base)
        self.allow_pickle = allow_pickle
        self.prefix = f"{endpoint}/" if endpoint else "hf:"
        self._reader = HubReader(HubClient(base, own_token), self.prefix)
        self._writer = HubWriter(base, own_token, self.prefix)
        self._cache = HubCache(base)
        self._commits: dict[tuple[str, str], str] = {}  # that the versions here were resolved to

    def resolve(
        self, name: str, version: str | None = None, *, backbone: str | None = None
    ) -> Entry:
        """Find the version that a name refers to."""
        entry = self._resolve(name, version)
        _refuse_other_backbone(entry, backbone)
        return entry

    def get(self, entry: Entry, folder: Path | None = None) -> Path:
        """Return the folder with the verified files of a version: `folder`, or one in the cache."""
        if not entry.fingerprint:
            _require_commit(entry)
        cached = self._cache.adapter(entry.digest)
        if cached.exists() and entry.fingerprint and not is_intact(cached, entry.digest):
            shutil.rmtree(cached)
        if not cached.exists():
            self._download(entry) if entry.fingerprint else self._download_foreign(entry)
        if entry.fingerprint:
            return cached if folder is None else copy_adapter(cached, folder, entry.digest)
        # The cache may hold a pickle that an earlier call allowed.
        names = [path.name for path in cached.iterdir()]
        files_to_copy(names, entry.reference, allow_pickle=self.allow_pickle)
        if folder is None:
            return cached
        return copy_foreign(cached, folder, allow_pickle=self.allow_pickle)

    def check_writer(self, name: str) -> None:
        """Check that the token may write to a repository.

        Raises:
            RegistryError: it may not, or the hub cannot be reached.
        """
        self._reader.check_writer(name)

    def put(self, folder: Path | Saved, publication: Publication) -> Entry:
        """Publish an adapter's folder as one commit."""
        saved = Saved.at(folder).check()
        saved.signatures()
        check_tags(publication.tags)
        texts, tensors = _checked_files(saved, publication)
        refs, entries = self._created(publication)
        version, is_known = _version_for(saved, publication, refs, entries)
        name = publication.name
        if is_known:
            commit = refs.tags[version]
            if version == entries[-1].version:
                self._add_beside(texts, tensors, entries[-1], refs.head)
        else:
            commit = self._commit_version(texts, tensors, publication, version, refs.head, entries)
        for tag in publication.tags:
            self._tag(name, tag, commit)
        return self._resolve(name, version)

    def version_for(self, folder: Path | Saved, publication: Publication) -> tuple[str, bool]:
        """Return the version that `put` would answer with, and whether it is published already.

        The repository is created first: only the hub has the version numbers of a deleted one.
        """
        check_tags(publication.tags)
        saved = Saved.at(folder)
        _checked_files(saved, publication)
        return _version_for(saved, publication, *self._created(publication))

    def search(self, query: Query) -> list[Entry]:
        """Return the versions that match a query: the hub filters by tags, this method the rest."""
        filters = ["adapterhub"]
        backbone = query.backbone or ""
        if "/" in backbone:  # the Hub indexes neither fingerprints nor ids without an owner
            filters.append(f"base_model:adapter:{backbone}")
        entries: list[Entry] = []
        lookups = []
        for item in self._reader.search(filters, query.owner):
            entry = entry_from_card(item.get("cardData"), item["id"], self.prefix)
            if entry is None or query.all_versions or YANKED_FILE in _file_names(item):
                lookups.append(item["id"])
            else:
                entries.append(entry)
        if len(lookups) > MOST_LOOKUPS:
            warn_user(
                f"{len(lookups) - MOST_LOOKUPS} more repositories match; narrow the search",
                stacklevel=2,
            )
        for name in lookups[:MOST_LOOKUPS]:
            if len(entries) < MOST_RESULTS:
                entries += self._available(name, query.all_versions)
        return filter_entries(entries, query)

    def versions(self, name: str, *, backbone: str | None = None) -> Sequence[Entry]:
        """List the versions of a name, oldest first: the newest `MOST_VERSIONS` of them."""
        entries = self._entries(name, self._refs(name)) or [self._resolve(name, None)]
        _refuse_other_backbone(entries[-1], backbone)
        return entries

    def everything_of(self, owner: str) -> Iterator[tuple[str, list[Entry], dict[str, str]]]:
        """Yield each repository of an owner: its name, its adapters and its damaged versions.

        A repository without versions has the adapter at its head. Damaged versions have a reason.
        """
        for name in self._reader.repositories(owner):
            refs = self._online_refs(name)
            stubs: Sequence[Entry | None] = _stubs(name, refs) or [None]
            entries, damaged = [], {}
            for stub in stubs:
                version = stub.version if stub else "main"
                try:
                    entry = self._entry_of(name, refs, stub) if stub else self._resolve(name, None)
                except UnreachableError:
                    raise
                except AdapterhubError as error:
                    damaged[f"{self.prefix}{name}@{version}"] = error.problem
                    continue
                entries.append(entry)
            yield name, entries, damaged if any(map(version_number, refs.tags)) else {}

    def yank(self, entry: Entry, reason: str) -> None:
        """Exclude a version from searches, by a file in its repository."""
        refs = self._online_refs(entry.name)
        files = {YANKED_FILE: schema.canonical_json({**refs.yanked, entry.version: reason})}
        self._writer.commit(entry.name, files, f"Yank {entry.version}", refs.head)

    def tag(self, entry: Entry, tag: str) -> None:
        """Let a tag name a version."""
        check_tags((tag,))
        self._tag(entry.name, tag, self._commit_of(entry))

    def untag(self, entry: Entry, tag: str) -> None:
        """Remove a tag of the name of a version."""
        self._writer.delete_tag(entry.name, tag)

    def delete(self, name: str, version: str, *, backbone: str | None = None) -> None:
        """Delete a version permanently from a hub of adapterhub.

        Args:
            name: the repository.
            version: the version number.
            backbone: a backbone's id or fingerprint, which must match the version.

        Raises:
            ConfigError: the hub does not support deletion.
            RegistryError: no such version, or the token does not allow it.
        """
        if "delete-version" not in self._reader.own_words():
            raise ConfigError(
                f"{self.prefix}{name} is on a hub that deletes no versions",
                hint=f"adapterhub yank {self.prefix}{name}@{version} --reason REASON withdraws one",
            )
        _refuse_other_backbone(self._resolve(name, version), backbone)
        self._writer.delete_version(name, version)

    def signatures(self, entry: Entry) -> Sequence[Signature]:
        """List the signatures that were added to a version after its publication."""
        return self._added_signatures(entry, self._refs(entry.name))

    def add_signatures(self, entry: Entry, signatures: Sequence[Signature]) -> None:
        """Add signatures to a version, by a file on `main`: a tag never moves."""
        refs = self._online_refs(entry.name)
        added = self._added_signatures(entry, refs)
        data = merged_signatures(added, signatures, entry.digest)
        files = {_signatures_file(entry): data}
        self._writer.commit(entry.name, files, f"Sign {entry.version}", refs.head)

    def _created(self, publication: Publication) -> tuple[Refs, list[Entry]]:
        """Create a repository unless it exists; return its refs and versions.

        The next commit has its head as parent and fails if another publication comes first.
        """
        name = publication.name
        self._writer.create(name, private=publication.visibility == "private")
        refs = self._online_refs(name)
        return refs, [self._entry_of(name, refs, stub) for stub in _stubs(name, refs)]

    def _added_signatures(self, entry: Entry, refs: Refs) -> Sequence[Signature]:
        if not refs.head:
            return ()
        file = _signatures_file(entry)
        data = self._reader.small_file(entry.name, refs.head, file, MAX_SIGNATURE_BYTES)
        return () if data is None else parse_signatures(data, f"{file} of {entry.reference}")

    def _resolve(self, name: str, version: str | None) -> Entry:
        if version is not None and is_commit(version):
            return self._entry(name, version, version)
        refs = self._refs(name)
        if stubs := _stubs(name, refs):
            stub = choose_version(stubs, name, version)
            entry = self._entry(name, refs.tags[stub.version], stub.version)
            return replace(entry, tags=stub.tags, yanked=stub.yanked)
        revision = version or "main"
        commit = refs.branches.get(revision) or refs.tags.get(revision)
        commit = commit or self._reader.commit_of(name, revision)
        return self._entry(name, commit, commit)

    def _refs(self, name: str) -> Refs:
        """Return the refs and yanked versions of a repository; the last cached ones if offline."""
        try:
            return self._online_refs(name)
        except UnreachableError:
            known = self._cache.refs(name)
            if known is None:
                raise
            return known

    def _online_refs(self, name: str) -> Refs:
        refs = self._reader.refs(name)
        numbered = any(map(version_number, refs.tags))
        if numbered and refs.head:
            refs = replace(refs, yanked=self._reader.yanked(name, refs.head))
        self._cache.keep_refs(name, refs)
        return refs

    def _entries(self, name: str, refs: Refs) -> list[Entry]:
        """Return the entries of the newest numbered versions, oldest first."""
        stubs = _stubs(name, refs)
        if len(stubs) > MOST_VERSIONS:
            older = len(stubs) - MOST_VERSIONS
            warn_user(f"{name}: {older} older versions are not listed", stacklevel=4)
        return [self._entry_of(name, refs, stub) for stub in stubs[-MOST_VERSIONS:]]

    def _entry_of(self, name: str, refs: Refs, stub: Entry) -> Entry:
        entry = self._entry(name, refs.tags[stub.version], stub.version, in_list=True)
        return replace(entry, tags=stub.tags, yanked=stub.yanked)

    def _entry(self, name: str, commit: str, version: str, *, in_list: bool = False) -> Entry:
        """Return the entry of a commit; for a list, from the last cached manifest."""
        file, data = self._manifest_or_config(name, commit, in_list)
        if file == CONFIG_FILE:
            version = commit  # the commit pins its files, which lack a digest of ours
        make = entry_of if file == MANIFEST_FILE else entry_of_foreign
        self._commits[name, version] = commit
        return make(data, reference=f"{self.prefix}{name}@{version}", name=name, version=version)

    def _manifest_or_config(self, name: str, commit: str, in_list: bool) -> tuple[str, bytes]:
        for file in _LISTED if in_list else ():
            if (data := self._cache.manifest(name, commit, file)) is not None:
                return file, data
        try:
            first = self._reader.first_file(name, commit, _LISTED)
        except UnreachableError:
            if in_list:
                raise
            try:
                return self._manifest_or_config(name, commit, in_list=True)
            except UnreachableError:
                pass
            raise
        if first is None:
            raise FileError(
                f"{self.prefix}{name} holds no adapter",
                expected=f"{MANIFEST_FILE}, or another library's {CONFIG_FILE}",
            )
        self._cache.keep_manifest(name, commit, *first)
        return first

    def _download(self, entry: Entry) -> None:
        """Download a version into the cache, starting with the manifest and its digests."""
        name, commit = entry.name, self._commit_of(entry)
        data = self._manifest_of(entry, commit)
        manifest = from_json(data, f"{MANIFEST_FILE} of {entry.reference}")
        size = sum(info.nbytes for info in manifest.tensors.values())
        sha256 = manifest.files.get(TENSORS_FILE)
        if size > MAX_TENSOR_BYTES or sha256 is None:
            raise FileError(
                f"{entry.reference} has no tensors, or more than {MAX_TENSOR_BYTES} bytes"
            )
        tensors = Expected(8 + MAX_HEADER_BYTES + size, sha256=sha256)
        with self._cache.adding(entry.digest) as staged, _progress(entry, size, staged) as update:
            (staged / MANIFEST_FILE).write_bytes(data)
            self._reader.download(
                name, commit, TENSORS_FILE, staged / TENSORS_FILE, tensors, progress=update
            )
            for file in set(PUBLISHED) - {MANIFEST_FILE, TENSORS_FILE}:
                optional = self._reader.small_file(name, commit, file, MAX_SMALL_FILE_BYTES)
                if file == SIGNATURE_FILE and optional is not None:
                    # The commits after a signed version also have its file.
                    signed = parse_signatures(optional, f"{file} of {entry.reference}")
                    own = [each for each in signed if each.statement.digest == entry.digest]
                    optional = signatures_to_json(own) if own else None
                if optional is not None:
                    (staged / file).write_bytes(optional)
            Saved.at(staged).check()
            sync_files(staged)

    def _download_foreign(self, entry: Entry) -> None:
        """Download another library's adapter; the listing of the commit has the digests."""
        listing = self._reader.listing(entry.name, entry.version)
        names = files_to_copy(listing, entry.reference, allow_pickle=self.allow_pickle)
        size = sum(listing[name].limit for name in names)
        with self._cache.adding(entry.digest) as staged, _progress(entry, size, staged) as update:
            for file in names:
                self._reader.download(
                    entry.name, entry.version, file, staged / file, listing[file], progress=update
                )
            sync_files(staged)

    def _commit_of(self, entry: Entry) -> str:
        """Return the commit of a version, as resolved before if this store resolved it."""
        if is_commit(entry.version):
            return entry.version
        key = (entry.name, entry.version)
        commit = self._commits.get(key) or self._refs(entry.name).tags.get(entry.version)
        if commit is None:
            raise NotPublishedError(f"{entry.reference} has no such version")
        return commit

    def _manifest_of(self, entry: Entry, commit: str) -> bytes:
        """Return the manifest with the digest of an entry."""
        data = self._cache.manifest(entry.name, commit, MANIFEST_FILE)
        if data is None or hashlib.sha256(data).hexdigest() != entry.digest:
            data = self._reader.small_file(entry.name, commit, MANIFEST_FILE, MAX_MANIFEST_BYTES)
        if data is None or hashlib.sha256(data).hexdigest() != entry.digest:
            raise FileError(
                f"the files of {entry.reference} are not what was published",
                expected=f"a manifest with sha256 {entry.digest}",
                hint="pull it again; the hub may have changed in the meantime",
            )
        return data

    def _commit_version(
        self,
        texts: Mapping[str, bytes],
        tensors: Mapping[str, Path],
        publication: Publication,
        version: str,
        head: str | None,
        entries: Sequence[Entry],
    ) -> str:
        """Commit the files of a new version and tag the commit; return it."""
        name = publication.name
        entry = entry_of(
            texts[MANIFEST_FILE],
            reference=f"{self.prefix}{name}@{version}",
            name=name,
            version=version,
            tags=publication.tags,
        )
        _refuse_second_backbone(entries, entry)
        card = hub_card(texts[CARD_FILE], entry)
        message = f"Publish {version}: {' + '.join(entry.methods)}"
        new: dict[str, bytes | Path] = {**texts, **tensors, CARD_FILE: card}
        old = self._reader.listing(name, head) if head and entries else {}
        stale = [file for file in BESIDE if file in old and file not in new]
        commit = self._writer.commit(name, new, message, head, stale)
        # Never moved: if two writers chose the same number, the second is refused.
        self._writer.create_tag(name, version, commit)
        return commit

    def _add_beside(
        self,
        texts: Mapping[str, bytes],
        tensors: Mapping[str, Path],
        entry: Entry,
        head: str | None,
    ) -> None:
        """Add peft's files to `main` where the newest version has none; no tag moves."""
        new: dict[str, bytes | Path] = {**texts, **tensors}
        new = {name: data for name, data in new.items() if name in BESIDE}
        if head is None or not new or CONFIG_FILE in self._reader.listing(entry.name, head):
            return
        new[CARD_FILE] = hub_card(texts[CARD_FILE], entry)
        message = f"Add peft's files to {entry.version}"
        self._writer.commit(entry.name, new, message, head)

    def _tag(self, name: str, tag: str, commit: str) -> None:
        tags = self._reader.refs(name).tags
        if tags.get(tag) == commit:
            return
        if tag in tags and "move-tag" in self._reader.own_words():
            self._writer.move_tag(name, tag, commit)
            return
        if tag in tags:
            self._writer.delete_tag(name, tag)
        self._writer.create_tag(name, tag, commit)

    def _available(self, name: str, all_versions: bool) -> Sequence[Entry]:
        """Return the entries of a repository that a search may show."""
        try:
            if all_versions:
                return [e for e in self._entries(name, self._refs(name)) if e.yanked is None]
            return [self._resolve(name, None)]
        except UnreachableError:
            raise
        except AdapterhubError:  # anyone can publish a broken repository
            return []


@contextmanager
def _progress(entry: Entry, size: int, folder: Path) -> Iterator[Callable[[int], object]]:
    """Show the progress of a download as huggingface_hub does; yield the update function."""
    from huggingface_hub.utils.tqdm import tqdm  # honours HF_HUB_DISABLE_PROGRESS_BARS

    if (free := shutil.disk_usage(folder).free) < size:
        raise OutputError(
            f"{entry.reference} has {size} bytes, {folder.parent} has room for {free}",
            hint="free some space, or set XDG_CACHE_HOME to another disk",
        )
    label = f"Fetching {entry.reference}"
    bar = tqdm(total=size, unit="B", unit_scale=True, desc=label)  # type: ignore[no-untyped-call]
    with bar:
        yield bar.update


def _checked_files(
    saved: Saved, publication: Publication
) -> tuple[dict[str, bytes], dict[str, Path]]:
    """Return the texts of a publication and the files of its tensors; refuse secrets in them."""
    texts = published_texts(saved.folder, (*PUBLISHED, *BESIDE))
    refuse_leaks(texts, publication.allowed)
    tensors = {name: saved.folder / name for name in texts if name.endswith(".safetensors")}
    return {name: text for name, text in texts.items() if name not in tensors}, tensors


def _version_for(
    saved: Saved, publication: Publication, refs: Refs, entries: Sequence[Entry]
) -> tuple[str, bool]:
    known = next((entry.version for entry in entries if entry.digest == saved.digest), None)
    if known is not None:
        return known, True
    name = publication.name
    return free_version(name, publication.version, _stubs(name, refs), refs.highest), False


def _signatures_file(entry: Entry) -> str:
    return f"{SIGNATURES_FOLDER}/{entry.version}.sig"


def _stubs(name: str, refs: Refs) -> list[Entry]:
    """Return entries of the numbered versions that need no request: numbers, tags and yanks."""
    empty = {"reference": "", "digest": "", "backbone": "", "fingerprint": "", "methods": ()}
    return [
        Entry(**empty, name=name, version=v, task=None, tags=tags, yanked=refs.yanked.get(v))  # type: ignore[arg-type]
        for v, tags in refs.versions().items()
    ]


def _require_commit(entry: Entry) -> None:
    """Refuse another library's entry without a commit, or with another adapter."""
    is_own = entry.digest == foreign_digest(entry.name, entry.version)
    if not (is_own and is_commit(entry.version)):
        raise FileError(f"{entry.reference} is not pinned to a commit")


def _file_names(item: Mapping[str, Any]) -> set[str]:
    siblings = item.get("siblings")
    items = siblings if isinstance(siblings, list) else []
    return {str(s.get("rfilename")) for s in items if isinstance(s, dict)}


def _refuse_other_backbone(entry: Entry, backbone: str | None) -> None:
    if backbone not in (None, entry.backbone, entry.fingerprint):
        raise RegistryError(
            f"{entry.reference} is not for {backbone}",
            expected=f"{entry.backbone}, {entry.fingerprint}",
        )


def _refuse_second_backbone(entries: Sequence[Entry], entry: Entry) -> None:
    if entries and entries[-1].backbone != entry.backbone:
        raise RegistryError(
            f"{entry.name} is for {entries[-1].backbone}, this adapter for {entry.backbone}",
            expected="one backbone per repository",
            hint="push it under another name",
        )
