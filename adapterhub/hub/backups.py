"""Copies of a hub: back up, restore, and upgrade (which makes a copy first).

A backup is always a hub in a folder. Restoring it to another kind of place moves the hub.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

from sqlalchemy import Connection, Engine, delete, insert, select, text
from sqlalchemy.exc import DBAPIError

from adapterhub.config.user_folders import sync_file, sync_folder
from adapterhub.errors import ConfigError, FileError, OutputError
from adapterhub.files.atomic import explained
from adapterhub.hub.blobs import BlobFolder, BlobInfo, Blobs, StagedBlob
from adapterhub.hub.database import (
    DATABASE,
    NEW_DATABASE,
    SCHEMA_REVISION,
    HubPlace,
    SqliteDatabase,
    blobs,
    create_database_file,
    full_text_of,
    listings,
    metadata,
    namespaces,
    settings,
)
from adapterhub.hub.gc import verify_hub
from adapterhub.hub.state import (
    OF_PLACE,
    Hub,
    create_hub,
    has_other_files,
    open_database,
    open_hub,
    require_schema,
    schema_revision,
    serving_alone,
)
from adapterhub.web.errors import BusyError, FullDiskError

_AT_ONCE = 1_000  # rows


def backup_hub(place: HubPlace, target: Path) -> int:
    """Copy a hub to another folder and return the number of copied files.

    The hub may be serving meanwhile. The result is a hub. An existing copy is updated; it stays in
    its old state until all new files are there.

    Raises:
        OutputError: the target cannot be written.
        FileError: a file of the hub is missing.
    """
    require_schema(place)
    if target.exists() and not (target / DATABASE).exists() and has_other_files(target):
        raise OutputError(f"{target} has other files", expected="an empty folder, or a backup")
    with _told(target), open_hub(place) as hub, hub.database.alone():
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        copies = BlobFolder(target)
        copies.create()
        part = target / NEW_DATABASE
        _copy_database(hub, part)
        copied = 0
        for sha256, size in _blobs_in(part):
            if copies.size(sha256) != size:
                _copy_blob(hub.blobs, sha256, copies.path(sha256))
                copied += 1
        for inside in copies.folder.iterdir():
            sync_folder(inside)
        (target / f"{DATABASE}-wal").unlink(missing_ok=True)
        (target / f"{DATABASE}-shm").unlink(missing_ok=True)
        os.replace(part, target / DATABASE)
        sync_folder(target)
    return copied


def restore_hub(source: Path, place: HubPlace, bucket: str | None = None) -> int:
    """Create a hub from a backup and verify it; return the number of its files.

    Args:
        source: the backup.
        place: a new folder, or a database without a hub.
        bucket: stores the files of a hub in a database.

    Raises:
        OutputError: the place is not empty.
        FileError: the backup is damaged.
    """
    if isinstance(place, Path):
        if place.exists() and has_other_files(place):
            raise OutputError(
                f"{place} exists", expected="a folder that does not exist, or is empty"
            )
        copied = backup_hub(source, place)
    else:
        copied = _fill(source, place, bucket)
    with open_hub(place) as hub:
        if problems := verify_hub(hub):
            raise FileError(f"the backup {source} is damaged", offenders=problems)
    return copied


def upgrade_hub(place: HubPlace, versions: Path | None = None) -> str | None:
    """Upgrade the tables of a hub to this release; return the old revision, None if current.

    In a folder, a copy is changed and then replaces the database. The old database stays next to it
    as `before-REVISION.sqlite`. In PostgreSQL, everything is changed in one transaction. `versions`
    is another folder of migrations, for tests.

    Raises:
        ConfigError: there is no hub, or a server is running on it.
        FileError: a newer release has changed it.
    """
    revision = schema_revision(place)
    if revision is None:
        raise ConfigError(f"no hub in {place}")
    target = _newest(versions) if versions else SCHEMA_REVISION
    if revision == target:
        return None
    if revision > target:
        require_schema(place)
    if not isinstance(place, Path):
        with _told(place), closing(open_database(place)) as database, database.alone():
            _migrate(database.engine, versions)
        return revision
    path = place / DATABASE
    with _told(place), serving_alone(place):
        staged = place / "upgrading.sqlite"
        _copy_file(path, staged)
        with closing(SqliteDatabase(staged)) as database:
            _migrate(database.engine, versions)
        _leave_wal(staged)
        _copy_file(path, place / f"before-{target}.sqlite")
        _leave_wal(path)
        os.replace(staged, path)
        sync_folder(place)
    return revision


@contextmanager
def _told(place: HubPlace) -> Iterator[None]:
    """Explain in one sentence why a copy failed; the existing data is unchanged.

    Raises:
        OutputError: the disk is full, another program holds the database, or its tables do not
            belong to any release.
    """
    from alembic.util import CommandError

    path = place if isinstance(place, Path) else Path(str(place))
    try:
        with explained(path):
            yield
    except (sqlite3.Error, DBAPIError, CommandError, BusyError, FullDiskError) as error:
        message = " ".join(str(getattr(error, "orig", error)).split())[:200]
        raise OutputError(
            f"{place} cannot be written: {message}",
            expected="room on the disk, tables of a release, and no other program in the database",
            hint="try again; everything is as it was",
        ) from None


def _copy_database(hub: Hub, target: Path) -> None:
    """Copy the database of a hub to a file while others write to it."""
    if isinstance(hub.place, Path):
        _copy_file(hub.place / DATABASE, target)
        return
    target.unlink(missing_ok=True)
    with (
        closing(create_database_file(target)) as new,
        hub.database.reading() as rows,
        new.writing() as connection,
    ):
        _copy_rows(rows, connection)
    _leave_wal(target)
    _sync(target)


def _fill(source: Path, place: HubPlace, bucket: str | None) -> int:
    """Copy a backup to a database and a bucket; an interrupted copy starts over."""
    require_schema(source)
    create_hub(place, bucket)
    with open_hub(source) as old, open_hub(place) as new:
        with new.database.reading() as connection:
            if connection.execute(select(namespaces.c.id).limit(1)).first() is not None:
                raise OutputError(f"{place} has a hub", expected="a database without one")
        with old.database.reading() as connection:
            infos = [BlobInfo(*row) for row in connection.execute(select(blobs))]
            for info in infos:
                with old.blobs.file(info.sha256) as path:
                    new.blobs.send(StagedBlob(path, info))
            with new.database.writing() as target:
                _copy_rows(connection, target)
    return len(infos)


def _copy_rows(source: Connection, target: Connection) -> None:
    """Copy all rows to an empty database; the two may be of different kinds."""
    target.execute(delete(settings).where(settings.c.key.not_in(OF_PLACE)))
    for table in metadata.sorted_tables:
        chosen = select(table)
        if table is settings:
            chosen = chosen.where(settings.c.key.not_in(OF_PLACE))
        rows = (dict(row) for row in source.execute(chosen).mappings())
        while some := [*islice(rows, _AT_ONCE)]:
            target.execute(insert(table), some)
        if target.dialect.name == "postgresql" and "id" in table.c:
            next_id = "SELECT setval(pg_get_serial_sequence(:table, 'id'), max(id)) FROM "
            target.execute(text(f"{next_id}{table.name}"), {"table": table.name})
    index = full_text_of(target)
    for row in source.execute(select(listings.c.repository, listings.c.tokens)):
        index.write(target, row.repository, row.tokens)


def _copy_file(source: Path, target: Path) -> None:
    """Copy a database file while others write to it."""
    target.unlink(missing_ok=True)
    with (
        closing(sqlite3.connect(source)) as old,
        closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)
        new.execute("PRAGMA journal_mode=DELETE")
    os.chmod(target, 0o600)
    _sync(target)


def _leave_wal(path: Path) -> None:
    """Write the log into the database file, so that the file is complete by itself."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        sync_file(file)


def _blobs_in(database: Path) -> Iterator[tuple[str, int]]:
    with closing(sqlite3.connect(database)) as connection:
        yield from connection.execute("SELECT sha256, size FROM blobs ORDER BY sha256").fetchall()


def _copy_blob(source: Blobs, sha256: str, target: Path) -> None:
    staged = target.with_name(f"{target.name}.new")
    staged.unlink(missing_ok=True)
    try:
        source.copy(sha256, staged)
    except FileNotFoundError:
        raise FileError(
            f"blobs/{sha256} is missing", hint="adapterhub hub verify lists all problems"
        ) from None
    _sync(staged)
    os.chmod(staged, 0o400)
    os.replace(staged, target)


def _newest(versions: Path) -> str:
    return max(path.name[1:5] for path in versions.glob("r*.py"))


def _migrate(engine: Engine, versions: Path | None) -> None:
    """Apply the migrations that a database lacks."""
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    config.set_main_option("path_separator", "newline")
    if versions is not None:
        config.set_main_option("version_locations", str(versions))
    script = ScriptDirectory.from_config(config)
    with (
        engine.connect() as connection,
        EnvironmentContext(
            config, script, fn=lambda revision, _: script._upgrade_revs("head", revision)
        ) as environment,
    ):
        environment.configure(connection=connection, render_as_batch=True)
        with environment.begin_transaction():
            environment.run_migrations()
        connection.commit()
