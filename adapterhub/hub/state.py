"""A hub that is open: its folder, its database, its files, and what its operator chose.

DIR/hub.sqlite      everything but the files
DIR/blobs           the files, by their sha256
DIR/incoming        what is being received; removed when the server starts
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout
from sqlalchemy import Connection, insert, select

from adapterhub.errors import ConfigError, FileError
from adapterhub.hub.accounts import Visitor
from adapterhub.hub.blobs import BlobFolder
from adapterhub.hub.database import Database, create_tables, schema_revision
from adapterhub.hub.hub_metrics import HubMetrics
from adapterhub.hub.refusals import HubRefusal
from adapterhub.hub.tables import SCHEMA_REVISION, audit, settings
from adapterhub.hub.times import now_text

DATABASE, NEW_DATABASE = "hub.sqlite", "new.sqlite"
_FAILURES, _WINDOW = 20, 60.0  # failed logins of an address, within seconds
_MOST_ADDRESSES = 10_000


@dataclass(frozen=True)
class HubOptions:
    """What an operator chooses.

    Attributes:
        public_url: the address that clients use; None for the one that they ask by.
        open_reading: whether what is not private may be read without a token.
        regular_max: the bytes up to which a file is sent within the commit.
        max_file: the bytes of the largest file.
        quota: the bytes of a namespace without a quota of its own; None for no limit.
        hosts: the names that a request may ask by, besides that of `public_url`.
        user_header: the header in which a trusted proxy says who is logged in.
        proxies: the addresses of trusted proxies.
        is_read_only: whether nobody writes, since it shows something else.
        upstream: the address of the hub that is asked for what is not here.
        upstream_token: names of its repositories, or patterns of them, that are asked with the
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
    """How often an address has sent a wrong token, to slow down those who guess."""

    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, address: str) -> None:
        """Refuse an address that fails too often.

        Raises:
            HubRefusal: it does.
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
        """Remember a failure."""
        with self.lock:
            if len(self.times) >= _MOST_ADDRESSES:
                self.times.clear()
            self.times[address] = [*self.times[address][-_FAILURES:], time.monotonic()]


class Hub:
    """An open hub.

    Args:
        folder: the folder of the hub.
        options: what its operator chose.

    Raises:
        ConfigError: there is none, or another program made it.
    """

    def __init__(self, folder: Path, options: HubOptions | None = None) -> None:
        self.folder, self.options = folder, options or HubOptions()
        require_schema(folder)
        self.database = Database(folder / DATABASE)
        self.blobs = BlobFolder(folder)
        with self.database.reading() as connection:
            value = select(settings.c.value).where(settings.c.key == "secret")
            self.secret = bytes.fromhex(connection.execute(value).scalar_one())
        self.failed_logins = FailedLogins()
        self.metrics = HubMetrics()
        self._used: set[str] = set()

    def note_token(self, name: str) -> None:
        """Remember that a token was used; `take_used` says which were."""
        self._used.add(name)

    def take_used(self) -> list[str]:
        """Return the tokens that were used since the last call."""
        used, self._used = self._used, set()
        return sorted(used)

    def note_action(
        self, connection: Connection, visitor: Visitor, action: str, target: str, address: str = ""
    ) -> None:
        """Write to the audit log who did what, in the transaction that does it."""
        connection.execute(
            insert(audit).values(
                time=now_text(),
                who=visitor.user,
                token=visitor.token,
                action=action,
                target=target[:300],
                address=address,
            )
        )

    def close(self) -> None:
        """Close the database."""
        self.database.close()


def create_hub(folder: Path) -> None:
    """Create an empty hub in a folder, unless there is one.

    Raises:
        ConfigError: the folder has other files.
    """
    if (folder / DATABASE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if has_other_files(folder):
        raise ConfigError(
            f"{folder} has other files, and no hub",
            expected="a hub, an empty folder, or none",
            hint="another folder",
        )
    BlobFolder(folder).create()
    for path in folder.glob(f"{NEW_DATABASE}*"):
        path.unlink()
    database = Database(folder / NEW_DATABASE)
    create_tables(database)
    with database.writing() as connection:
        connection.execute(insert(settings).values(key="secret", value=secrets.token_hex(32)))
    database.close()
    (folder / NEW_DATABASE).rename(folder / DATABASE)


def has_other_files(folder: Path) -> bool:
    """Return whether a folder has more than the rest of a hub whose creation was interrupted."""
    others = {path.name for path in folder.iterdir()} - {"blobs", "incoming", ".lock"}
    return any(name != NEW_DATABASE and not name.startswith(f"{NEW_DATABASE}-") for name in others)


@contextmanager
def open_hub(folder: Path, options: HubOptions | None = None) -> Iterator[Hub]:
    """Open the hub in a folder, and close it at the end.

    Raises:
        ConfigError: there is none, or another program made it.
    """
    hub = Hub(folder, options)
    try:
        yield hub
    finally:
        hub.close()


@contextmanager
def serving_alone(folder: Path) -> Iterator[None]:
    """Hold a hub's folder for a server, which removes what an earlier one was receiving.

    Raises:
        ConfigError: another server runs on it.
    """
    try:
        with FileLock(folder / ".lock", timeout=0):
            shutil.rmtree(folder / "incoming", ignore_errors=True)
            BlobFolder(folder).create()
            yield
    except Timeout:
        raise ConfigError(f"another server runs on {folder}") from None


def require_schema(folder: Path) -> None:
    """Refuse a hub whose tables are of another release.

    Raises:
        ConfigError: there is no hub, or it is to be upgraded.
        FileError: a newer release has changed it.
    """
    found = schema_revision(folder / DATABASE)
    if found is None:
        raise ConfigError(f"there is no hub in {folder}", hint=f"adapterhub hub start {folder}")
    if found == SCHEMA_REVISION:
        return
    if found > SCHEMA_REVISION:
        raise FileError(
            f"the hub in {folder} was changed by a newer adapterhub (its tables are {found}, here "
            f"they are {SCHEMA_REVISION})",
            hint="install that release, or restore the backup that its upgrade made",
        )
    raise ConfigError(
        f"the hub in {folder} is of an older adapterhub",
        hint=f"adapterhub hub upgrade {folder}, which makes a backup first",
    )


def audit_rows(connection: Connection, most: int) -> Sequence[dict[str, str]]:
    """Return the newest rows of the audit log, the newest first."""
    rows = connection.execute(select(audit).order_by(audit.c.id.desc()).limit(most))
    return [dict(row) for row in rows.mappings()]
