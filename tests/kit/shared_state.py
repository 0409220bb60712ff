"""PostgreSQL and S3 on this machine, for hubs of several processes."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import URL, make_url

from adapterhub.hub.database import HubPlace
from tests.kit import web_servers
from tests.kit.selection import ALL
from tests.kit.waiting import wait_until

STATES = ["folder", "shared"] if ALL else ["folder"]
"""Where hubs of tests are; a fixture has them as parameters."""
NO_SYNC = ("fsync=off", "synchronous_commit=on", "full_page_writes=off", "listen_addresses=")


def place_of(request: pytest.FixtureRequest, folder: Path) -> tuple[HubPlace, str | None]:
    """Return where a hub is to be, and its bucket, as the parameter of a fixture says."""
    if getattr(request, "param", "folder") == "folder":
        return folder, None
    place: tuple[HubPlace, str] = request.getfixturevalue("new_state")()
    return place


def programs() -> Path | None:
    """Return the folder of PostgreSQL's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@contextmanager
def postgres(*settings: str) -> Iterator[Callable[[], URL]]:
    """Run a server; yield a function that creates a database and returns its address."""
    place = programs()
    assert place is not None
    user = {"user": "postgres"} if os.getuid() == 0 else {}  # the server does not run as root
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        Path(folder).chmod(0o700)
        if user:
            shutil.chown(folder, "postgres")

        def run(name: str, *options: str) -> None:
            command = [str(place / name), *options]
            subprocess.run(command, check=True, capture_output=True, cwd=folder, **user)

        data = f"{folder}/data"
        run("initdb", "-D", data, "-U", "hub", "--no-sync", "-A", "trust", "-E", "UTF8",
            "--locale=C.UTF-8")  # fmt: skip
        chosen = (*NO_SYNC, *settings, f"unix_socket_directories={folder}")
        command = [str(place / "postgres"), "-D", data, *(f"-c{each}" for each in chosen)]
        process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL, **user)
        try:
            base = make_url(f"postgresql://hub@/postgres?host={folder}")
            ready = [str(place / "pg_isready"), "-h", folder]
            wait_until(lambda: subprocess.run(ready, capture_output=True).returncode == 0)
            yield lambda: _created(base)
        finally:
            process.terminate()
            process.wait()


def _created(base: URL) -> URL:
    import psycopg

    name = f"hub_{secrets.token_hex(6)}"
    with psycopg.connect(
        host=base.query["host"], user="hub", dbname="postgres", autocommit=True
    ) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return base.set(database=name)


@contextmanager
def shared_state(*settings: str) -> Iterator[Callable[[], tuple[URL, str]]]:
    """Run both; yield a function that returns a new database and a new place in the bucket.

    The variables of the environment say where S3 is, as for any program that uses it.
    """
    with postgres(*settings) as created, web_servers.moto() as options:
        variables = {
            "AWS_ENDPOINT_URL": options["endpoint"],
            "AWS_ACCESS_KEY_ID": options["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": options["secret_access_key"],
            "AWS_REGION": options["region"],
            "AWS_ALLOW_HTTP": "true",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            yield lambda: (created(), f"s3://bucket/{secrets.token_hex(6)}")
