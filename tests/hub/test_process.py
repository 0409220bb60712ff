"""The process: what it imports, what it serves under pressure, and that it can be killed."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import pytest

from adapterhub.errors import ConfigError
from adapterhub.hub.gc import verify_hub
from adapterhub.hub.server import serve_hub
from adapterhub.hub.state import HubOptions, open_hub, serving_alone
from adapterhub.web import frame
from adapterhub.web.connections import raise_file_limit
from tests.kit import real_hub
from tests.kit.real_hub import STATES, answered, commit, create, place_of
from tests.kit.selection import ALL, cases_of
from tests.kit.session import wait_until


@pytest.fixture(params=STATES)
def made(request, tmp_path):
    return real_hub.made(*place_of(request, tmp_path / "hub"))


def test_a_hub_needs_neither_torch_nor_transformers(made):
    with made.started() as (process, address):
        with made.client(address) as client:
            create(client, "ada/x")
            commit(client, "ada/x", {"a.md": b"a", "README.md": b"# card\n"})
            for path in ("/", "/ada/x", "/api/models", "/ada/x/resolve/main/a.md"):
                assert client.get(path).status_code == 200
        with open(f"/proc/{process.pid}/maps") as maps:
            loaded = maps.read()
        assert not re.search(r"libtorch|/torch/|/transformers/|/tokenizers/|pyarrow", loaded)
        with open(f"/proc/{process.pid}/status") as status:
            kilobytes = int(re.search(r"VmRSS:\s+(\d+)", status.read())[1])
        # The clients of PostgreSQL and of buckets take about 20 MB.
        assert kilobytes < (120_000 if isinstance(made.place, Path) else 140_000)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    with open_hub(made.place) as opened:
        assert verify_hub(opened) == []


def test_no_module_of_a_hub_imports_torch(tmp_path):
    program = (
        "import sys, pkgutil, importlib, adapterhub.hub as hub\n"
        "for each in pkgutil.iter_modules(hub.__path__): importlib.import_module("
        "f'adapterhub.hub.{each.name}')\n"
        "print(sorted({'torch','transformers','datasets','tokenizers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_an_acknowledged_commit_survives_being_killed(made):
    kept, rounds = {}, 4 if ALL else 2
    for number in range(rounds):
        with made.started() as (process, address):
            with made.client(address) as client:
                for name, oid in kept.items():
                    assert client.get(f"/ada/{name}/resolve/{oid}/a.md").text == f"{name}\n"
                    tree = client.get(f"/api/models/ada/{name}/tree/main").json()
                    assert {each["path"] for each in tree} - {"b.md"} == {".gitattributes", "a.md"}
            threads = [
                threading.Thread(target=made.keep_pushing, args=(address, f"{number}-{n}", kept))
                for n in range(3)
            ]
            before = len(kept)
            for thread in threads:
                thread.start()
            wait_until(lambda before=before: len(kept) >= before + 12)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            for thread in threads:
                thread.join()
    with open_hub(made.place) as opened:
        assert verify_hub(opened) == []


def test_what_is_not_served(tmp_path):
    """A folder twice, an address that is taken, a hub without a token, and other files."""

    def refused(place, words, host="127.0.0.1", port=0, **options):
        with pytest.raises(ConfigError, match=words):
            serve_hub(place, host, port, HubOptions(**options))

    hub, files = real_hub.made(tmp_path / "hub").place, tmp_path / "files"
    with serving_alone(hub):
        refused(hub, "another server")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused(hub, f"cannot listen at 127.0.0.1, port {port}", port=port)
    refused(tmp_path / "new", "no token", "0.0.0.0")
    refused(tmp_path / "new", "not the address", public_url="hub.example")
    files.mkdir()
    (files / "a").touch()
    refused(files, "other files")


KILLED = {
    "collection": {"7 files left", "2 files left"},
    "first backup": {"none", "new"},
    "second backup": {"old", "new"},
    "upgrade": {"old", "new"},
    "mirror": {"nothing", "files: 3"} if ALL else {"files: 3"},
}
"""By what is killed, what it must have met: the start, and the end."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="crash_hub.py forks at each line")
def test_what_is_killed_is_done_again_and_loses_nothing(tmp_path):
    """crash_hub.py makes the checks; this test verifies that it met every state."""
    program = Path(__file__).parents[1] / "attacks/crash_hub.py"
    most = 6 if ALL else 2
    paths = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "0"}
    names = cases_of(KILLED, 3)
    command = [sys.executable, program, tmp_path, str(most), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    results = {line["scenario"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert all(each["points"] >= min(most, each["lines"]) for each in results.values())
    for name in names:
        assert {*results[name]["outcomes"]} >= KILLED[name]


# Under pressure: strangers who send nothing, slow bodies, long searches.


HEADS = (
    "POST /settings/login HTTP/1.1\r\nhost: {host}\r\ncontent-length: 900\r\n\r\n",
    "POST /api/validate-yaml HTTP/1.1\r\nhost: {host}\r\ncontent-length: 900\r\n\r\n{{",
    "GET / HTTP/1.1\r\n",
    "",
)
"""What strangers send who then send nothing more."""
STRANGERS = 1_100


def test_clients_are_served_while_strangers_hold_connections(tmp_path):
    """The process may open 1,024 files: fewer than there are strangers."""
    hub, seconds, failures = real_hub.made(tmp_path / "hub"), [], []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < STRANGERS + 200:
        pytest.skip("this process may not open so many connections")
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        _, address = stack.enter_context(hub.started(files=1024))
        with hub.client(address) as client:
            create(client, "ada/x")
        host = urlsplit(address).netloc
        name, port = host.split(":")
        for number in range(STRANGERS):
            stranger = socket.create_connection((name, int(port)), timeout=20)
            stack.enter_context(stranger)
            stranger.sendall(HEADS[number % len(HEADS)].format(host=host).encode())

        def work(number):
            with hub.client(address) as client:
                for turn in range(12):
                    began = time.monotonic()
                    answers = [
                        commit(client, "ada/x", {f"{number}-{turn}.md": b"text"})
                        if turn % 4 == 0
                        else client.get("/api/models/ada/x"),
                        client.get("/"),
                    ]
                    seconds.append(time.monotonic() - began)
                    failures.extend(each for each in answers if each.status_code != 200)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    assert (len(seconds), failures) == (8 * 12, [])
    # On a busy machine one answer may be late; strangers who kept all waiting would delay each.
    assert median(seconds) < 1.0


@pytest.mark.parametrize("head", HEADS[:2])
def test_a_body_that_does_not_come_is_refused(hub, head, monkeypatch):
    monkeypatch.setattr(frame, "PIECE_SECONDS", 0.2)
    host = urlsplit(hub.address).netloc
    name, port = host.split(":")
    with socket.create_connection((name, int(port)), timeout=10) as stranger:
        stranger.sendall(head.format(host=host).encode())
        answer = b""
        while piece := stranger.recv(4096):  # the connection ends, too
            answer += piece
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not come in time" in answer


def test_a_search_has_a_limit_of_words(client):
    words = [f"w{n}" for n in range(5000)]
    for path in ("/?q=", "/api/models?search="):
        began = time.monotonic()
        assert client.get(path + "+".join(words[:30])).status_code == 200
        answered(client.get(path + "+".join(words)), 400, "at most 32 words")
        assert time.monotonic() - began < 1.0
