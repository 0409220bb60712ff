"""The gate: every change to downloadable data passes it, at the end of its transaction.

`changing` opens the transaction of each commit, delete, move, tag, branch, upload, import and
mirrored file. At its end the gate reads the changes (`Changes`) and refuses all of them unless
these promises of the hub hold:

- contents follow the rules of the namespace, also after a move;
- where signers are listed, one of them has signed each file that is loaded, and each version;
- the files of a namespace, with the space reserved for uploads, fit its quota;
- a version is complete, matches its manifest, and has the next number;
- only admins remove protected tags, versions and branches.

A whole hub is restored with its rules, from a backup of admitted data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqlalchemy import Connection, select

from adapterhub.hub.accounts import ADMIN, Owner, Visitor, namespace_of
from adapterhub.hub.blobs import StagedBlob
from adapterhub.hub.commits import TAG, Tree, promised_bytes, read_tree, sizes_of, used_bytes
from adapterhub.hub.content_policy import (
    NamespaceRules,
    check_contents,
    check_name_of_file,
    check_version,
    parse_rules,
    signature_problem,
)
from adapterhub.hub.database import NewVersion, changes_of, commits, received_reader
from adapterhub.hub.repositories import HubRepository, repository_of_id
from adapterhub.hub.state import Hub
from adapterhub.registry.store import MOST_VERSIONS, is_version_folder
from adapterhub.web.errors import DeniedError, HubRefusal, TakenError, TooManyBytesError

MOST_SKIPPED = 1_000
"""Version numbers that an admin may skip, to copy a registry that has deleted some."""


@dataclass(frozen=True)
class CheckedFiles:
    """Files whose contents were checked before a transaction, so that writers need not wait.

    Attributes:
        rules: the rules used for the check.
        files: each file as its path and sha256.
    """

    rules: NamespaceRules = field(default_factory=NamespaceRules)
    files: frozenset[tuple[str, str]] = frozenset()


@contextmanager
def changing(
    hub: Hub, visitor: Visitor | None = None, checked: CheckedFiles | None = None
) -> Iterator[Connection]:
    """Change downloadable data in one transaction, which the gate admits at its end.

    Args:
        hub: the hub.
        visitor: the user who makes the change; None for the hub itself.
        checked: files whose contents were checked already.

    Raises:
        HubRefusal: the gate refuses the changes; nothing is changed.
    """
    with hub.database.writing() as connection:
        yield connection
        _Gate(hub, connection, visitor, checked or CheckedFiles()).admit()


def check_files(
    hub: Hub,
    files: Iterable[tuple[str, str, int]],
    rules: NamespaceRules,
    received: Mapping[str, StagedBlob] | None = None,
) -> CheckedFiles:
    """Check the contents of files, each given as its path, sha256 and size.

    `received` has the files that are not yet in place, by path.

    Raises:
        HubRefusal: the rules do not allow one of them.
    """
    found = set()
    for path, sha256, size in files:
        staged = (received or {}).get(path)
        check_name_of_file(path, rules)
        with open(staged.path, "rb") if staged is not None else hub.blobs.open(sha256) as file:
            check_contents(path, file, size, rules)
        found.add((path, sha256))
    return CheckedFiles(rules, frozenset(found))


def check_moved(hub: Hub, repository: HubRepository, rules: NamespaceRules) -> CheckedFiles:
    """Check all downloadable contents of a repository against other rules.

    Raises:
        HubRefusal: the rules do not allow one of the files.
    """
    with hub.database.reading() as connection:
        trees = _trees(connection, repository.id).values()
        files = {(path, b.sha256, b.size) for tree in trees for path, b in tree.items()}
    return check_files(hub, sorted(files), rules)


def quota_of(hub: Hub, connection: Connection, namespace: int) -> int | None:
    """Return the quota of a namespace in bytes; None for no limit."""
    return _quota(hub, namespace_of(connection, namespace))


def _quota(hub: Hub, owner: Owner) -> int | None:
    return hub.options.quota if owner.quota is None else owner.quota


def check_room(
    hub: Hub,
    connection: Connection,
    namespace: int,
    size: int,
    *,
    is_kept: bool = False,
    is_early: bool = False,
) -> NamespaceRules:
    """Refuse files that exceed the quota of a namespace, including reserved space.

    Return the rules of the namespace, which apply to the files.

    Args:
        hub: the hub.
        connection: a transaction.
        namespace: the namespace of the files.
        size: the size of the new files in bytes.
        is_kept: whether the namespace already stores these files, or has space reserved for them.
        is_early: whether some files may still wait for their commit: count only commits.

    Raises:
        TooManyBytesError: the quota is exceeded.
    """
    owner = namespace_of(connection, namespace)
    quota, rules = _quota(hub, owner), parse_rules(owner.rules)
    if quota is None or not size:
        return rules
    used = used_bytes(connection, namespace, committed=is_early)
    promised = 0 if is_early else promised_bytes(connection, namespace)
    if used + promised + (0 if is_kept else size) <= quota:
        return rules
    before = f"{used - size * is_kept:,}" if not promised else f"{used:,}"
    waiting = f", and uploads are promised {promised:,}" if promised else ""
    raise TooManyBytesError(
        f"{owner.name} has used {before} of its {quota:,} bytes{waiting}, so {size:,} more do not "
        "fit; adapterhub hub org DIR NAME --quota SIZE changes it"
    )


class _Gate:
    """The check of a transaction's changes against the rules of the hub."""

    def __init__(
        self, hub: Hub, connection: Connection, visitor: Visitor | None, checked: CheckedFiles
    ) -> None:
        self.hub, self.connection, self.visitor, self.checked = hub, connection, visitor, checked
        self.changes = changes_of(connection)
        self.read = received_reader(connection, hub.blobs)

    def admit(self) -> None:
        """Refuse the changes, or store the new files.

        Raises:
            HubRefusal: a rule is violated.
        """
        found = (repository_of_id(self.connection, each) for each in self.changes.repositories)
        known = {each.id: each for each in found if each is not None}
        for repository in known.values():
            owner = namespace_of(self.connection, repository.namespace)
            if not repository.is_mirrored:
                self._check_repository(repository, parse_rules(owner.rules))
        self._check_rooms(known)
        for staged in self.changes.files:
            self.hub.blobs.put(staged)
        self.changes.are_admitted = True

    def _check_repository(self, repository: HubRepository, rules: NamespaceRules) -> None:
        own = repository.id
        self._check_refs(repository, rules)
        versions = [each for each in self.changes.versions if each.repository == own]
        for version in versions:
            self._check_number(version)
        came_from = self.changes.moved.get(own, repository.namespace)
        if own in self.changes.moved:
            trees = _trees(self.connection, own)
        else:
            named = [oid for repository, oid in self.changes.commits if repository == own]
            trees = _trees(self.connection, own, named)
        is_foreign = came_from != repository.namespace
        for oid, tree in trees.items():
            is_new = self.changes.commits.get((own, oid), False)
            known = set() if is_foreign else self._known_before(own, oid, tree, is_new=is_new)
            self._check_contents(tree, rules, known)
            self._check_signed(repository, tree, rules)
        for version in versions:
            for tree in _trees(self.connection, own, [version.commit]).values():
                check_version(tree, self.read, f"v{version.number}")
                self._check_signed(repository, tree, rules, f"v{version.number}")

    def _check_refs(self, repository: HubRepository, rules: NamespaceRules) -> None:
        """Require an admin to remove versions, protected tags and branches."""
        for own, kind, name in sorted(self.changes.refs):
            if own != repository.id or self._is_admin(repository):
                continue
            if kind != TAG or is_version_folder(name) or rules.protects(name):
                owner = repository.name.partition("/")[0]
                raise DeniedError(f"only an admin of {owner} may delete or move {name}")

    def _check_number(self, version: NewVersion) -> None:
        """Require consecutive version numbers that were never used before."""
        number, following = version.number, version.before + 1
        repository = repository_of_id(self.connection, version.repository)
        assert repository is not None
        if number < following:
            raise TakenError(
                f"v{number} was given before: a number is not used again; the next is v{following}"
            )
        skipped = MOST_SKIPPED if self._is_admin(repository) else 0
        if self.hub.options.is_read_only:  # it shows a registry
            skipped = MOST_VERSIONS
        if number > following + skipped:
            raise TakenError(
                f"v{number} is not the next version: it is v{following}. Versions are numbered one "
                f"after the other; an admin may skip {MOST_SKIPPED:,} numbers"
            )

    def _is_admin(self, repository: HubRepository) -> bool:
        return self.visitor is None or self.visitor.may(ADMIN, repository.namespace)

    def _known_before(
        self, repository: int, oid: str, tree: Tree, *, is_new: bool
    ) -> Set[tuple[str, str]]:
        """Return the files of a commit that the repository had before: they are checked already."""
        own = _files(tree)
        if not is_new:
            return own
        parent = select(commits.c.parent).where(
            commits.c.repository == repository, commits.c.oid == oid
        )
        before = [each for each in self.connection.execute(parent).scalars() if each]
        known = self.checked.files.union(
            *map(_files, _trees(self.connection, repository, before, with_removed=True).values())
        )
        if not own <= known:  # a restored version has them from an older commit
            new = {each for each, is_new in self.changes.commits.items() if is_new}
            trees = _trees(self.connection, repository)
            older = [each for own, each in trees.items() if (repository, own) not in new]
            known = known.union(*map(_files, older))
        return own & (known - self.checked.files)

    def _check_contents(
        self, tree: Tree, rules: NamespaceRules, known: Set[tuple[str, str]]
    ) -> None:
        """Refuse names and contents of new files that violate the rules."""
        done = self.checked.files if self.checked.rules == rules else frozenset()
        staged = {each.info.sha256: each for each in self.changes.files}
        for path, blob in tree.items():
            if (path, blob.sha256) not in done and (path, blob.sha256) not in known:
                received = {path: staged[blob.sha256]} if blob.sha256 in staged else None
                check_files(self.hub, [(path, blob.sha256, blob.size)], rules, received)

    def _check_signed(
        self, repository: HubRepository, tree: Tree, rules: NamespaceRules, version: str = ""
    ) -> None:
        problem = signature_problem(tree, self.read, repository.name, rules, version)
        if problem:
            raise HubRefusal(problem)

    def _check_rooms(self, known: Mapping[int, HubRepository]) -> None:
        """Refuse files that exceed the quotas of the namespaces."""
        fresh: dict[int, set[str]] = {}
        for own, sha256 in self.changes.granted:
            if own in known:
                fresh.setdefault(known[own].namespace, set()).add(sha256)
        for own, came_from in self.changes.moved.items():
            if own in known and known[own].namespace != came_from:
                trees = _trees(self.connection, own).values()
                moved = {blob.sha256 for tree in trees for blob in tree.values()}
                fresh.setdefault(known[own].namespace, set()).update(moved)
        for namespace, digests in fresh.items():
            size = sizes_of(self.connection, digests)
            check_room(self.hub, self.connection, namespace, size, is_kept=True)


def _files(tree: Tree) -> Set[tuple[str, str]]:
    return {(path, blob.sha256) for path, blob in tree.items()}


def _trees(
    connection: Connection,
    repository: int,
    oids: Iterable[str] | None = None,
    *,
    with_removed: bool = False,
) -> dict[str, Tree]:
    """Return the trees of all downloadable commits, or of some, by oid."""
    chosen = select(commits.c.oid, commits.c.tree).where(commits.c.repository == repository)
    if not with_removed:
        chosen = chosen.where(commits.c.is_removed.is_(False))
    if oids is not None:
        chosen = chosen.where(commits.c.oid.in_([*oids]))
    rows = connection.execute(chosen).all()
    return {row.oid: read_tree(connection, row.tree) for row in rows}
