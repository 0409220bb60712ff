"""Keeping house: collect what nobody needs, verify, back up, restore, upgrade.

Collecting and backing up exclude each other, by a lock in the hub's folder; neither stops the
server. A file is forgotten in one transaction and removed in the next, unless it was put in its
place anew in between: whenever it ends, what the database names is there.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from filelock import FileLock
from sqlalchemy import Connection, delete, select, text

from adapterhub.errors import ConfigError, FileError, OutputError
from adapterhub.files.atomic import explained, file_digest, sync_folder
from adapterhub.hub.accounts import MIRROR
from adapterhub.hub.blobs import BlobFolder
from adapterhub.hub.database import Database, schema_revision
from adapterhub.hub.state import (
    DATABASE,
    NEW_DATABASE,
    Hub,
    has_other_files,
    open_hub,
    require_schema,
    serving_alone,
)
from adapterhub.hub.tables import (
    SCHEMA_REVISION,
    blobs,
    commits,
    grants,
    namespaces,
    repositories,
    trees,
)
from adapterhub.hub.times import now_text
from adapterhub.hub.trees import read_tree

GRACE_SECONDS = 2 * 3600.0  # of a file that was uploaded and is not yet committed
_AT_ONCE = 200  # files that are removed in one transaction
KEEPING = ".keeping"  # held while files are removed or copied


@dataclass
class CollectReport:
    """What was collected: files and their bytes, trees, and uploads that did not end."""

    files: int = 0
    size: int = 0
    trees: int = 0
    uploads: int = 0


def collect(hub: Hub, *, dry_run: bool = False, grace: float = GRACE_SECONDS) -> CollectReport:
    """Remove the files that no commit needs, and what interrupted uploads left behind.

    Args:
        hub: the hub, which may be serving.
        dry_run: remove nothing, and say what would be.
        grace: the seconds that an uploaded file waits for its commit.
    """
    report = CollectReport()
    with FileLock(hub.folder / KEEPING):
        before = now_text(grace)
        late = (grants.c.is_committed.is_(False), grants.c.granted < before)
        if not dry_run:
            with hub.database.writing() as connection:
                connection.execute(delete(grants).where(*late))
        with hub.database.reading() as connection:
            known = set(connection.execute(select(blobs.c.sha256)).scalars())
            needed = set(
                connection.execute(
                    select(grants.c.sha256).where(~(late[0] & late[1]) if dry_run else text("1"))
                ).scalars()
            )
        unneeded = [*(known - needed), *(set(hub.blobs.all()) - known)]
        for some in _batches(unneeded):
            if dry_run:
                report.files += len(some)
                report.size += sum(size_on_disk(hub.blobs.path(sha256)) for sha256 in some)
                continue
            with hub.database.writing() as connection:
                gone = [sha256 for sha256 in some if forget_blob(connection, sha256)]
            report.files += len(gone)
            report.size += remove_files(hub, gone)
        report.trees = _collect_trees(hub, dry_run)
        report.uploads = _collect_uploads(hub.folder, dry_run, grace)
    return report


def verify_hub(hub: Hub) -> list[str]:
    """Read everything, and list the problems."""
    problems = []
    with hub.database.reading() as connection:
        found = connection.execute(text("PRAGMA integrity_check(20)")).scalars().all()
        problems += [f"{DATABASE}: {line}" for line in found if line != "ok"]
        problems += [*_problems_of_commits(connection)]
        known = {row.sha256: row.size for row in connection.execute(select(blobs))}
    for sha256, size in known.items():
        path = hub.blobs.path(sha256)
        if not path.exists():
            problems.append(f"blobs/{sha256}: missing{_users(hub, sha256)}")
        elif (has := file_digest(path)).sha256 != sha256 or has.size != size:
            users = _users(hub, sha256)
            fate = "; removed, and fetched again when asked for" * _forget_copy(hub, sha256)
            problems.append(f"blobs/{sha256}: its bytes have changed{users}{fate}")
    return problems


def backup_hub(folder: Path, target: Path) -> int:
    """Copy a hub to another folder, also while it serves; return how many files were copied.

    The result is a hub. A copy that is there already gets what is new; it is the old one until all
    of that is there.

    Raises:
        OutputError: the target cannot be written.
        FileError: a file of the hub is missing.
    """
    require_schema(folder)
    source = BlobFolder(folder)
    if target.exists() and not (target / DATABASE).exists() and has_other_files(target):
        raise OutputError(f"{target} has other files", expected="an empty folder, or a backup")
    with explained(target), FileLock(folder / KEEPING):
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = BlobFolder(target)
        place.create()
        part = target / NEW_DATABASE
        _copy_database(folder / DATABASE, part)
        copied = 0
        for sha256, size in _blobs_in(part):
            if size_on_disk(place.path(sha256)) != size:
                _copy_blob(source.path(sha256), place.path(sha256))
                copied += 1
        for inside in place.folder.iterdir():
            sync_folder(inside)
        (target / f"{DATABASE}-wal").unlink(missing_ok=True)
        (target / f"{DATABASE}-shm").unlink(missing_ok=True)
        os.replace(part, target / DATABASE)
        sync_folder(target)
    return copied


def restore_hub(source: Path, folder: Path) -> int:
    """Make a new hub of a backup, and verify it; return the number of its files.

    Raises:
        OutputError: the folder has something already.
        FileError: the backup is damaged.
    """
    if folder.exists() and has_other_files(folder):
        raise OutputError(f"{folder} exists", expected="a folder that does not exist, or is empty")
    copied = backup_hub(source, folder)
    with open_hub(folder) as hub:
        if problems := verify_hub(hub):
            raise FileError(f"the backup {source} is damaged", offenders=problems)
    return copied


def upgrade_hub(folder: Path, versions: Path | None = None) -> str | None:
    """Change the tables of a hub to those of this release; return those it had, None if equal.

    A copy is changed, and takes the place of the database at the end; the database as it was stays
    beside it as `before-REVISION.sqlite`. `versions` is another folder of changes, for tests.

    Raises:
        ConfigError: there is no hub, or a server runs on it.
        FileError: a newer release has changed it.
    """
    path = folder / DATABASE
    found = schema_revision(path)
    if found is None:
        raise ConfigError(f"there is no hub in {folder}")
    target = _newest(versions) if versions else SCHEMA_REVISION
    if found == target:
        return None
    if found > target:
        require_schema(folder)
    with explained(folder), serving_alone(folder):
        staged = folder / "upgrading.sqlite"
        _copy_database(path, staged)
        _migrate(staged, versions)
        _copy_database(path, folder / f"before-{target}.sqlite")
        _leave_wal(path)
        os.replace(staged, path)
        sync_folder(folder)
    return found


def forget_blob(connection: Connection, sha256: str) -> bool:
    """Forget a file unless it was granted since; return whether. `remove_files` comes next."""
    if connection.execute(select(grants.c.sha256).where(grants.c.sha256 == sha256)).first():
        return False
    connection.execute(delete(blobs).where(blobs.c.sha256 == sha256))
    return True


def remove_files(hub: Hub, digests: Collection[str]) -> int:
    """Remove files that were forgotten, unless they are known again; return their bytes."""
    size = 0
    with hub.database.writing() as connection:
        chosen = select(blobs.c.sha256).where(blobs.c.sha256.in_(digests))
        for sha256 in {*digests} - {*connection.execute(chosen).scalars()}:
            size += max(size_on_disk(hub.blobs.path(sha256)), 0)
            hub.blobs.remove(sha256)
    return size


def _collect_trees(hub: Hub, dry_run: bool) -> int:
    unused = trees.c.oid.not_in(select(commits.c.tree))
    if dry_run:
        with hub.database.reading() as connection:
            return len(connection.execute(select(trees.c.oid).where(unused)).all())
    with hub.database.writing() as connection:
        return connection.execute(delete(trees).where(unused)).rowcount


def _collect_uploads(folder: Path, dry_run: bool, grace: float) -> int:
    found, before = 0, time.time() - grace
    for place in (folder / "incoming", folder / "parts"):
        for path in place.iterdir() if place.exists() else ():
            with suppress(FileNotFoundError):  # received just now, and put in its place
                inside = path.iterdir() if path.is_dir() else ()
                if max(p.stat().st_mtime for p in (path, *inside)) < before:
                    found += 1
                    if not dry_run:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def _problems_of_commits(connection: Connection) -> Iterator[str]:
    rows = connection.execute(
        select(repositories.c.id, repositories.c.name, commits.c.oid, commits.c.tree)
        .join(commits, commits.c.repository == repositories.c.id)
        .join(namespaces, namespaces.c.id == repositories.c.namespace)
        .where(commits.c.is_removed.is_(False), namespaces.c.kind != MIRROR)
    ).all()
    granted: dict[int, set[str]] = {}
    for repository, sha256 in connection.execute(select(grants.c.repository, grants.c.sha256)):
        granted.setdefault(repository, set()).add(sha256)
    for row in rows:
        own = granted.get(row.id, set())
        for path, blob in read_tree(connection, row.tree).items():
            if blob.sha256 not in own:
                yield f"{row.name}@{row.oid[:12]}: {path} is not granted"


def _forget_copy(hub: Hub, sha256: str) -> bool:
    """Remove a file that is damaged, if only mirrored repositories have it; return whether."""
    kinds = (
        select(namespaces.c.kind)
        .join(repositories, repositories.c.namespace == namespaces.c.id)
        .join(grants, grants.c.repository == repositories.c.id)
        .where(grants.c.sha256 == sha256)
    )
    with FileLock(hub.folder / KEEPING):
        with hub.database.writing() as connection:
            if {*connection.execute(kinds).scalars()} != {MIRROR}:
                return False
            connection.execute(delete(grants).where(grants.c.sha256 == sha256))
            forget_blob(connection, sha256)
        remove_files(hub, [sha256])
    return True


def _users(hub: Hub, sha256: str) -> str:
    with hub.database.reading() as connection:
        names = connection.execute(
            select(repositories.c.name)
            .join(grants, grants.c.repository == repositories.c.id)
            .where(grants.c.sha256 == sha256)
            .order_by(repositories.c.name)
            .limit(3)
        ).scalars()
        shown = ", ".join(names)
    return f" (of {shown})" if shown else ""


def _copy_database(source: Path, target: Path) -> None:
    """Copy a database while others write to it."""
    target.unlink(missing_ok=True)
    with (
        closing(sqlite3.connect(source)) as old,
        closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)
        new.execute("PRAGMA journal_mode=DELETE")
    os.chmod(target, 0o600)
    with open(target, "rb+") as file:
        os.fsync(file.fileno())


def _leave_wal(path: Path) -> None:
    """Write what is in the log into a database's file, so that the file alone is the database."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")


def _blobs_in(database: Path) -> list[tuple[str, int]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT sha256, size FROM blobs ORDER BY sha256").fetchall()


def _copy_blob(source: Path, target: Path) -> None:
    staged = target.with_name(f"{target.name}.new")
    try:
        shutil.copyfile(source, staged)
    except FileNotFoundError:
        raise FileError(
            f"{source} is missing", hint="adapterhub hub verify lists all problems"
        ) from None
    with open(staged, "rb+") as file:
        os.fsync(file.fileno())
    os.chmod(staged, 0o400)
    os.replace(staged, target)


def _newest(versions: Path) -> str:
    return max(path.name[1:5] for path in versions.glob("r*.py"))


def _migrate(path: Path, versions: Path | None) -> None:
    """Apply the changes of the tables that a database has not seen."""
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    config.set_main_option("path_separator", "newline")
    if versions is not None:
        config.set_main_option("version_locations", str(versions))
    script = ScriptDirectory.from_config(config)
    database = Database(path)
    try:
        with (
            database.engine.connect() as connection,
            EnvironmentContext(
                config, script, fn=lambda revision, _: script._upgrade_revs("head", revision)
            ) as environment,
        ):
            environment.configure(connection=connection, render_as_batch=True)
            with environment.begin_transaction():
                environment.run_migrations()
            connection.commit()
    finally:
        database.close()
    _leave_wal(path)


def size_on_disk(path: Path) -> int:
    """Return the bytes of a file; -1 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _batches(items: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(items)
    while some := [*islice(rest, _AT_ONCE)]:
        yield some
