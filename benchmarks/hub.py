"""The figures of `adapterhub hub`, beside nginx in the same run.

    python benchmarks/hub.py                        # all parts, on an idle machine
    python benchmarks/hub.py pulls commits          # some of them
    python benchmarks/hub.py lists --adapters 10000

The parts: `start` (seconds, idle memory), `pulls` (of 1 MB, per second, against nginx with
one worker), `commits` (small durable ones, per second), `memory` (of an upload of 256 MiB, and over
10,000 requests), `lists` (searches and pages over many adapters) and `kills` (under load).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import http.client
import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
import commit_body
import sample_adapters
import web_servers
from sqlalchemy import Connection

from adapterhub.files.manifest import Manifest, from_json, to_json
from adapterhub.hub.accounts import (
    Owner,
    create_hub_token,
    create_namespace,
    require_owner,
)
from adapterhub.hub.blobs import BlobInfo
from adapterhub.hub.commits import CommitChange, grant, write_commit
from adapterhub.hub.housekeeping import verify_hub
from adapterhub.hub.listings import refresh_listing
from adapterhub.hub.repositories import create_repository
from adapterhub.hub.state import Hub, create_hub, open_hub
from adapterhub.hub.versions import create_tag

START = "import sys; from adapterhub.cli import main; sys.argv[0] = 'adapterhub'; main()"
WORDS = [
    "red", "green", "blue", "sad", "happy", "long", "short", "polite", "rude", "legal", "medical",
    "news",
]  # fmt: skip


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, float]]:
    """Start a hub in a process; yield it, its address, and the seconds that it took."""
    command = [sys.executable, "-c", START, "hub", "start", str(folder), "--port", "0"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
        try:
            yield process, re.search(r"http://\S+", line)[0], seconds  # type: ignore[index]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def new_hub(folder: Path) -> str:
    """Create a hub with a user; return the token."""
    create_hub(folder)
    with open_hub(folder) as hub, hub.database.writing() as connection:
        create_namespace(connection, "ada", "user", is_admin=True)
        return create_hub_token(connection, "ada", "ada-1", "admin")


class Client:
    """A connection that is kept, with a token."""

    def __init__(self, address: str, token: str = "") -> None:
        parts = urlsplit(address)
        self.connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
        self.headers = {"authorization": f"Bearer {token}"} if token else {}

    def ask(self, method: str, path: str, body: object = None) -> bytes:
        """Send a request and return the body of the answer."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        self.connection.request(method, path, data, self.headers)  # type: ignore[arg-type]
        answer = self.connection.getresponse()
        found = answer.read()
        assert answer.status == 200, (path, answer.status, found[:300])
        return found


def resident(process: subprocess.Popen[str], field: str = "VmRSS") -> float:
    """Return the megabytes of memory of a process; VmHWM is its peak."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", text)[1]) / 1e3  # type: ignore[index]


def asked(address: str, token: str, path: str, seconds: float, answers: object) -> None:
    """Ask for a path for some seconds; put the times of the answers into a queue."""
    client, times = Client(address, token), []
    client.ask("GET", path)
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        began = time.perf_counter()
        client.ask("GET", path)
        times.append(time.perf_counter() - began)
    answers.put(times)  # type: ignore[attr-defined]


def load(address: str, token: str, path: str, seconds: float, clients: int) -> list[float]:
    """Ask for a path from several processes; return the times of all answers."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    jobs = [
        context.Process(target=asked, args=(address, token, path, seconds, answers))
        for _ in range(clients)
    ]
    for job in jobs:
        job.start()
    times = [each for _ in jobs for each in answers.get()]
    for job in jobs:
        job.join()
    return times


def at(times: list[float], share: float) -> float:
    """Return a quantile of times, in milliseconds."""
    return 1e3 * sorted(times)[min(len(times) - 1, int(share * len(times)))]


def start_part(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure the start and the memory of an idle hub."""
    new_hub(folder)
    with serving(folder) as (process, _, seconds):
        time.sleep(1)
        return {"start, s": seconds, "idle, MB": resident(process)}


def pulls_part(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure pulls of a file of 1 MB, against nginx with one worker, in turns."""
    token = new_hub(folder)
    data = os.urandom(1 << 20)
    text = json.dumps({"x": base64.b64encode(data).decode()}).encode()[: 1 << 20]
    text = text[:-2] + b'"}'
    public = folder.parent / "public"
    public.mkdir()
    (public / "a.json").write_bytes(text)
    found: dict[str, list[float]] = {"hub": [], "nginx": []}
    with serving(folder) as (_, address, _), web_servers.nginx(public) as other:
        client = Client(address, token)
        client.ask("POST", "/api/repos/create", {"name": "x"})
        client.ask("POST", "/api/models/ada/x/commit/main", commit_body.lines({"a.json": text}))
        for _ in range(options.turns):
            found["hub"] += load(
                address, token, "/ada/x/resolve/main/a.json", options.seconds, options.clients
            )
            found["nginx"] += load(str(other), "", "/a.json", options.seconds, options.clients)
    rate = {name: len(times) / (options.turns * options.seconds) for name, times in found.items()}
    return {
        "hub, pulls/s": rate["hub"],
        "nginx, pulls/s": rate["nginx"],
        "ratio": rate["hub"] / rate["nginx"],
        "hub p99, ms": at(found["hub"], 0.99),
        "nginx p99, ms": at(found["nginx"], 0.99),
    }


def commits_part(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure small commits, each on the disk when it is answered."""
    token = new_hub(folder)
    with serving(folder) as (_, address, _):

        def push(number: int) -> None:
            client = Client(address, token)
            name = f"r{number}"
            client.ask("POST", "/api/repos/create", {"name": name})
            for each in range(options.commits // options.clients):
                body = commit_body.lines({"README.md": f"# {number} {each}\n".encode()})
                client.ask("POST", f"/api/models/ada/{name}/commit/main", body)

        threads = [threading.Thread(target=push, args=(n,)) for n in range(options.clients)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"commits/s": options.commits / (time.perf_counter() - began)}


def memory_part(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure the peak of an upload of 256 MiB, and what 10,000 requests add."""
    token = new_hub(folder)
    with serving(folder) as (process, address, _):
        client = Client(address, token)
        client.ask("POST", "/api/repos/create", {"name": "x"})
        header = b'{"key":"header","value":{"summary":"x"}}\n{"key":"file","value":{"content":"'
        size, info = 255 << 20, b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}'
        text = info % (size, size)
        data = len(text).to_bytes(8, "little") + text + bytes(size)
        body = header + base64.b64encode(data) + b'","path":"a.safetensors","encoding":"base64"}}\n'
        del data
        began = time.perf_counter()
        client.ask("POST", "/api/models/ada/x/commit/main", body)
        seconds = time.perf_counter() - began
        peak = resident(process, "VmHWM")
        for _ in range(2_000):
            client.ask("GET", "/api/models/ada/x")
        before = resident(process)
        for _ in range(10_000):
            client.ask("GET", "/api/models/ada/x")
        return {
            "upload of 256 MiB, s": seconds,
            "its peak, MB": peak,
            "10,000 requests, MB": resident(process) - before,
        }


def lists_part(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure lists, searches and pages over many adapters."""
    token = new_hub(folder)
    began = time.perf_counter()
    fill(folder, options.adapters)
    found = {"filling, s": time.perf_counter() - began}
    paths = {
        "newest": "/api/models?limit=100&full=true&cardData=true&sort=lastModified",
        "by tag, many": "/api/models?filter=adapterhub&limit=100",
        "by tag, few": "/api/models?filter=lora&filter=base_model:adapter:acme/bert-7&limit=100",
        "words, many": "/api/models?search=re&limit=100",
        "words, few": f"/api/models?search={quote('adapter 777')}&limit=100",
        "page": "/",
        "page, by score": "/?sort=score&q=re",
        "page, facets": "/?task=classification&method=lora&sort=size",
        "adapter": "/ada/a777",
    }
    with serving(folder) as (_, address, _):
        client = Client(address, token)
        session = Client(address)
        login = Client(address)
        login.connection.request("POST", "/settings/login", f"token={token}")
        answer = login.connection.getresponse()
        session.headers = {"cookie": str(answer.headers["set-cookie"]).partition(";")[0]}
        answer.read()
        for name, path in paths.items():
            own, times = (
                session if path.startswith("/?") or path in ("/", "/ada/a777") else client,
                [],
            )
            own.ask("GET", path)
            for _ in range(60):
                start = time.perf_counter()
                own.ask("GET", path)
                times.append(time.perf_counter() - start)
            found[f"{name}, p95 ms"] = at(times, 0.95)
    return found


def fill(folder: Path, number: int) -> None:
    """Write adapters into a hub, without their bytes: what lists read is there.

    The first thousands are written as pushes are; the others are copies of their rows.
    """
    made = sample_adapters.write(folder.parent / "made", 0, accuracy=0.5)
    manifest = from_json((made / "adapter.json").read_bytes())
    shutil.rmtree(made)
    with open_hub(folder) as hub:
        pushed = min(number, _PUSHED)
        with hub.database.writing() as connection:
            owner = require_owner(connection, "ada")
            for n in range(pushed):
                add_one(hub, connection, owner, n, manifest)
        for copy in range(1, number // pushed):
            with hub.database.writing() as connection:
                for statement in _COPIES:
                    connection.exec_driver_sql(statement, {"copy": f"-{copy}"})


_PUSHED = 2_000
_COPIES = (
    """INSERT INTO repositories
    (type, namespace, name, folded, is_private, created, modified, highest)
    SELECT type, namespace, name || :copy, folded || :copy, is_private, created, modified, highest
    FROM repositories WHERE id <= 2000""",
    """INSERT INTO listings SELECT c.id, l.type, c.name, l.namespace, l.is_private, l.modified,
    l.size, l.score, l.head, l.about, replace(l.entry, l.name, c.name), l.tokens FROM listings l
    JOIN repositories c ON c.folded = l.name || :copy WHERE l.repository <= 2000""",
    """INSERT INTO listing_texts (rowid, tokens) SELECT l.repository, l.tokens FROM listings l
    JOIN repositories r ON r.id = l.repository WHERE r.name LIKE '%' || :copy""",
)


def add_one(hub: Hub, connection: Connection, owner: Owner, n: int, base: Manifest) -> None:
    """Write one adapter; its manifest differs from the others in what lists show."""
    manifest = replace(
        base,
        backbone=replace(base.backbone, id=f"acme/bert-{n % 20}"),
        metrics={"accuracy": (n % 997) / 997},
        description=f"adapter {n} {WORDS[n % 12]} {WORDS[n // 12 % 12]}",
    )
    data = to_json(manifest)
    info = BlobInfo(hashlib.sha256(data).hexdigest(), len(data), "0" * 40)
    repository = create_repository(connection, "models", f"ada/a{n}", owner, is_private=False)
    grant(connection, repository.id, [info])
    change = CommitChange("x", large={"adapter.json": (info.sha256, info.size)})
    done = write_commit(connection, hub.blobs, repository.id, "main", change, "ada")
    create_tag(connection, repository, "v1", done.commit.oid)
    refresh_listing(connection, repository, lambda sha256, most: data)
    if n == 777:  # its page is read
        hub.blobs.path(info.sha256).write_bytes(data)


def kills_part(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Kill the hub under load; count acknowledged commits that are lost, and half ones."""
    token, kept = new_hub(folder), {}
    for turn in range(options.kills):
        with serving(folder) as (process, address, _):

            def push(number: int, turn: int = turn, address: str = address) -> None:
                try:
                    client = Client(address, token)
                    for each in range(100_000):
                        name = f"r{turn}-{number}-{each}"
                        client.ask("POST", "/api/repos/create", {"name": name})
                        files = {"a.md": name.encode(), "b.md": name.encode() * 2}
                        path = f"/api/models/ada/{name}/commit/main"
                        kept[name] = json.loads(client.ask("POST", path, commit_body.lines(files)))[
                            "commitOid"
                        ]
                except (OSError, http.client.HTTPException):
                    pass

            threads = [threading.Thread(target=push, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(0.3 + turn % 7 / 10)
            process.kill()
            for thread in threads:
                thread.join()
    lost = 0
    with serving(folder) as (_, address, _):
        client = Client(address, token)
        for name, oid in kept.items():
            found = client.ask("GET", f"/ada/{name}/resolve/{oid}/b.md")
            lost += found != name.encode() * 2
    with open_hub(folder) as hub:
        problems = verify_hub(hub)
    return {"kills": options.kills, "acknowledged": len(kept), "lost": lost, "half": len(problems)}


PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, float]]] = {
    "start": start_part,
    "pulls": pulls_part,
    "commits": commits_part,
    "memory": memory_part,
    "lists": lists_part,
    "kills": kills_part,
}


def main() -> None:
    """Measure the parts that are named, and print a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[*PARTS])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn of pulls")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--commits", type=int, default=400)
    parser.add_argument("--adapters", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=50)
    options = parser.parse_args()
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            for name, value in PARTS[part](Path(folder) / "hub", options).items():
                print(f"{part:8} {name:24} {value:10.2f}", flush=True)
    print(f"cores {os.cpu_count()}, load {statistics.mean(os.getloadavg()):.1f}")


if __name__ == "__main__":
    main()
