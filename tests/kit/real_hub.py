"""A hub of ours: in this process, in processes of its own, its commits, tables and policies."""

import base64
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import URL, Connection, make_url, text

from adapterhub.hub import migrations
from adapterhub.hub.accounts import (
    change_owner,
    create_hub_token,
    create_namespace,
    find_owner,
    set_member,
)
from adapterhub.hub.database import (
    SCHEMA_REVISION,
    HubPlace,
)
from adapterhub.hub.gate import NamespaceRules, rules_text
from adapterhub.hub.gc import collect
from adapterhub.hub.import_export import answering_in_thread
from adapterhub.hub.server import HubApp, known_hosts
from adapterhub.hub.state import Hub, HubOptions, create_hub, open_hub
from tests.kit import web_servers
from tests.kit.selection import ALL
from tests.kit.session import wait_until

# A hub of ours in this process, on a free port, with the users and tokens of a test.


@dataclass
class RunningHub:
    """A hub that answers, and what tests ask it with."""

    hub: Hub
    address: str
    tokens: dict[str, str] = field(default_factory=dict)
    clients: dict[str | None, httpx2.Client] = field(default_factory=dict)

    def user(self, name: str, role: str = "write", *, is_admin: bool = False, **orgs: str) -> str:
        """Create a user with a token, in organisations, each with a role; return the token."""
        self.change(create_namespace, name, "user", is_admin=is_admin)
        for org, own in orgs.items():
            self.change(set_member, org, name, own)
        self.tokens[name] = self.token(name, role, f"{name}-laptop")
        return self.tokens[name]

    def refuse_writers(self) -> Callable[[], None]:
        """Let ada only read in acme; return what undoes that."""
        self.change(set_member, "acme", "ada", "read")
        return lambda: self.change(set_member, "acme", "ada", "write")

    def org(self, name: str) -> None:
        """Create an organisation."""
        self.change(create_namespace, name, "org")

    def token(self, user: str, role: str, name: str, **options: object) -> str:
        """Create one more token of a user."""
        return self.change(create_hub_token, user, name, role, **options)

    def change(self, change: Callable[..., Any], *given: object, **options: object) -> Any:
        """Call a function that changes the tables."""
        with self.hub.database.writing() as connection:
            return change(connection, *given, **options)

    def client(self, user: str | None = None, token: str | None = None) -> httpx2.Client:
        """Return a client of HTTP with the token of a user."""
        token = token or (self.tokens[user] if user else None)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        kind = httpx2.Client if self.is_folder else BucketClient
        return kind(base_url=self.address, headers=headers, timeout=60)

    def as_user(self, user: str | None) -> httpx2.Client:
        """Return the client of a user or of a stranger that is closed with the hub."""
        if user not in self.clients:
            self.clients[user] = self.client(user)
        return self.clients[user]

    @property
    def is_folder(self) -> bool:
        """Whether the hub is in a folder."""
        return isinstance(self.hub.place, Path)

    def overwrite(self, sha256: str, data: bytes) -> None:
        """Write other bytes in the place of a file."""
        if self.is_folder:
            path = self.hub.blobs.path(sha256)
            path.unlink(missing_ok=True)
            path.write_bytes(data)
        else:
            self.hub.blobs._objects.put(f"blobs/{sha256[:2]}/{sha256}", data)


class BucketClient(httpx2.Client):
    """Downloads files from where the hub says that they are."""

    def get(self, url, **options):
        """Follow redirects of files alone."""
        options.setdefault("follow_redirects", "/resolve/" in str(url))
        return super().get(url, **options)


@functools.cache
def _new() -> tempfile.TemporaryDirectory[str]:
    """Make a hub without users once: new ones are copies of it."""
    folder = tempfile.TemporaryDirectory()
    create_hub(Path(folder.name, "hub"))
    return folder


@contextmanager
def serving(
    place: HubPlace, prefix: str = "", blobs: str | None = None, **options: object
) -> Iterator[RunningHub]:
    """Run a hub on this machine, at a path if there is a prefix."""
    if isinstance(place, Path) and not place.exists():
        shutil.copytree(Path(_new().name, "hub"), place)
    create_hub(place, blobs)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    address = f"http://127.0.0.1:{port}{prefix}"
    if prefix:
        options["public_url"] = address
    chosen = HubOptions(**{"hosts": known_hosts("127.0.0.1", port), **options})
    with open_hub(place, chosen) as hub:
        running = RunningHub(hub, address)
        with answering_in_thread(HubApp(hub), listening):
            yield running
            for client in running.clients.values():
                client.close()


# Hubs in processes of their own, with one user and a token.


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))"
START = """
import sys
{limit}
from adapterhub.cli import main
sys.argv = ["adapterhub", "hub", "start", *sys.argv[1:]]
main()
"""


@dataclass(frozen=True)
class Made:
    """A hub, and the token of ada, who may do everything."""

    place: HubPlace
    token: str

    def client(self, address: str) -> httpx2.Client:
        """Return a client of the process at an address."""
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx2.Client(base_url=address, headers=headers, timeout=30, follow_redirects=True)

    @contextmanager
    def started(self, *options: str, files: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
        """Start a process, which may open so many files; return it with its address."""
        start = START.format(limit=LIMIT.format(files) if files else "")
        command = [sys.executable, "-c", start, str(self.place), "--port", "0", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            line = process.stdout.readline()
            try:
                yield process, re.search(r"http://\S+", line)[0]
            finally:
                process.kill()

    def keep_pushing(self, address: str, start: str, kept: dict[str, str]) -> None:
        """Commit until the process ends; note what was acknowledged."""
        with self.client(address) as client:
            for number in range(10_000):
                name = f"r{start}-{number}"
                try:
                    create(client, f"ada/{name}")
                    answer = commit(client, f"ada/{name}", {"a.md": f"{name}\n".encode()})
                    if answer.status_code == 200:
                        kept[name] = answer.json()["commitOid"]
                    commit(client, f"ada/{name}", {"b.md": b"b"})
                except (httpx2.HTTPError, AssertionError):
                    return


def made(place: HubPlace, blobs: str | None = None) -> Made:
    """Create a hub."""
    create_hub(place, blobs)
    with open_hub(place) as hub, hub.database.writing() as connection:
        create_namespace(connection, "ada", "user", is_admin=True)
        return Made(place, create_hub_token(connection, "ada", "ada-1", "admin"))


# Bodies of commits, as clients send them.


def commit_lines(files=None, *, parent=None, title="change", large=None, deleted=(), folders=()):
    """Return the body of a commit."""
    header = {"summary": title, "description": ""}
    if parent:
        header["parentCommit"] = parent
    items = [{"key": "header", "value": header}]
    for path, data in (files or {}).items():
        content = base64.b64encode(data).decode()
        value = {"content": content, "path": path, "encoding": "base64"}
        items.append({"key": "file", "value": value})
    for path, (oid, size) in (large or {}).items():
        value = {"path": path, "algo": "sha256", "oid": oid, "size": size}
        items.append({"key": "lfsFile", "value": value})
    items += [{"key": "deletedFile", "value": {"path": path}} for path in deleted]
    items += [{"key": "deletedFolder", "value": {"path": path}} for path in folders]
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)


def create(client, name, *, private=False, type="model"):
    """Create a repository; return its name."""
    owner, _, own = name.partition("/")
    visibility = "private" if private else "public"
    body = {"name": own, "organization": owner, "visibility": visibility, "type": type}
    answer = client.post("/api/repos/create", json=body)
    assert answer.status_code == 200, answer.text
    return name


def commit(client, name, files=None, *, revision="main", **options):
    """Commit files; return the answer."""
    url = f"/api/models/{name}/commit/{revision}"
    return client.post(url, content=commit_lines(files, **options))


def answered(answer, status, *words):
    """Assert that an answer has a status, and that its text has the words."""
    assert answer.status_code == status, answer.text
    for each in words:
        assert each in answer.text


def delete(client, name):
    """Delete a repository; return the answer."""
    owner, _, own = name.partition("/")
    body = {"organization": owner, "name": own}
    return client.request("DELETE", "/api/repos/delete", json=body)


def move(client, name, to):
    """Move a repository; return the answer."""
    return client.post("/api/repos/move", json={"fromRepo": name, "toRepo": to})


def tag(client, name, tag, revision="main"):
    """Tag a revision; return the answer."""
    return client.post(f"/api/models/{name}/tag/{revision}", json={"tag": tag})


def batch(client, name, *files, **more):
    """Request addresses for large files; return the answer."""
    objects = [{"oid": digest(data), "size": len(data)} for data in files]
    body = {"operation": "upload", "objects": objects, **more}
    return client.post(f"/{name}.git/info/lfs/objects/batch", json=body)


def upload(client, name, data):
    """Send a large file; return its digest."""
    (found,) = batch(client, name, data).json()["objects"]
    assert client.put(found["actions"]["upload"]["href"], content=data).status_code == 200
    return digest(data)


def push_during_collections(place, client):
    """Commit and delete equal bytes while another connection collects, and read all commits."""
    stop = threading.Event()

    def keep_collecting():
        with open_hub(place) as hub:
            while not stop.is_set():
                collect(hub, grace=3600)

    thread = threading.Thread(target=keep_collecting)
    thread.start()
    create(client, "ada/x")
    for number in range(6):
        create(client, "ada/y")
        for name in ("ada/x", "ada/y"):
            assert commit(client, name, {"a.md": b"%d" % (number % 3)}).status_code == 200
        delete(client, "ada/y")
    stop.set()
    thread.join()
    for item in client.get("/api/models/ada/x/commits/main").json()[:-1]:
        assert client.get(f"/ada/x/resolve/{item['id']}/a.md").status_code == 200


def digest(data):
    """Return the name of a file's bytes."""
    return hashlib.sha256(data).hexdigest()


def head(client, name):
    """Return the head of `main`."""
    return client.get(f"/api/models/{name}").json()["sha"]


# PostgreSQL and S3 on this machine, for hubs of several processes.


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


# Changes of a hub's tables: one that a later release could make, and those of this one undone.


NEXT = f"{int(SCHEMA_REVISION) + 1:04}"
CHANGE = f'''
"""A change of the tables."""
from alembic import op
import sqlalchemy as sa
revision = "{NEXT}"
down_revision = "{SCHEMA_REVISION}"
def upgrade():
    with op.batch_alter_table("audit") as table:
        table.add_column(sa.Column("reason", sa.Text()))
'''


def write_changes(folder: Path) -> Path:
    """Write the changes of this release and the next one to a folder; return it."""
    known = Path(migrations.__path__[0]) / "versions"
    shutil.copytree(known, folder, ignore=shutil.ignore_patterns("__*"))
    (folder / f"r{NEXT}_reason.py").write_text(CHANGE)
    return folder


def make_first(connection: Connection) -> None:
    """Give a hub the tables of the first release."""
    for statement in (
        "DROP TABLE sessions",
        "DROP TABLE renamed",
        "DROP TABLE promises",
        "ALTER TABLE namespaces DROP COLUMN is_disabled",
        "DELETE FROM settings WHERE key LIKE 'highest id of %'",
        "UPDATE alembic_version SET version_num = '0001'",
    ):
        connection.execute(text(statement))


# The rules of a namespace.


def set_rules(hub: RunningHub, name: str, quota: int | None = None, **rules: Any) -> None:
    """Set the rules of a namespace."""
    owner = hub.change(find_owner, name)
    hub.change(change_owner, owner.id, rules_text(NamespaceRules(**rules)), quota)
