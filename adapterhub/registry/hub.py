"""A store on the Hugging Face Hub, or on a self-hosted hub with the same protocol.

A repository holds one adapter. A version is a git tag `v1`, `v2`, ... on a commit; all other git
tags are tags. Each publication is one commit on `main` whose parent is the head that the writer
saw. In repositories without such tags, which other tools made, a version is a commit.

The client is huggingface_hub: its cache, tokens, resumed downloads and offline mode. It does not
verify the contents of its downloads, so this module does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from platformdirs import user_cache_path

from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.files import schema
from adapterhub.files.native import CARD_FILE, MANIFEST_FILE, read_adapter
from adapterhub.registry.hub_card import entry_from_card, hub_card
from adapterhub.registry.local_versions import (
    PUBLISHED,
    check_tags,
    copy_adapter,
    digest_of,
    entry_of,
)
from adapterhub.registry.other_formats import (
    CONFIG_FILE,
    FOREIGN,
    PICKLES,
    copy_foreign,
    entry_of_foreign,
)
from adapterhub.registry.secrets import refuse_leaks
from adapterhub.registry.store import (
    Entry,
    Publication,
    Query,
    choose_version,
    filter_entries,
    free_version,
    version_number,
)

YANKED_FILE = "yanked.json"
_MOST_RESULTS = 1_000
_MAX_YANKED_BYTES = 1 << 20


class HubStore:
    """A store on a hub; adapter names have the form `owner/name`. See `Store` for the methods.

    `endpoint` is the URL of a hub other than huggingface_hub's default; `token` replaces the token
    that huggingface_hub finds. `allow_pickle` accepts other libraries' adapters as pickles if they
    have no safetensors file.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        token: str | bool | None = None,
        *,
        allow_pickle: bool = False,
    ) -> None:
        self.allow_pickle = allow_pickle
        self.api = HfApi(endpoint=endpoint, token=token, library_name="adapterhub")
        self.prefix = f"{endpoint}/" if endpoint else "hf:"

    def resolve(
        self, name: str, version: str | None = None, *, backbone: str | None = None
    ) -> Entry:
        """Find the version that a name refers to."""
        with self._translated_errors(name):
            entries = [] if _is_commit(version) else self._versions_online(name)
            if entries:
                entry = choose_version(entries, name, version)
            else:
                entry = self._entry(name, version or "main")
        _refuse_other_backbone(entry, backbone)
        return entry

    def get(self, entry: Entry, folder: Path | None = None) -> Path:
        """Return the folder with the verified files of a version: `folder`, or one in the cache."""
        cached = user_cache_path("adapterhub", appauthor=False) / "hub" / entry.digest
        if not cached.exists():
            with self._translated_errors(entry.name):
                self._download(entry, cached)
        if not (cached / MANIFEST_FILE).is_file():
            return cached if folder is None else self._copy_foreign(cached, folder)
        read_adapter(cached)
        if digest_of(cached) != entry.digest:
            raise FileError(
                f"the files of {entry.reference} are not what was published",
                expected=f"a manifest with sha256 {entry.digest}",
                hint="pull it again; the hub may have changed in the meantime",
            )
        return cached if folder is None else copy_adapter(cached, folder)

    def put(self, folder: Path, publication: Publication) -> Entry:
        """Publish an adapter's folder as one commit."""
        read_adapter(folder)
        check_tags(publication.tags)
        files = {n: (folder / n).read_bytes() for n in PUBLISHED if (folder / n).is_file()}
        files |= publication.beside
        refuse_leaks(files, publication.allowed)
        name = publication.name
        with self._translated_errors(name):
            private = publication.visibility == "private"
            self.api.create_repo(name, private=private, exist_ok=True)
            # Read before the versions, so that a publication in between makes the commit fail.
            head = str(self.api.model_info(name).sha)
            entries = self._versions(name)
            digest = digest_of(folder)
            existing = next((entry.version for entry in entries if entry.digest == digest), None)
            version = existing or free_version(name, publication.version, entries)
            if existing is None:
                self._commit_version(files, publication, version, head, entries)
            for tag in publication.tags:
                self._tag(name, tag, version)
            return choose_version(self._versions(name), name, version)

    def search(self, query: Query) -> list[Entry]:
        """Return the versions that match a query: the hub filters by tags, this method the rest."""
        filters = ["adapterhub"]
        backbone = query.backbone or ""
        if "/" in backbone:  # the Hub indexes neither fingerprints nor ids without an owner
            filters.append(f"base_model:adapter:{backbone}")
        with self._translated_errors(""):
            # The Hub's own text search covers repository names only.
            infos = self.api.list_models(
                filter=filters, full=True, cardData=True, limit=_MOST_RESULTS
            )
            entries = [
                entry for info in infos for entry in self._entries_in(info, query.all_versions)
            ]
        return filter_entries(entries, query)

    def versions(self, name: str, *, backbone: str | None = None) -> Sequence[Entry]:
        """List all versions of a name, oldest first."""
        with self._translated_errors(name):
            entries = self._versions_online(name) or [self._entry(name, "main")]
        _refuse_other_backbone(entries[-1], backbone)
        return entries

    def yank(self, entry: Entry, reason: str) -> None:
        """Exclude a version from searches, by a file in its repository."""
        name = entry.name
        with self._translated_errors(name):
            head = str(self.api.model_info(name).sha)
            reasons = {**self._yanked(name), entry.version: reason}
            files = {YANKED_FILE: schema.canonical_json(reasons)}
            self._commit(name, files, f"Yank {entry.version}", head)

    def _download(self, entry: Entry, folder: Path) -> None:
        """Download the files of a version to a new folder."""
        if entry.fingerprint:  # ours; the repository may also hold the adapter in peft's format
            copy_adapter(self._snapshot(entry.name, entry.version, PUBLISHED), folder)
        else:
            names = (*FOREIGN, *PICKLES) if self.allow_pickle else FOREIGN
            self._copy_foreign(self._snapshot(entry.name, entry.version, names), folder)

    def _copy_foreign(self, source: Path, folder: Path) -> Path:
        return copy_foreign(source, folder, allow_pickle=self.allow_pickle)

    def _commit_version(
        self,
        files: Mapping[str, bytes],
        publication: Publication,
        version: str,
        head: str,
        entries: Sequence[Entry],
    ) -> None:
        """Commit the files of a new version and tag the commit."""
        name = publication.name
        entry = entry_of(
            files[MANIFEST_FILE],
            reference=f"{self.prefix}{name}@{version}",
            name=name,
            version=version,
            tags=publication.tags,
        )
        _refuse_second_backbone(entries, entry)
        card = hub_card(files[CARD_FILE], entry)
        message = f"Publish {version}: {' + '.join(entry.methods)}"
        commit = self._commit(name, {**files, CARD_FILE: card}, message, head)
        # Never moved: if two writers chose the same number, the second is refused.
        self.api.create_tag(name, tag=version, revision=commit)

    def _versions_online(self, name: str) -> list[Entry]:
        """List the numbered versions; empty if there are none or the hub cannot be reached."""
        try:
            return self._versions(name)
        except HfHubHTTPError:
            raise
        except (HTTPError, ConnectionError):
            return []

    def _versions(self, name: str) -> list[Entry]:
        refs = self._refs(name)
        numbered = sorted(filter(version_number, refs), key=lambda tag: version_number(tag) or 0)
        if not numbered:
            return []
        yanked = self._yanked(name)
        self._file(name, "main", MANIFEST_FILE)  # caches the newest version for offline use
        entries = []
        for version in numbered:
            tags = sorted(
                tag
                for tag, commit in refs.items()
                if commit == refs[version] and not version_number(tag)
            )
            entry = self._entry(name, version)
            entries.append(replace(entry, tags=tuple(tags), yanked=yanked.get(version)))
        return entries

    def _refs(self, name: str) -> dict[str, str]:
        return {tag.name: tag.target_commit for tag in self.api.list_repo_refs(name).tags}

    def _entry(self, name: str, revision: str) -> Entry:
        offline: LocalEntryNotFoundError | None = None
        for file, make in ((MANIFEST_FILE, entry_of), (CONFIG_FILE, entry_of_foreign)):
            try:
                path = self._file(name, revision, file)
            except LocalEntryNotFoundError as error:  # no network, and not in the cache
                offline = error
                continue
            if path is not None:
                version = revision if version_number(revision) else path.parent.name
                reference = f"{self.prefix}{name}@{version}"
                return make(path.read_bytes(), reference=reference, name=name, version=version)
        raise offline or FileError(
            f"{self.prefix}{name} holds no adapter",
            expected=f"{MANIFEST_FILE}, or another library's {CONFIG_FILE}",
        )

    def _file(self, name: str, revision: str, file: str) -> Path | None:
        """Return the cached path of one file of a repository, or None if it does not exist."""
        try:
            return Path(self.api.hf_hub_download(name, file, revision=revision))
        except RemoteEntryNotFoundError:
            return None

    def _snapshot(self, name: str, revision: str, files: Sequence[str]) -> Path:
        allowed = list(files)
        return Path(self.api.snapshot_download(name, revision=revision, allow_patterns=allowed))

    def _yanked(self, name: str) -> dict[str, str]:
        """Read the yanked versions of a repository, with the reasons."""
        if (path := self._file(name, "main", YANKED_FILE)) is None:
            return {}
        tree, problems = schema.parse_object(path.read_bytes(), _MAX_YANKED_BYTES)
        if problems or not all(isinstance(reason, str) for reason in tree.values()):
            raise FileError(f"{self.prefix}{name} has a broken {YANKED_FILE}", offenders=problems)
        return tree

    def _commit(self, name: str, files: Mapping[str, bytes], message: str, head: str) -> str:
        operations = [CommitOperationAdd(path, data) for path, data in sorted(files.items())]
        commit = self.api.create_commit(
            name, operations, commit_message=message, parent_commit=head, revision="main"
        )
        return str(commit.oid)

    def _tag(self, name: str, tag: str, revision: str) -> None:
        refs = self._refs(name)
        target = refs.get(revision, revision)
        if refs.get(tag) == target:
            return
        if tag in refs:
            self.api.delete_tag(name, tag=tag)
        self.api.create_tag(name, tag=tag, revision=target)

    def _entries_in(self, info: Any, all_versions: bool) -> Sequence[Entry]:
        """Return the entries of a repository, from its card alone if that is enough."""
        entry = entry_from_card(info.card_data, info.id, self.prefix)
        if entry is not None and not all_versions and YANKED_FILE not in _file_names(info):
            return [entry]
        available = [e for e in self._versions_online(info.id) if e.yanked is None]
        return available if all_versions else available[-1:]

    @contextmanager
    def _translated_errors(self, name: str) -> Iterator[None]:
        """Raise the client's errors as ours, with a hint."""
        try:
            yield
        except HTTPError as error:
            raise _registry_error(error, self._address(name)) from error
        except HFValidationError as error:
            raise ConfigError(f"invalid repository name {name!r}: {error}") from error
        except (LocalEntryNotFoundError, ConnectionError) as error:
            raise _unreachable(self._address(name), error) from error

    def _address(self, name: str) -> str:
        """Name the subject of an error: a repository, or the hub itself."""
        return f"{self.prefix}{name}" if name else self.prefix.rstrip("/").replace("hf:", "the Hub")


def _registry_error(error: HTTPError, address: str) -> RegistryError:
    if not isinstance(error, HfHubHTTPError):
        return _unreachable(address, error)
    status = error.response.status_code
    if isinstance(error, RevisionNotFoundError):
        return RegistryError(f"{address} has no such version", hint=f"adapterhub show {address}")
    if isinstance(error, GatedRepoError):
        return RegistryError(
            f"{address} is gated", hint="request access on its page, then hf auth login"
        )
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        return RegistryError(
            f"{address} does not exist, or you have no access to it",
            hint="hf auth login, or set HF_TOKEN",
        )
    if status == 403:
        return RegistryError(
            f"{address}: your token lacks the permission", hint="use a token with write access"
        )
    if status in (409, 412):
        return RegistryError(f"{address} was changed by another writer", hint="try again")
    return RegistryError(f"{address}: the hub answered {status}: {error.server_message or error}")


def _unreachable(address: str, error: Exception) -> RegistryError:
    return RegistryError(
        f"{address} cannot be reached and is not in the cache: {type(error).__name__}",
        hint="check the network, HF_HUB_OFFLINE and HF_ENDPOINT",
    )


def _is_commit(version: str | None) -> bool:
    """Return whether a version is a full commit hash."""
    return version is not None and len(version) == 40 and set(version) <= set("0123456789abcdef")


def _file_names(info: Any) -> set[str]:
    return {sibling.rfilename for sibling in info.siblings or ()}


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
