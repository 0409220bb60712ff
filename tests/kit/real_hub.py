"""A hub of ours: in this process, in processes of its own, its commits, tables and policies."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import save
from sqlalchemy import URL, Connection, make_url, select, text

from adapterhub.files.native import Saved
from adapterhub.files.signature import Statement, parse_signatures, sign_statement
from adapterhub.files.signature import signatures_to_json as signature_file
from adapterhub.hub import migrations
from adapterhub.hub.accounts import (
    change_owner,
    create_hub_token,
    create_namespace,
    find_owner,
    set_member,
)
from adapterhub.hub.commits import Tree, read_tree
from adapterhub.hub.database import (
    SCHEMA_REVISION,
    HubPlace,
    blobs,
    commits,
    grants,
    namespaces,
    now_text,
    promises,
    refs,
    repositories,
    versions,
)
from adapterhub.hub.gate import NamespaceRules, parse_rules, rules_text
from adapterhub.hub.gc import collect
from adapterhub.hub.import_export import answering_in_thread
from adapterhub.hub.server import HubApp, known_hosts
from adapterhub.hub.state import Hub, HubOptions, create_hub, open_hub
from adapterhub.registry.version_files import beside_bytes
from tests.kit import registries, web_servers
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
    cut_after: int | None = None  # drop the connection of the next download after this many bytes

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


@contextmanager
def serving(
    place: HubPlace, prefix: str = "", blobs: str | None = None, **options: object
) -> Iterator[RunningHub]:
    """Run a hub on this machine, at a path if there is a prefix."""
    create_hub(place, blobs)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    address = f"http://127.0.0.1:{port}{prefix}"
    if prefix:
        options["public_url"] = address
    chosen = HubOptions(**{"hosts": known_hosts("127.0.0.1", port), **options})
    with open_hub(place, chosen) as hub:
        running = RunningHub(hub, address)
        with answering_in_thread(cutting(HubApp(hub), running), listening):
            yield running
            for client in running.clients.values():
                client.close()


def cutting(app: object, running: RunningHub) -> object:
    """Wrap an application: it drops connections where the test says so."""

    async def answer(scope, receive, send):
        async def send_some(message):
            body = message.get("body", b"")
            if running.cut_after is not None and len(body) > running.cut_after:
                body, running.cut_after = body[: running.cut_after], None
                await send({**message, "body": body, "more_body": True})
                raise ConnectionAbortedError
            await send(message)

        is_download = "/resolve/" in scope.get("path", "")
        await app(scope, receive, send_some if is_download else send)

    return answer


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
    for number in range(12):
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


# Random writes to a hub by users of each role, and what holds for all that can be downloaded.
#
# What holds is computed here anew, from the rows and the files, and not by the hub's own checks.


ROLES = ("root", "ada", "wil", "eve")
_PLACES = ("acme", "ada", "wil", "eve")
_PEFT = {
    "adapter_config.json": b'{"peft_type": "LORA", "base_model_name_or_path": "acme/bert"}',
    "adapter_model.safetensors": save({"a": np.zeros(8, "float32")}),
}


def set_rules(hub: RunningHub, name: str, quota: int | None = None, **rules: Any) -> None:
    """Set the rules of a namespace."""
    owner = hub.change(find_owner, name)
    hub.change(change_owner, owner.id, rules_text(NamespaceRules(**rules)), quota)


class Writers:
    """Users who write at random; `write` does one thing and returns what, and its status.

    Args:
        hub: the hub, with the users of the tests' hubs.
        chance: what decides.
        folder: for adapters.
        stack: closes their connections.
    """

    def __init__(
        self, hub: RunningHub, chance: random.Random, folder: Path, stack: ExitStack
    ) -> None:
        self.hub, self.chance, self.folder = hub, chance, folder
        self.key = registries.new_key()
        set_rules(hub, "acme", 30_000, signers=(self.key.public.id,), protected=("prod*",))
        set_rules(hub, "ada", allowed=("pickle", "contents"))
        set_rules(hub, "wil", 4_000)
        self.clients = {user: stack.enter_context(hub.client(user)) for user in ROLES}
        self.made, self.asked = 0, []  # adapters that were written; uploads that were requested
        self.kept: list[tuple[str, str, int]] = []  # that were sent: repository, sha256, size
        for place in _PLACES:
            for name in ("x", "y"):
                create(self.clients["root"], f"{place}/{name}")

    def write(self) -> tuple[str, int]:
        """Do one thing as one user."""
        names = [
            self._adapter, self._adapter, self._adapter, self._files, self._files, self._removal,
            self._batch, self._upload, self._large, *[self._simple] * 8, self._create, self._back,
        ]  # fmt: skip
        chosen = self.chance.choice(names)
        client = self.clients[self.chance.choice(("root", "ada", "ada", "wil", "eve"))]
        answer = chosen(client, self._name())
        if answer is None:
            return chosen.__name__, 0
        request = answer.request
        return f"{request.method} {request.url.path.split('/')[-2]}", answer.status_code

    def _name(self) -> str:
        return f"{self.chance.choice(_PLACES)}/{self.chance.choice('xy')}"

    def _commit(self, client: httpx2.Client, name: str, *args: Any, **options: Any) -> Any:
        branch = self.chance.choice(("main", "main", "dev"))
        return commit(client, name, *args, revision=branch, **options)

    def _adapter(self, client: httpx2.Client, name: str) -> Any:
        """Commit an adapter, whole or not, signed or not."""
        self.made += 1
        made = registries.write_sample(self.folder / f"random-{self.made}", self.made)
        files = {path.name: path.read_bytes() for path in made.iterdir()}
        own = self.chance.choice((name, name, "eve/other"))
        version = self.chance.choice((None, None, "v1", "v2"))
        if self.chance.random() < 0.8:
            statement = Statement(Saved.at(made).digest, own, version)
            files["adapter.sig"] = signature_file([sign_statement(statement, self.key)])
        if self.chance.random() < 0.3:
            files |= _PEFT
            data = beside_bytes(Saved.at(made).digest, _PEFT)
            statement = Statement(digest(data), own, version)
            files["beside.json"] = data
            files["beside.sig"] = signature_file([sign_statement(statement, self.key)])
        if self.chance.random() < 0.2:
            del files[self.chance.choice([*files])]
        return self._commit(client, name, files)

    def _files(self, client: httpx2.Client, name: str) -> Any:
        """Commit files that some namespaces take, and others not."""
        self.made += 1
        number = np.full(4, self.made, "float32")
        files = self.chance.choice(
            [
                {"a.md": b"%d" % self.made * 400},
                {"a.bin": b"%d" % self.made},
                {"b.md": pickle.dumps(self.made)},
                {"adapter.safetensors": save({"encoder.0.attn.q.lora.a": number})},
                {"in/model.safetensors": save({"a": number})},
                {f"in/{path}": data for path, data in _PEFT.items()},
                _PEFT,
            ]
        )
        return self._commit(client, name, files)

    def _removal(self, client: httpx2.Client, name: str) -> Any:
        wrong = ("adapter.json", "adapter.sig", "adapter.safetensors", "a.bin", "beside.json")
        return self._commit(client, name, deleted=[self.chance.choice(wrong)])

    def _batch(self, client: httpx2.Client, name: str) -> Any:
        self.made += 1
        data = b"%d," % self.made * self.chance.choice((100, 500, 2000))
        answer = batch(client, name, data)
        if answer.status_code == 200:
            (found,) = answer.json()["objects"]
            self.asked.append((name, found["actions"]["upload"]["href"], data))
        return answer

    def _upload(self, client: httpx2.Client, name: str) -> Any:
        if not self.asked:
            return None
        name, href, data = self.asked.pop(self.chance.randrange(len(self.asked)))
        answer = client.put(href, content=data)
        if answer.status_code == 200:
            self.kept.append((name, digest(data), len(data)))
        return answer

    def _large(self, client: httpx2.Client, name: str) -> Any:
        """Commit what was sent before, under a name that is taken or not."""
        if not self.kept:
            return None
        name, sha256, size = self.chance.choice(self.kept)
        path = self.chance.choice(("c.md", "c.md", "in/c.bin", "adapter_config.json"))
        return self._commit(client, name, large={path: (sha256, size)})

    def _revision(self, client: httpx2.Client, name: str) -> str:
        listed = client.get(f"/api/models/{name}/commits/main")
        known = [each["id"] for each in listed.json()] if listed.status_code == 200 else []
        return self.chance.choice([*known, "main", "main", "dev"])

    def _simple(self, client: httpx2.Client, name: str) -> Any:
        """Set or remove a tag, a branch or a version, or move a repository."""
        choose, models = self.chance.choice, f"/api/models/{name}"
        revision, own = self._revision(client, name), f"/api/adapterhub/models/{name}"
        tag = choose(("v1", "v2", "v3", "v4", "v900", "best", "prod-1"))
        method, url, body = choose([
            *[("POST", f"{models}/tag/{revision}", {"tag": tag})] * 2,
            ("PUT", f"{own}/tag/{tag}", {"revision": revision}),
            ("DELETE", f"{models}/tag/{choose(('v1', 'best'))}", None),
            ("POST", f"{models}/branch/dev", {"startingPoint": revision}),
            ("DELETE", f"{models}/branch/dev", None),
            ("POST", "/api/repos/move", {"fromRepo": name, "toRepo": self._name()}),
            ("DELETE", f"{own}/versions/{choose(('v1', 'v2'))}", None),
        ])  # fmt: skip
        return client.request(method, url, json=body)

    def _create(self, client: httpx2.Client, name: str) -> Any:
        owner, _, own = name.partition("/")
        body = {"organization": owner, "name": own}
        answer = client.post("/api/repos/create", json=body)
        if answer.status_code == 409 and self.chance.random() < 0.3:
            return delete(client, name)
        return answer

    def _back(self, client: httpx2.Client, name: str) -> Any:
        """Commit the files of an earlier commit again, which needs no upload."""
        revision = self._revision(client, name)
        listed = client.get(f"/api/models/{name}/revision/{revision}?blobs=true")
        if listed.status_code != 200:
            return listed
        large = {}
        for each in listed.json()["siblings"]:
            data = client.get(f"/{name}/resolve/{revision}/{each['rfilename']}").content
            large[each["rfilename"]] = (digest(data), len(data))
        return self._commit(client, name, large=large)


def broken_promises(hub: RunningHub) -> list[str]:
    """List what of all that can be downloaded the rules of its namespace do not allow."""
    with hub.hub.database.reading() as connection:
        rows = connection.execute(
            select(repositories.c.id, repositories.c.name, commits.c.oid, commits.c.tree)
            .add_columns(namespaces.c.rules)
            .join(commits, commits.c.repository == repositories.c.id)
            .join(namespaces, namespaces.c.id == repositories.c.namespace)
            .where(commits.c.is_removed.is_(False))
        ).all()
        served = {(row.id, row.oid): read_tree(connection, row.tree) for row in rows}
        found = []
        for row in rows:
            rules, tree = parse_rules(row.rules), served[row.id, row.oid]
            problems = [
                *_of_contents(hub, tree, rules),
                *_of_signatures(hub, tree, row.name, rules),
            ]
            found += [f"{row.name}@{row.oid[:8]}: {problem}" for problem in problems]
        for repository, number, commit in connection.execute(
            select(versions.c.repository, versions.c.number, versions.c.commit)
        ):
            tree = served.get((repository, commit), {})
            found += [f"v{number}: {problem}" for problem in _of_version(hub, tree)]
        for ref in connection.execute(select(refs)):
            if (ref.repository, ref.commit) not in served:
                found.append(f"{ref.kind} {ref.name} names what is gone")
        found += _of_quotas(connection)
    return found


def _of_contents(hub: RunningHub, tree: Tree, rules: NamespaceRules) -> Iterator[str]:
    for path, blob in tree.items():
        data = hub.hub.blobs.read(blob.sha256, 2)
        if "pickle" not in rules.allowed and (path.endswith(".bin") or data[:1] == b"\x80"):
            yield f"{path} is a pickle"


def _of_signatures(hub: RunningHub, tree: Tree, name: str, rules: NamespaceRules) -> Iterator[str]:
    if not rules.signers:
        return
    for path, blob in tree.items():
        folder, slash, own = path.rpartition("/")
        if not own.endswith((".safetensors", "adapter_config.json", "adapter.json", ".bin")):
            continue
        signed: dict[str, str] = {}
        for file in ("adapter", "beside"):
            listed, signature = (
                tree.get(f"{folder}{slash}{file}.{kind}") for kind in ("json", "sig")
            )
            if listed and signature:
                for each in parse_signatures(hub.hub.blobs.read(signature.sha256, 5000)):
                    is_own = each.statement.name in (name, name.partition("/")[2])
                    is_own = is_own and each.statement.digest == listed.sha256
                    if is_own and each.is_valid and each.signer.id in rules.signers:
                        data = json.loads(hub.hub.blobs.read(listed.sha256, 1 << 20))
                        signed |= {f"{file}.json": listed.sha256, **data["files"]}
        if signed.get(own) != blob.sha256:
            yield f"{path} is not signed"


def _of_version(hub: RunningHub, tree: Tree) -> Iterator[str]:
    if manifest := tree.get("adapter.json"):
        wanted = json.loads(hub.hub.blobs.read(manifest.sha256, 1 << 20))["files"]
        tensors = tree.get("adapter.safetensors")
        if tensors is None or {"adapter.safetensors": tensors.sha256} != wanted:
            yield "it is not whole"


def _of_quotas(connection: Any) -> Iterator[str]:
    for owner in connection.execute(select(namespaces).where(namespaces.c.quota.is_not(None))):
        here = select(repositories.c.id).where(repositories.c.namespace == owner.id)
        sizes = dict(
            connection.execute(
                select(promises.c.sha256, promises.c.size).where(
                    promises.c.repository.in_(here), promises.c.expires > now_text()
                )
            ).all()
        )
        sizes |= dict(
            connection.execute(
                select(blobs.c.sha256, blobs.c.size)
                .join(grants, grants.c.sha256 == blobs.c.sha256)
                .where(grants.c.repository.in_(here))
            ).all()
        )
        if sum(sizes.values()) > owner.quota:
            yield f"{owner.name} has {sum(sizes.values())} of {owner.quota} bytes"
