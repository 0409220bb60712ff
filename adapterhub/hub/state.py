"""An open hub: its place, its database, its files, and the operator's options.

DIR/hub.sqlite      everything except the files
DIR/blobs           the files, by their sha256
DIR/incoming        files that are being received; removed when the server starts

A hub of several processes uses a PostgreSQL database instead, whose table of settings names the
bucket with the files.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout
from sqlalchemy import URL, Connection, insert, select
from sqlalchemy.exc import DatabaseError

from adapterhub.errors import ConfigError, FileError
from adapterhub.hub.blobs import BlobFolder, Blobs
from adapterhub.hub.database import (
    DATABASE,
    NEW_DATABASE,
    SCHEMA_REVISION,
    Database,
    HubPlace,
    SqliteDatabase,
    audit,
    create_database_file,
    create_tables,
    revision_in,
    settings,
    write_audit,
)
from adapterhub.web.errors import BusyError, HubRefusal
from adapterhub.web.frame import RequestMetrics
from adapterhub.web.tokens import digest_of_token, new_token

BLOBS, WRITES = "blobs", "writes"
OF_PLACE = (BLOBS, WRITES)
"""Settings of a hub of several processes: its bucket, and the number of writes."""
_FAILURES, _WINDOW = 20, 60.0  # failed logins of an address, within seconds
_MOST_ADDRESSES = 10_000


@dataclass(frozen=True)
class HubOptions:
    """The options of an operator.

    Attributes:
        public_url: the address for clients; None for the address of each request.
        open_reading: whether public repositories can be read without a token.
        regular_max: the largest size in bytes of a file that is sent within the commit.
        max_file: the largest size of a file in bytes.
        quota: the default quota of a namespace in bytes; None for no limit.
        hosts: the accepted host names, in addition to the host of `public_url`.
        user_header: the header that a trusted proxy sets to the user's name.
        proxies: the addresses or networks of proxies whose forwarded headers are trusted.
        is_read_only: whether all writes are refused, because the hub shows a registry.
        upstream: the address of the hub to fetch missing content from.
        upstream_token: names or patterns of its repositories that are requested with the
            operator's token.
    """

    public_url: str | None = None
    open_reading: bool = False
    regular_max: int = 256 << 20
    max_file: int = 64 << 30
    quota: int | None = None
    hosts: tuple[str, ...] = ()
    user_header: str | None = None
    proxies: tuple[str, ...] = ()
    is_read_only: bool = False
    upstream: str | None = None
    upstream_token: tuple[str, ...] = ()


@dataclass
class FailedLogins:
    """Failed logins by address, to slow down attempts to guess tokens.

    Only wrong tokens are counted and refused. A valid token from the same address is served, since
    many people may share an address.
    """

    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, address: str) -> None:
        """Refuse an address with too many failures.

        Raises:
            HubRefusal: the address has too many failures.
        """
        with self.lock:
            recent = [t for t in self.times.get(address, ()) if t > time.monotonic() - _WINDOW]
        if len(recent) >= _FAILURES:
            raise HubRefusal(
                "too many wrong tokens from this address; try again in a minute",
                status=429,
                headers={"retry-after": f"{_WINDOW:.0f}"},
            )

    def note(self, address: str) -> None:
        """Count a failure.

        Raises:
            HubRefusal: the address has too many failures.
        """
        self.check(address)
        with self.lock:
            if len(self.times) >= _MOST_ADDRESSES:
                self.times.clear()
            self.times[address] = [*self.times[address][-_FAILURES:], time.monotonic()]


class Hub:
    """An open hub.

    Args:
        place: where the hub is.
        options: the operator's options.

    Attributes:
        metrics: the metrics of requests.
        used_tokens: the names of tokens used since the last note in the database.
        operator: the digest of the token of `operator_token`; "" outside of it.

    Raises:
        ConfigError: the hub does not exist, or another program made it.
    """

    def __init__(self, place: HubPlace, options: HubOptions | None = None) -> None:
        self.place, self.options = place, options or HubOptions()
        require_schema(place)
        self.database = open_database(place)
        with self.database.reading() as connection:
            rows = connection.execute(select(settings.c.key, settings.c.value))
            stored = {row.key: row.value for row in rows}
        self.secret = bytes.fromhex(stored["secret"])
        self.blobs = blobs_of(place, stored)
        self.failed_logins = FailedLogins()
        self.metrics = RequestMetrics("adapterhub_hub")
        self.used_tokens: set[str] = set()
        self.operator = ""

    @contextmanager
    def operator_token(self) -> Iterator[str]:
        """Yield a token with all permissions, valid only in this process and context.

        It is not in the database, so no other process that serves the hub accepts it.
        """
        token = new_token()
        self.operator = digest_of_token(token)
        try:
            yield token
        finally:
            self.operator = ""

    def note_failure(self, address: str, action: str) -> None:
        """Count a wrong token, and write it to the audit log.

        Raises:
            HubRefusal: the address sends too many wrong tokens.
        """
        self.failed_logins.note(address)
        if not self.options.is_read_only:
            with suppress(BusyError), self.database.writing() as connection:
                write_audit(connection, "", "", f"failed {action}", "", address)

    def close(self) -> None:
        """Close the database."""
        self.database.close()
        self.blobs.close()


def open_database(place: HubPlace) -> Database:
    """Open the database of a hub.

    Raises:
        ConfigError: the database does not exist, or its library is not installed.
    """
    if isinstance(place, Path):
        return SqliteDatabase(place / DATABASE)
    from adapterhub.hub.postgres import PostgresDatabase

    return PostgresDatabase(place)


def blobs_of(place: HubPlace, settings: Mapping[str, str]) -> Blobs:
    """Return the file store of a hub with these settings."""
    if isinstance(place, Path):
        return BlobFolder(place)
    from adapterhub.hub.bucket_blobs import BlobBucket

    return BlobBucket(settings[BLOBS])


def create_hub(place: HubPlace, blobs: str | None = None) -> None:
    """Create an empty hub, unless there is one.

    Args:
        place: a folder, or a PostgreSQL database without a hub's tables.
        blobs: the bucket for the files, with a database.

    Raises:
        ConfigError: the folder has other files, or the bucket is missing or a different one.
    """
    if not isinstance(place, Path):
        _create_shared_hub(place, blobs)
        return
    if blobs is not None:
        raise ConfigError(
            f"--blobs {blobs}: a hub in a folder has its files there",
            expected="postgresql://HOST/DATABASE --blobs s3://BUCKET/PREFIX",
        )
    if (place / DATABASE).exists():
        return
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    if has_other_files(place):
        raise ConfigError(
            f"{place} has other files, and no hub",
            expected="a hub, an empty folder, or none",
            hint="another folder",
        )
    BlobFolder(place).create()
    for path in place.glob(f"{NEW_DATABASE}*"):
        path.unlink()
    database = create_database_file(place / NEW_DATABASE)
    with database.writing() as connection:
        connection.execute(insert(settings).values(key="secret", value=secrets.token_hex(32)))
    database.close()
    (place / NEW_DATABASE).rename(place / DATABASE)


def _create_shared_hub(place: URL, blobs: str | None) -> None:
    from adapterhub.hub.bucket_blobs import BlobBucket
    from adapterhub.hub.postgres import PostgresDatabase

    with closing(PostgresDatabase(place)) as database, database.creating() as connection:
        if revision_in(connection) is not None:
            known = select(settings.c.value).where(settings.c.key == BLOBS)
            recorded = connection.execute(known).scalar_one()
            if blobs is not None and blobs.rstrip("/") != recorded:
                raise ConfigError(
                    f"--blobs {blobs}: the files of this hub are in {recorded}",
                    hint="leave --blobs out",
                )
            return
        if blobs is None:
            raise ConfigError(
                f"no hub in {place} yet, and no bucket for its files",
                hint="--blobs s3://BUCKET/PREFIX",
            )
        bucket = BlobBucket(blobs)
        try:
            bucket.check()
        finally:
            bucket.close()
        create_tables(connection)
        values = {"secret": secrets.token_hex(32), BLOBS: bucket.url, WRITES: "0"}
        rows = [{"key": key, "value": value} for key, value in values.items()]
        connection.execute(insert(settings), rows)


def has_other_files(folder: Path) -> bool:
    """Return whether a folder has more than the remains of an interrupted creation of a hub."""
    others = {path.name for path in folder.iterdir()} - {"blobs", "incoming", ".lock"}
    return any(name != NEW_DATABASE and not name.startswith(f"{NEW_DATABASE}-") for name in others)


@contextmanager
def open_hub(place: HubPlace, options: HubOptions | None = None) -> Iterator[Hub]:
    """Open a hub, and close it at the end.

    Raises:
        ConfigError: the hub does not exist, or another program made it.
    """
    hub = Hub(place, options)
    try:
        yield hub
    finally:
        hub.close()


@contextmanager
def serving_alone(folder: Path) -> Iterator[None]:
    """Lock a hub's folder for a server, and remove files that an earlier one was receiving.

    Raises:
        ConfigError: another server is running on it.
    """
    try:
        with FileLock(folder / ".lock", timeout=0):
            shutil.rmtree(folder / "incoming", ignore_errors=True)
            BlobFolder(folder).create()
            yield
    except Timeout:
        raise ConfigError(f"another server runs on {folder}") from None


def schema_revision(place: HubPlace) -> str | None:
    """Return the schema revision of a hub's database; None if it has none.

    Raises:
        FileError: the file is not a database.
        ConfigError: the database does not exist, or its library is not installed.
    """
    if isinstance(place, Path):
        path = place / DATABASE
        if not path.exists() or not path.stat().st_size:
            return None
    database = open_database(place)
    try:
        with database.reading() as connection:
            return revision_in(connection)
    except DatabaseError as error:
        raise FileError(
            f"{place} does not have the database of a hub: {type(error).__name__}",
            hint="adapterhub hub restore, from a backup",
        ) from None
    finally:
        database.close()


def require_schema(place: HubPlace) -> None:
    """Refuse a hub whose tables belong to another release.

    Raises:
        ConfigError: the hub does not exist, or must be upgraded.
        FileError: a newer release has changed it.
    """
    schema = schema_revision(place)
    if schema is None:
        hint = f"adapterhub hub start {place}"
        bucket = "" if isinstance(place, Path) else " --blobs s3://BUCKET/PREFIX"
        raise ConfigError(f"no hub in {place}", hint=f"{hint}{bucket}")
    if schema == SCHEMA_REVISION:
        return
    if schema > SCHEMA_REVISION:
        raise FileError(
            f"the hub in {place} was changed by a newer adapterhub (its tables are {schema}, here "
            f"they are {SCHEMA_REVISION})",
            hint="install that release, or restore the backup that its upgrade made",
        )
    raise ConfigError(
        f"the hub in {place} was made by an older adapterhub",
        hint=f"adapterhub hub upgrade {place}, "
        + ("which makes a backup first" if isinstance(place, Path) else "after a backup of it"),
    )


def audit_rows(connection: Connection, most: int) -> Sequence[dict[str, str]]:
    """Return the newest rows of the audit log, newest first."""
    rows = connection.execute(select(audit).order_by(audit.c.id.desc()).limit(most))
    return [dict(row) for row in rows.mappings()]
