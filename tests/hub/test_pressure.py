"""A hub under pressure: strangers who send nothing, slow bodies, many writers, long searches."""

from __future__ import annotations

import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from urllib.parse import urlsplit

import pytest

from adapterhub.web import frame
from adapterhub.web.connections import raise_file_limit
from tests.kit import real_hub
from tests.kit.real_hub import answered, commit, create

HEADS = (
    "POST /settings/login HTTP/1.1\r\nhost: {host}\r\ncontent-length: 900\r\n\r\n",
    "POST /api/validate-yaml HTTP/1.1\r\nhost: {host}\r\ncontent-length: 900\r\n\r\n{{",
    "GET / HTTP/1.1\r\n",
    "",
)
"""What strangers send who then send nothing more."""
STRANGERS = 1_100


@pytest.fixture
def many_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < STRANGERS + 200:
        pytest.skip("this process may not open so many connections")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_clients_are_served_while_strangers_hold_connections(tmp_path, many_files):
    """The process may open 1,024 files: fewer than there are strangers."""
    hub, seconds, failures = real_hub.made(tmp_path / "hub"), [], []
    with ExitStack() as stack:
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


def test_a_search_has_a_limit_of_words(hub):
    with hub.client("ada") as client:
        for path in ("/?q=", "/api/models?search="):
            began = time.monotonic()
            assert client.get(path + "+".join(f"w{n}" for n in range(30))).status_code == 200
            answered(
                client.get(path + "+".join(f"w{n}" for n in range(5000))), 400, "at most 32 words"
            )
            assert time.monotonic() - began < 1.0
