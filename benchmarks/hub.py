"""The figures of `adapterhub hub`, beside nginx in the same run.

    python benchmarks/hub.py                        # all parts, on an idle machine
    python benchmarks/hub.py pulls commits          # some of them
    python benchmarks/hub.py lists --adapters 10000
    python benchmarks/hub.py --shared processes commits lists kills

The parts: `start` (seconds, idle memory), `pulls` (of 1 MB, per second, against nginx with
one worker), `commits` (small durable ones, per second), `memory` (of an upload of 256 MiB, and over
10,000 requests), `lists` (searches and pages over many adapters) and `kills` (under load).

With --shared, the hub is in PostgreSQL and a bucket of moto, both on this machine, and `processes`
measures two processes beside one: the redirects of pulls, commits, and versions that race. All of
them, and the clients, share the cores of the machine, so the processor seconds of the hub's
processes are given, too.
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
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))
import httpx2
from sqlalchemy import Connection, text

from adapterhub.files.manifest import Manifest, from_json, to_json
from adapterhub.hub.accounts import (
    Owner,
    create_hub_token,
    create_namespace,
    require_owner,
)
from adapterhub.hub.blobs import BlobInfo
from adapterhub.hub.commits import CommitChange, grant, write_commit
from adapterhub.hub.database import HubPlace, changes_of
from adapterhub.hub.gc import verify_hub
from adapterhub.hub.repositories import create_repository, create_tag
from adapterhub.hub.search_rows import refresh_listing
from adapterhub.hub.state import create_hub, open_hub
from tests.kit import real_hub, registries, web_servers
from tests.kit.real_hub import shared_state

START = "import sys; from adapterhub.cli import main; sys.argv[0] = 'adapterhub'; main()"
WORDS = [
    "red", "green", "blue", "sad", "happy", "long", "short", "polite", "rude", "legal", "medical",
    "news",
]  # fmt: skip


@contextmanager
def serving(folder: HubPlace) -> Iterator[tuple[subprocess.Popen[str], str, float]]:
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


def new_hub(folder: HubPlace, options: argparse.Namespace) -> str:
    """Create a hub with a user; return the token."""
    create_hub(folder, options.bucket)
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
        assert answer.status in (200, 302), (path, answer.status, found[:300])
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


def start_part(folder: HubPlace, options: argparse.Namespace) -> dict[str, float]:
    """Measure the start and the memory of an idle hub."""
    new_hub(folder, options)
    with serving(folder) as (process, _, seconds):
        time.sleep(1)
        return {"start, s": seconds, "idle, MB": resident(process)}


def pulls_part(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure pulls of a file of 1 MB, against nginx with one worker, in turns."""
    token = new_hub(folder, options)
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
        client.ask("POST", "/api/models/ada/x/commit/main", real_hub.commit_lines({"a.json": text}))
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


def commits_part(folder: HubPlace, options: argparse.Namespace) -> dict[str, float]:
    """Measure small commits, each on the disk when it is answered."""
    token = new_hub(folder, options)
    with serving(folder) as (_, address, _):
        return {"commits/s": _commits([address], token, options)[0]}


def memory_part(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure the peak of an upload of 256 MiB, and what 10,000 requests add."""
    token = new_hub(folder, options)
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


def lists_part(folder: HubPlace, options: argparse.Namespace) -> dict[str, float]:
    """Measure lists, searches and pages over many adapters."""
    token = new_hub(folder, options)
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


def fill(place: HubPlace, number: int) -> None:
    """Write adapters into a hub, without their bytes: what lists read is there.

    The first thousands are written as pushes are; the others are copies of their rows.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = registries.write_sample(Path(folder) / "made", 0, accuracy=0.5)
        manifest = from_json((made / "adapter.json").read_bytes())
    with open_hub(place) as hub:
        pushed = min(number, _PUSHED)
        with hub.database.writing() as connection:
            owner = require_owner(connection, "ada")
            for n in range(pushed):
                add_one(connection, owner, n, manifest)
            # Without bytes, which the gate would look for.
            changes_of(connection).are_admitted = True
            hub.blobs.put(hub.blobs.stage(to_json(numbered(manifest, _READ))))
        for copy in range(1, number // pushed):
            with hub.database.writing() as connection:
                for statement in (*_COPIES, _TEXTS[connection.dialect.name]):
                    connection.execute(text(statement), {"copy": f"-{copy}"})


_PUSHED = 2_000
_READ = 777  # its page is read
_COPIES = (
    """INSERT INTO repositories
    (type, namespace, name, folded, is_private, created, modified, highest)
    SELECT type, namespace, name || :copy, folded || :copy, is_private, created, modified, highest
    FROM repositories WHERE id <= 2000""",
    """INSERT INTO listings SELECT c.id, l.type, c.name, l.namespace, l.is_private, l.modified,
    l.size, l.score, l.head, l.about, replace(l.entry, l.name, c.name), l.tokens FROM listings l
    JOIN repositories c ON c.folded = l.name || :copy WHERE l.repository <= 2000""",
)
_TEXTS = {
    "sqlite": """INSERT INTO listing_texts (rowid, tokens) SELECT l.repository, l.tokens
    FROM listings l JOIN repositories r ON r.id = l.repository WHERE r.name LIKE '%' || :copy""",
    "postgresql": """INSERT INTO listing_texts SELECT c.id, t.terms FROM listing_texts t
    JOIN repositories r ON r.id = t.repository JOIN repositories c ON c.folded = r.folded || :copy
    WHERE t.repository <= 2000""",
}


def numbered(base: Manifest, n: int) -> Manifest:
    """Return a manifest that differs from the others in what lists show."""
    return replace(
        base,
        backbone=replace(base.backbone, id=f"acme/bert-{n % 20}"),
        metrics={"accuracy": (n % 997) / 997},
        description=f"adapter {n} {WORDS[n % 12]} {WORDS[n // 12 % 12]}",
    )


def add_one(connection: Connection, owner: Owner, n: int, base: Manifest) -> None:
    """Write one adapter, without its bytes."""
    data = to_json(numbered(base, n))
    info = BlobInfo(hashlib.sha256(data).hexdigest(), len(data), "0" * 40)
    repository = create_repository(connection, "models", f"ada/a{n}", owner, is_private=False)
    grant(connection, repository.id, [info])
    change = CommitChange("x", large={"adapter.json": (info.sha256, info.size)})
    done = write_commit(connection, repository.id, "main", change, "ada")
    create_tag(connection, repository, "v1", done.commit.oid)
    refresh_listing(connection, repository, lambda sha256, most: data)


def kills_part(folder: HubPlace, options: argparse.Namespace) -> dict[str, float]:
    """Kill the hub under load; count acknowledged commits that are lost, and half ones."""
    token, kept = new_hub(folder, options), {}
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
                        kept[name] = json.loads(
                            client.ask("POST", path, real_hub.commit_lines(files))
                        )["commitOid"]
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
            path = f"/ada/{name}/resolve/{oid}/b.md"
            if options.bucket:
                url, headers = f"{address}{path}", client.headers
                found = httpx2.get(url, headers=headers, follow_redirects=True).content
            else:
                found = client.ask("GET", path)
            lost += found != name.encode() * 2
    with open_hub(folder) as hub:
        problems = verify_hub(hub)
    return {"kills": options.kills, "acknowledged": len(kept), "lost": lost, "half": len(problems)}


def processes_part(folder: HubPlace, options: argparse.Namespace) -> dict[str, float]:
    """Measure two processes of one hub beside one of them, in turns."""
    token, found = new_hub(folder, options), dict[str, float]()
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(folder)) for _ in range(2)]
        addresses = [address for _, address, _ in servers]
        client = Client(addresses[0], token)
        client.ask("POST", "/api/repos/create", {"name": "x"})
        files = {"README.md": b"# some text\n"}
        client.ask("POST", "/api/models/ada/x/commit/main", real_hub.commit_lines(files))
        for name, run in (("pulls", _redirects), ("commits", _commits)):
            for number in (1, 2):
                began = sum(_processor_seconds(process) for process, _, _ in servers)
                rate, answers = run(addresses[:number], token, options)
                used = sum(_processor_seconds(process) for process, _, _ in servers) - began
                found[f"{name}/s, {number}"] = rate
                found[f"{name}, ms of a core, {number}"] = 1e3 * used / answers
            found[f"{name}, two to one"] = found[f"{name}/s, 2"] / found[f"{name}/s, 1"]
        found |= _racing(addresses, token)
    return found


def _redirects(addresses: list[str], token: str, options: argparse.Namespace) -> tuple[float, int]:
    path, times = "/ada/x/resolve/main/README.md", []
    threads = [
        threading.Thread(
            target=lambda address=address: times.extend(
                load(address, token, path, options.seconds, options.clients // len(addresses))
            )
        )
        for address in addresses
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(times) / options.seconds, len(times)


def _commits(addresses: list[str], token: str, options: argparse.Namespace) -> tuple[float, int]:
    name = secrets.token_hex(4)

    def push(number: int) -> None:
        client = Client(addresses[number % len(addresses)], token)
        own = f"{name}-{number}"
        client.ask("POST", "/api/repos/create", {"name": own})
        for each in range(options.commits // options.clients):
            body = real_hub.commit_lines({"README.md": f"# {own} {each}\n".encode()})
            client.ask("POST", f"/api/models/ada/{own}/commit/main", body)

    began = time.perf_counter()
    with ThreadPoolExecutor(options.clients) as pool:
        [*pool.map(push, range(options.clients))]
    return options.commits / (time.perf_counter() - began), options.commits


def _racing(addresses: list[str], token: str) -> dict[str, float]:
    """Let four writers at two processes take a thousand version numbers of one name."""
    won: list[int] = []

    def tag(number: int) -> None:
        client = Client(addresses[number % len(addresses)], token)
        for version in range(1, 1001):
            body = json.dumps({"tag": f"v{version}"}).encode()
            path = "/api/models/ada/x/tag/main"
            client.connection.request("POST", path, body, client.headers)
            answer = client.connection.getresponse()
            answer.read()
            if answer.status == 200:
                won.append(version)

    with ThreadPoolExecutor(4) as pool:
        [*pool.map(tag, range(4))]
    return {"versions": len({*won}), "versions of two": len(won) - len({*won})}


def _processor_seconds(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


Part = Callable[[Any, argparse.Namespace], dict[str, float]]
PARTS: dict[str, Part] = {
    "start": start_part,
    "pulls": pulls_part,
    "commits": commits_part,
    "memory": memory_part,
    "lists": lists_part,
    "kills": kills_part,
    "processes": processes_part,
}
ALONE, LAST = ("pulls", "memory"), "processes"  # what only one kind of hub has


def main() -> None:
    """Measure the parts that are named, and print a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn of pulls")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--commits", type=int, default=400)
    parser.add_argument("--adapters", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--shared", action="store_true", help="PostgreSQL and a bucket")
    options = parser.parse_args()
    chosen = options.parts or [p for p in PARTS if p not in (ALONE if options.shared else [LAST])]
    with ExitStack() as stack:
        state = stack.enter_context(shared_state("fsync=on")) if options.shared else None
        for part in chosen:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            os.chmod(folder, 0o755)
            place, options.bucket = state() if state else (Path(folder) / "hub", None)
            for name, value in PARTS[part](place, options).items():
                print(f"{part:9} {name:28} {value:10.2f}", flush=True)
    print(f"cores {os.cpu_count()}, load {statistics.mean(os.getloadavg()):.1f}")


if __name__ == "__main__":
    main()
