"""Mirrored content: repositories of an upstream in the tables of this hub, read-only for its users.

- Refs change all at once, when the commits of those in use are here.
- A commit has the upstream's hash and its list of files, each with one known hash.
- A file is fetched on its first request, verified, and stored and granted like any other. An
  upstream cannot give anyone access to a file of this hub by listing its hash.

An owner whose name exists on this hub is never requested upstream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import ColumnElement, Connection, delete, func, insert, or_, select

from adapterhub.backbones.hub_network import is_commit
from adapterhub.errors import ConfigError
from adapterhub.files.card import CARD_FILE, MAX_CARD_BYTES
from adapterhub.files.native import MANIFEST_FILE
from adapterhub.hub.accounts import Owner, find_owner, mirror_namespace
from adapterhub.hub.blobs import BlobInfo, StagedBlob, discard_staged
from adapterhub.hub.commits import (
    BRANCH,
    MAIN,
    TAG,
    Tree,
    check_paths,
    commit_at,
    grant,
    keep_tree,
    name_of_ref,
    read_tree,
    refs_of,
    used_bytes,
)
from adapterhub.hub.database import (
    blobs,
    changes_of,
    commits,
    grants,
    now_precisely,
    refs,
    repositories,
)
from adapterhub.hub.gate import (
    NamespaceRules,
    changing,
    check_contents,
    check_name_of_file,
    parse_rules,
)
from adapterhub.hub.gc import forget_blob, remove_files
from adapterhub.hub.mirror_client import ASK_SECONDS, Upstream
from adapterhub.hub.repositories import (
    HubRepository,
    check_repository_name,
    create_repository,
    find_repository,
)
from adapterhub.hub.state import Hub
from adapterhub.registry.foreign import CONFIG_FILE
from adapterhub.registry.hub_reader import Refs, RepositoryFiles
from adapterhub.web.errors import (
    DeniedError,
    HubRefusal,
    LyingUpstreamError,
    MissingRepositoryError,
    TooManyBytesError,
    UpstreamError,
)

REFS_SECONDS = 60.0  # between two requests for the upstream's refs
_QUIET_SECONDS = 15.0  # before a failed upstream is contacted again
_DESCRIBING = (CARD_FILE, CONFIG_FILE, MANIFEST_FILE)
_ELSEWHERE = ("kind", "contents", "secrets", "backbone")
"""Rules for mirrored content, which is published already: only executable files are refused."""


@dataclass
class MirrorReport:
    """The result of a prefetch: the commit, its files, and the files fetched now."""

    name: str
    commit: str
    files: int = 0
    fetched: int = 0
    size: int = 0


class Copies:
    """The stored copies of an upstream; without an upstream they are served and nothing is fetched.

    Args:
        hub: the hub, whose options name the upstream.

    Attributes:
        is_closed: whether the server is shutting down; running fetches are cancelled.

    Raises:
        ConfigError: the hub mirrors another upstream, or the upstream's token is missing.
    """

    def __init__(self, hub: Hub) -> None:
        self.hub, self.is_closed = hub, False
        options, self.upstream = hub.options, None
        if options.upstream:
            self.upstream = Upstream(options.upstream, options.upstream_token)
            with hub.database.writing() as connection:
                mirror_namespace(connection, self.upstream.url)
        self._asked: dict[int, float] = {}  # when, by the id of a repository
        self._quiet_until = 0.0

    def fetch_all(
        self,
        type: str,
        name: str,
        revision: str = MAIN,
        note: Callable[[str], object] = lambda line: None,
    ) -> MirrorReport:
        """Fetch all files of a revision ahead; `note` is called with each path.

        Raises:
            ConfigError: the owner exists on this hub.
            HubRefusal: an item is not here, and the upstream does not provide it.
        """
        check_repository_name(name)
        if not self.is_foreign(name):
            raise ConfigError(
                f"{name} is not mirrored: {name.partition('/')[0]} is a name of this hub",
                expected="a repository whose owner this hub has not",
            )
        repository = self._find(type, name)
        if repository is None:
            repository = self.add(type, name)
        else:
            self.refresh(repository)
        if oid := self.unknown_commit(repository, revision):
            self.add_commit(repository, oid)
        with self.hub.database.reading() as connection:
            commit = commit_at(connection, repository.id, revision)
            tree = read_tree(connection, commit.tree)
        report = MirrorReport(repository.name, commit.oid, len(tree), size=sum_of_sizes(tree))
        with self.hub.database.reading() as connection:
            self._check_quota(name, report.size, self._quota(connection))
        for path, blob in tree.items():
            if blob.size and not self.kept(repository, blob):
                self.fetch_file(repository, commit.oid, path, blob)
                report.fetched += 1
                note(path)
        return report

    def is_foreign(self, name: str) -> bool:
        """Return whether a name may be requested upstream: valid, and its owner is not here."""
        try:
            check_repository_name(name)
        except HubRefusal:
            return False
        with self.hub.database.reading() as connection:
            return find_owner(connection, name.partition("/")[0]) is None

    def is_due(self, repository: HubRepository) -> bool:
        """Return whether the upstream's refs are due for an update."""
        now, last = time.monotonic(), self._asked.get(repository.id)
        is_old = last is None or now - last > REFS_SECONDS
        return self.upstream is not None and is_old and now > self._quiet_until

    def add(self, type: str, name: str) -> HubRepository:
        """Create a repository with the upstream's refs and the commit of `main`.

        Raises:
            MissingRepositoryError: the upstream lacks it, too.
            HubRefusal: the upstream does not respond, or not as a hub.
        """
        if existing := self._find(type, name):
            return existing
        upstream = self._asked_upstream(name)
        refs = upstream.refs(type, name)
        head = upstream.snapshot(type, name, refs.head or MAIN)
        with self.hub.database.writing() as connection:
            name, owner = head.name, head.name.partition("/")[0]
            if find_owner(connection, owner) is not None:  # created meanwhile
                raise MissingRepositoryError(f"{name} is not on this hub")
            if existing := find_repository(connection, type, name):
                return existing
            place = replace(mirror_namespace(connection, upstream.url), name=owner)
            repository = create_repository(connection, type, name, place, is_private=False)
            _keep_commit(connection, repository, head, self._rules(connection), upstream.url)
            _keep_refs(connection, repository, refs)
        self._asked[repository.id] = time.monotonic()
        self._describe(repository, head.commit)
        return repository

    def refresh(self, repository: HubRepository) -> None:
        """Update the refs, and fetch the commits that the refs in use have moved to.

        Raises:
            HubRefusal: the upstream does not provide one of them; the refs stay unchanged.
        """
        self._asked[repository.id] = time.monotonic()
        upstream = self._asked_upstream(repository.name)
        type, name = _place(repository)
        try:
            refs = upstream.refs(type, name)
            with self.hub.database.reading() as connection:
                old = refs_of(connection, repository.id)
                known = _known_commits(connection, repository)
            used = [ref for kind in old for ref, oid in old[kind].items() if oid in known]
            new = {oid for each in (refs.branches, refs.tags) for ref, oid in each.items()
                   if ref in used}  # fmt: skip
            heads = [upstream.snapshot(type, name, oid) for oid in sorted(new - known)]
        except UpstreamError:
            self._quiet_until = time.monotonic() + _QUIET_SECONDS
            raise
        if old == {BRANCH: dict(refs.branches), TAG: dict(refs.tags)}:
            return
        with self.hub.database.writing() as connection:
            _require_current(connection, repository)
            for head in heads:
                rules = self._rules(connection)
                _keep_commit(connection, repository, head, rules, upstream.url)
            _keep_refs(connection, repository, refs)
        for head in heads:
            self._describe(repository, head.commit)

    def unknown_commit(self, repository: HubRepository, revision: str) -> str | None:
        """Return the commit that a revision names, if it is to be fetched."""
        name = name_of_ref(revision)
        with self.hub.database.reading() as connection:
            refs = refs_of(connection, repository.id)
            oid = refs[BRANCH].get(name) or refs[TAG].get(name) or name
            if not is_commit(oid) or oid in _known_commits(connection, repository, oid):
                return None
        return oid

    def add_commit(self, repository: HubRepository, oid: str) -> None:
        """Store a commit of the upstream.

        Raises:
            MissingRevisionError: the upstream lacks it.
            HubRefusal: the upstream does not respond, or not as a hub.
        """
        upstream = self._asked_upstream(f"{repository.name} at {oid}")
        snapshot = upstream.snapshot(*_place(repository), oid)
        with self.hub.database.writing() as connection:
            _require_current(connection, repository)
            _keep_commit(connection, repository, snapshot, self._rules(connection), upstream.url)
        self._describe(repository, oid)

    def kept(self, repository: HubRepository, blob: BlobInfo) -> str:
        """Return the sha256 of a stored file, or ""."""
        with self.hub.database.reading() as connection:
            info = _granted(connection, repository, blob.key).get(blob.key)
        if info is None or info.size != blob.size:
            return ""
        return info.sha256 if self.hub.blobs.size(info.sha256) == blob.size else ""

    def fetch_file(
        self,
        repository: HubRepository,
        commit: str,
        path: str,
        blob: BlobInfo,
        patience: float | None = None,
    ) -> str:
        """Download a file, verify, store and grant it; return its sha256.

        Raises:
            HubRefusal: the upstream does not provide it, the rules refuse it, or the disk is full.
        """
        if own := self.kept(repository, blob):
            return own
        upstream, folder = self._asked_upstream(path), self.hub.blobs
        with self.hub.database.reading() as connection:
            rules, quota = self._rules(connection), self._quota(connection)
        self._check_room(path, blob.size, quota)

        def download(target: Path) -> BlobInfo:
            place = (*_place(repository), commit, path)
            return upstream.download(*place, blob, target, self._check_open, patience)

        staged = folder.receive_from(download)
        try:
            try:
                with open(staged.path, "rb") as file:
                    check_contents(path, file, blob.size, rules)
            except HubRefusal as error:
                raise DeniedError(error.problem) from None
            folder.send(staged)
            while not self._put(repository, staged):
                self._make_room(blob.size)
        finally:
            discard_staged(staged)
        return staged.info.sha256

    def _find(self, type: str, name: str) -> HubRepository | None:
        with self.hub.database.reading() as connection:
            return find_repository(connection, type, name)

    def _describe(self, repository: HubRepository, oid: str) -> None:
        """Fetch the files that describe a commit; its tags are derived from them."""
        with self.hub.database.reading() as connection:
            tree = read_tree(connection, commit_at(connection, repository.id, oid).tree)
        with suppress(HubRefusal):  # a request for the file reports the error
            for path in _DESCRIBING:
                if path in tree and 0 < tree[path].size <= MAX_CARD_BYTES:
                    self.fetch_file(repository, oid, path, tree[path], ASK_SECONDS)

    def _asked_upstream(self, subject: str) -> Upstream:
        if self.upstream is None or self.is_closed:
            raise UpstreamError(
                f"{subject} is not kept here, and this hub was started without --upstream"
            )
        return self.upstream

    def _check_open(self, received: int) -> None:
        if self.is_closed:
            raise UpstreamError("the hub is being stopped")

    def _rules(self, connection: Connection) -> NamespaceRules:
        rules = parse_rules(self._owner(connection).rules)
        return replace(rules, allowed=(*rules.allowed, *_ELSEWHERE))

    def _quota(self, connection: Connection) -> int | None:
        owner = self._owner(connection)
        return self.hub.options.quota if owner.quota is None else owner.quota

    def _owner(self, connection: Connection) -> Owner:
        assert self.upstream is not None
        return mirror_namespace(connection, self.upstream.url)

    def _check_room(self, path: str, size: int, quota: int | None) -> None:
        """Refuse a file that can never fit, before it is requested."""
        most = self.hub.options.max_file
        if size > most:
            raise TooManyBytesError(
                f"{path} has {size:,} bytes, and a file may have {most:,} here (--max-file)"
            )
        self._check_quota(path, size, quota)
        self.hub.blobs.require_room(size)

    def _check_quota(self, subject: str, size: int, quota: int | None) -> None:
        if quota is not None and size > quota:
            raise TooManyBytesError(
                f"{subject} has {size:,} bytes, and all that is mirrored may have {quota:,}; "
                "adapterhub hub org DIR UPSTREAM --quota SIZE changes it"
            )

    def _put(self, repository: HubRepository, staged: StagedBlob) -> bool:
        """Store a file and grant it; return whether there was space."""
        folder, info = self.hub.blobs, staged.info
        with changing(self.hub) as connection:
            _require_current(connection, repository)
            if self._missing_room(connection, info.size) > 0:
                return False
            if folder.size(info.sha256) != info.size:
                folder.remove(info.sha256)  # its remains
            changes_of(connection).files.append(staged)
            grant(connection, repository.id, [info])
        return True

    def _missing_room(self, connection: Connection, size: int) -> int:
        quota = self._quota(connection)
        if quota is None:
            return 0
        return used_bytes(connection, self._owner(connection).id) + size - quota

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files until a new one fits.

        Raises:
            BusyError: a backup or a collection is reading the files.
        """
        gone = []
        with self.hub.database.alone(waits=False):
            with self.hub.database.writing() as connection:
                missing = self._missing_room(connection, size)
                own, rows = self._by_last_use(connection)
                while missing > 0 and rows:
                    sha256, length = rows.pop(0)
                    connection.execute(delete(grants).where(own, grants.c.sha256 == sha256))
                    missing -= length
                    if forget_blob(connection, sha256):
                        gone.append(sha256)
            remove_files(self.hub, gone)

    def _by_last_use(
        self, connection: Connection
    ) -> tuple[ColumnElement[bool], list[tuple[str, int]]]:
        """Return the grants of mirrored repositories, and their files with their sizes."""
        place = self._owner(connection).id
        mirrored = select(repositories.c.id).where(repositories.c.namespace == place)
        own = grants.c.repository.in_(mirrored)
        rows = connection.execute(
            select(blobs.c.sha256, blobs.c.size)
            .join(grants, grants.c.sha256 == blobs.c.sha256)
            .where(own)
            .group_by(blobs.c.sha256, blobs.c.size)
            .order_by(func.max(grants.c.granted))
        ).all()
        return own, [(row.sha256, row.size) for row in rows]


def kept_tree(connection: Connection, repository: HubRepository, tree: Tree) -> Tree:
    """Return the files of a commit with both hashes, as stored here.

    A file of a mirrored repository that was not fetched has no sha256, so that it never resolves to
    a file of another repository.
    """
    if not repository.is_mirrored:
        return tree
    known = _granted(connection, repository)
    return {path: known.get(blob.key) or replace(blob, sha256="") for path, blob in tree.items()}


def _granted(
    connection: Connection, repository: HubRepository, key: str = ""
) -> dict[str, BlobInfo]:
    """Return the files that a repository may name, or one of them, by each of their hashes."""
    chosen = (
        select(blobs.c.sha256, blobs.c.size, blobs.c.git_sha1)
        .join(grants, grants.c.sha256 == blobs.c.sha256)
        .where(grants.c.repository == repository.id)
    )
    if key:
        chosen = chosen.where(or_(blobs.c.sha256 == key, blobs.c.git_sha1 == key))
    infos = [BlobInfo(*row) for row in connection.execute(chosen)]
    return {key: info for info in infos for key in (info.sha256, info.git_sha1)}


def sum_of_sizes(tree: Tree) -> int:
    """Return the total size of the files of a commit, without duplicates."""
    return sum(blob.size for blob in {b.key: b for b in tree.values()}.values())


def _keep_commit(
    connection: Connection,
    repository: HubRepository,
    snapshot: RepositoryFiles,
    rules: NamespaceRules,
    upstream: str,
) -> None:
    """Store a commit of the upstream, unless it is here."""
    if _known_commits(connection, repository, snapshot.commit):
        return
    tree = {
        path: BlobInfo(info.sha256 or "", info.size or 0, info.git_sha1 or "")
        for path, info in snapshot.files.items()
        if _is_accepted(path, rules)
    }
    try:
        check_paths(tree)
    except HubRefusal as error:
        raise LyingUpstreamError(f"{repository.name} is not mirrored: {error.problem}") from None
    connection.execute(
        insert(commits).values(
            repository=repository.id,
            oid=snapshot.commit,
            parent=None,
            tree=keep_tree(connection, tree),
            title="Mirror this commit",
            message=f"of {upstream}",
            author=repository.name.partition("/")[0],
            created=snapshot.modified or now_precisely(),
        )
    )


def _is_accepted(path: str, rules: NamespaceRules) -> bool:
    try:
        check_name_of_file(path, rules)
    except HubRefusal:
        return False
    return True


def _keep_refs(connection: Connection, repository: HubRepository, remote: Refs) -> None:
    connection.execute(delete(refs).where(refs.c.repository == repository.id))
    rows = [
        {"repository": repository.id, "kind": kind, "name": name, "commit": oid}
        for kind, each in ((BRANCH, remote.branches), (TAG, remote.tags))
        for name, oid in each.items()
    ]
    if rows:
        connection.execute(insert(refs), rows)


def _known_commits(
    connection: Connection, repository: HubRepository, oid: str | None = None
) -> set[str]:
    """Return the commits that are here, or one of them."""
    chosen = select(commits.c.oid).where(commits.c.repository == repository.id)
    if oid is not None:
        chosen = chosen.where(commits.c.oid == oid)
    return {*connection.execute(chosen).scalars()}


def _require_current(connection: Connection, repository: HubRepository) -> None:
    """Refuse to write to a repository that is no longer the mirrored one, since ids are reused.

    Raises:
        MissingRepositoryError: its owner's name now belongs to this hub.
    """
    current = find_repository(connection, *_place(repository))
    if current is None or current.id != repository.id or not current.is_mirrored:
        raise MissingRepositoryError(f"{repository.name} is not on this hub")


def _place(repository: HubRepository) -> tuple[str, str]:
    return repository.type, repository.name
