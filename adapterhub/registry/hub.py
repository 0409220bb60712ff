"""The Hugging Face Hub, or a hub of one's own that speaks its protocol, as a store.

A repository holds one adapter. A version is a git tag `v1`, `v2`, ... on its commit; other git tags
are tags. Each publication is one commit on `main`, made on the head that the writer saw. In a
repository that others made, without such tags, a version is a commit.

The client is huggingface_hub's own: its cache, tokens, resumed downloads and offline mode. It does
not compare what it downloads with anything, so everything is verified here.
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
from adapterhub.registry.hub_card import entry_in, hub_card
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
    chosen,
    free_version,
    ranked,
    version_number,
)

YANKED_FILE = "yanked.json"
_MOST_FOUND = 1_000
_MAX_YANKED = 1 << 20


class HubStore:
    """A store on a hub. `Store` says what each of its methods does; names are `owner/name`.

    `endpoint` is the address of another hub than huggingface_hub's own; `token` stands in for the
    one that huggingface_hub finds. With `allow_pickle` other libraries' adapters come in a pickle
    where there are no safetensors.
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
        """The version that is meant."""
        with self._explained(name):
            known = [] if _is_revision(version) else self._known(name)
            entry = chosen(known, name, version) if known else self._entry(name, version or "main")
        _refuse_other(entry, backbone)
        return entry

    def get(self, entry: Entry, folder: Path | None = None) -> Path:
        """The verified files of a version, in `folder` or in the cache."""
        kept = user_cache_path("adapterhub", appauthor=False) / "hub" / entry.digest
        with self._explained(entry.name):
            if not kept.exists():
                # A repository may have both: ours, and the same adapter in peft's format.
                own, pickles = bool(entry.fingerprint), PICKLES if self.allow_pickle else ()
                files = PUBLISHED if own else (*FOREIGN, *pickles)
                snapshot = self._snapshot(entry.name, entry.version, files)
                if own:
                    copy_adapter(snapshot, kept)
                else:
                    copy_foreign(snapshot, kept, allow_pickle=self.allow_pickle)
        if (kept / MANIFEST_FILE).is_file():
            read_adapter(kept)
            if digest_of(kept) != entry.digest:
                raise FileError(
                    f"{entry.reference} is not what was published",
                    expected=f"a manifest with sha256 {entry.digest}",
                    hint="pull it again; the hub may have been changed meanwhile",
                )
            return kept if folder is None else copy_adapter(kept, folder)
        allow = self.allow_pickle
        return kept if folder is None else copy_foreign(kept, folder, allow_pickle=allow)

    def put(self, folder: Path, publication: Publication) -> Entry:
        """Publish an adapter's folder, as one commit."""
        read_adapter(folder)
        check_tags(publication.tags)
        files = {n: (folder / n).read_bytes() for n in PUBLISHED if (folder / n).is_file()}
        files |= publication.beside
        refuse_leaks(files)
        name = publication.name
        with self._explained(name):
            private = publication.visibility == "private"
            self.api.create_repo(name, private=private, exist_ok=True)
            head = str(self.api.model_info(name).sha)
            known = self._versions(name)
            digest = digest_of(folder)
            same = next((e.version for e in known if e.digest == digest), None)
            version = same or free_version(name, publication.version, known)
            if same is None:
                entry = entry_of(
                    files[MANIFEST_FILE],
                    reference=f"{self.prefix}{name}@{version}",
                    name=name,
                    version=version,
                    tags=publication.tags,
                )
                _refuse_other_backbone(known, entry)
                files[CARD_FILE] = hub_card(files[CARD_FILE], entry)
                message = f"Publish {version}: {' + '.join(entry.methods)}"
                head = self._write(name, files, message, head)
                # It is never moved: of two writers that chose one number the second is refused.
                self.api.create_tag(name, tag=version, revision=head)
            for tag in publication.tags:
                self._tag(name, tag, version)
            return chosen(self._versions(name), name, version)

    def search(self, query: Query) -> list[Entry]:
        """The versions that a query finds: the hub filters by tags, the rest is done here."""
        filters = ["adapterhub"]
        backbone = query.backbone or ""
        if "/" in backbone:  # the Hub knows no fingerprints, nor names of one's own
            filters.append(f"base_model:adapter:{backbone}")
        with self._explained(""):
            # Its own search for text knows names alone.
            infos = self.api.list_models(
                filter=filters, full=True, cardData=True, limit=_MOST_FOUND
            )
            found = [entry for info in infos for entry in self._shown(info, query.all_versions)]
        return ranked(found, query)

    def versions(self, name: str, *, backbone: str | None = None) -> Sequence[Entry]:
        """All versions of a name, oldest first."""
        with self._explained(name):
            found = self._known(name) or [self._entry(name, "main")]
        for entry in found[-1:]:
            _refuse_other(entry, backbone)
        return found

    def yank(self, entry: Entry, reason: str) -> None:
        """Take a version out of searches: a note in the repository."""
        name = entry.name
        with self._explained(name):
            head = str(self.api.model_info(name).sha)
            marks = {**self._yanked(name), entry.version: reason}
            self._write(name, {YANKED_FILE: schema.canonical_json(marks)},
                        f"Yank {entry.version}", head)  # fmt: skip

    def _known(self, name: str) -> list[Entry]:
        """The numbered versions; none where there are none, or where the hub cannot be reached and
        the cache has to do."""
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
        self._file(name, "main", MANIFEST_FILE)  # what the cache gives when the hub is away
        entries = []
        for version in numbered:
            tags = sorted(
                t for t, at in refs.items() if at == refs[version] and not version_number(t)
            )
            entry = self._entry(name, version)
            entries.append(replace(entry, tags=tuple(tags), yanked=yanked.get(version)))
        return entries

    def _refs(self, name: str) -> dict[str, str]:
        return {tag.name: tag.target_commit for tag in self.api.list_repo_refs(name).tags}

    def _entry(self, name: str, revision: str) -> Entry:
        away: LocalEntryNotFoundError | None = None
        for file, make in ((MANIFEST_FILE, entry_of), (CONFIG_FILE, entry_of_foreign)):
            try:
                path = self._file(name, revision, file)
            except LocalEntryNotFoundError as error:  # no network, and not in the cache
                away = error
                continue
            if path is not None:
                version = revision if version_number(revision) else path.parent.name
                reference = f"{self.prefix}{name}@{version}"
                return make(path.read_bytes(), reference=reference, name=name, version=version)
        raise away or FileError(
            f"{self.prefix}{name} holds no adapter",
            expected=f"{MANIFEST_FILE}, or another library's {CONFIG_FILE}",
        )

    def _file(self, name: str, revision: str, file: str) -> Path | None:
        """One file of a repository in the cache, which links to it; None if there is none."""
        try:
            return Path(self.api.hf_hub_download(name, file, revision=revision))
        except RemoteEntryNotFoundError:
            return None

    def _snapshot(self, name: str, revision: str, files: Sequence[str]) -> Path:
        allowed = list(files)
        return Path(self.api.snapshot_download(name, revision=revision, allow_patterns=allowed))

    def _yanked(self, name: str) -> dict[str, str]:
        if (path := self._file(name, "main", YANKED_FILE)) is None:
            return {}
        tree, problems = schema.parse_object(path.read_bytes(), _MAX_YANKED)
        if problems or not all(isinstance(reason, str) for reason in tree.values()):
            raise FileError(f"{self.prefix}{name} has a broken {YANKED_FILE}", offenders=problems)
        return tree

    def _write(self, name: str, files: Mapping[str, bytes], message: str, head: str) -> str:
        operations = [CommitOperationAdd(path, data) for path, data in sorted(files.items())]
        done = self.api.create_commit(
            name, operations, commit_message=message, parent_commit=head, revision="main"
        )
        return str(done.oid)

    def _tag(self, name: str, tag: str, revision: str) -> None:
        refs = self._refs(name)
        target = refs.get(revision, revision)
        if refs.get(tag) == target:
            return
        if tag in refs:
            self.api.delete_tag(name, tag=tag)
        self.api.create_tag(name, tag=tag, revision=target)

    def _shown(self, info: Any, all_versions: bool) -> Sequence[Entry]:
        """What a search shows of a repository: by its card, unless that is not enough."""
        entry = entry_in(info.card_data, info.id, self.prefix)
        if entry is not None and not all_versions and YANKED_FILE not in _files(info):
            return [entry]
        standing = [e for e in self._known(info.id) if e.yanked is None]
        return standing if all_versions else standing[-1:]

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Turn the client's errors into ours, which say what to do."""
        try:
            yield
        except HTTPError as error:
            raise _explanation(error, self._place(name)) from error
        except HFValidationError as error:
            raise ConfigError(f"{name!r} cannot be a repository: {error}") from error
        except (LocalEntryNotFoundError, ConnectionError) as error:
            raise _unreachable(self._place(name), error) from error

    def _place(self, name: str) -> str:
        """What an error is about: a repository, or the hub itself."""
        return f"{self.prefix}{name}" if name else self.prefix.rstrip("/").replace("hf:", "the Hub")


def _explanation(error: HTTPError, place: str) -> RegistryError:
    if not isinstance(error, HfHubHTTPError):
        return _unreachable(place, error)
    status = error.response.status_code
    if isinstance(error, RevisionNotFoundError):
        return RegistryError(f"{place} has no such version", hint=f"adapterhub show {place}")
    if isinstance(error, GatedRepoError):
        return RegistryError(f"{place} is gated", hint="ask for access on its page, then log in")
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        return RegistryError(
            f"{place} is not there, or not for you to see", hint="hf auth login, or set HF_TOKEN"
        )
    if status == 403:
        return RegistryError(f"{place}: your token may not do this", hint="a token that may write")
    if status in (409, 412):
        return RegistryError(f"{place} was changed by another writer meanwhile", hint="try again")
    return RegistryError(f"{place}: the hub answered {status}: {error.server_message or error}")


def _unreachable(place: str, error: Exception) -> RegistryError:
    return RegistryError(
        f"{place} cannot be reached, and is not in the cache: {type(error).__name__}",
        hint="look at the network, HF_HUB_OFFLINE and HF_ENDPOINT",
    )


def _is_revision(version: str | None) -> bool:
    """Whether a version is a commit: neither a number nor, by its look, a tag."""
    return version is not None and len(version) == 40 and set(version) <= set("0123456789abcdef")


def _files(info: Any) -> set[str]:
    return {sibling.rfilename for sibling in info.siblings or ()}


def _refuse_other(entry: Entry, backbone: str | None) -> None:
    if backbone not in (None, entry.backbone, entry.fingerprint):
        raise RegistryError(
            f"{entry.reference} is not for {backbone}",
            expected=f"{entry.backbone}, {entry.fingerprint}",
        )


def _refuse_other_backbone(known: Sequence[Entry], entry: Entry) -> None:
    if known and known[-1].backbone != entry.backbone:
        raise RegistryError(
            f"{entry.name} is for {known[-1].backbone}, this adapter for {entry.backbone}",
            expected="one backbone a repository",
            hint="push it under another name",
        )
