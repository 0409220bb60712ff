"""A server as a process, under load: told to leave, killed, and started again."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.client import HTTPException

import pytest

import adapterhub as ah
from adapterhub.web.tokens import TokenFile
from tests.kit.server import EXAMPLES, TEXTS, write_adapter
from tests.kit.session import wait_until
from tests.kit.web_servers import predict

pytestmark = [pytest.mark.apart, pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")]


# What a client sees of a connection that is closed before its request was read: the end comes
# after the request was sent, or before. An answer that is lost would be a RemoteDisconnected.
UNREAD = ("ConnectionResetError", "BrokenPipeError")


@pytest.fixture(scope="module")
def registry(backbone, tmp_path_factory):
    root = tmp_path_factory.mktemp("process")
    ah.publish(write_adapter(backbone, root / "a", example=EXAMPLES[0]), "polite",
               registry=root / "registry")  # fmt: skip
    return root / "registry"


@contextmanager
def process(registry, *flags):
    """Start a server; yield its address, when it is ready, and the process."""
    words = [sys.executable, "-m", "adapterhub", "serve", "polite", "--port", "0", *flags]
    started = subprocess.Popen(
        [*words, "--registry", str(registry)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in started.stdout:
            if found := re.search(r"ready: (http://\S+) ", line):
                break
        else:
            raise AssertionError(started.stderr.read())
        yield found[1], started
    finally:
        started.kill()
        started.communicate(timeout=30)


class Load:
    """Threads that ask all the time; `found` has the status of each answer, or an error."""

    def __init__(self, url, **more):
        self.stop, self.found = threading.Event(), []
        self.threads = [
            threading.Thread(target=self._ask, args=(url,), kwargs=more, daemon=True)
            for _ in range(4)
        ]
        for each in self.threads:
            each.start()

    def _ask(self, url, **more):
        while not self.stop.is_set():
            try:
                answer = predict(url, "polite", *TEXTS, **more)
                self.found.append(answer.status)
            except (OSError, HTTPException) as error:
                self.found.append(type(error).__name__)
                time.sleep(0.02)

    def end(self):
        self.stop.set()
        for each in self.threads:
            each.join(30)


def test_a_server_that_is_killed_starts_again_and_finishes_when_it_is_told_to_leave(
    registry, tmp_path
):
    """No request is lost: each is answered, told that the server leaves, or not accepted."""
    file = TokenFile(tmp_path / "tokens.json")
    token = file.create("one")
    flags = ["--tokens", str(file.path), "--drain", "10s", "--no-log-requests"]
    with process(registry, *flags) as (url, server):
        load = Load(url, token=token)
        wait_until(lambda: len(load.found) >= 20)
        server.kill()
        assert server.wait(20) == -signal.SIGKILL
        load.end()
        assert {each for each in load.found if isinstance(each, int)} == {200}
    with process(registry, *flags, "--port", url.rpartition(":")[2]) as (again, server):
        assert again == url
        load = Load(url, token=token)
        wait_until(lambda: len(load.found) >= 50)
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert time.monotonic() - began < 11
        load.end()
        assert {*load.found} <= {200, 503, "ConnectionRefusedError", *UNREAD}
        assert load.found.count(200) >= 50
        assert sum(each in UNREAD for each in load.found) <= len(load.threads)
        assert "Traceback" not in server.stderr.read()
    assert file.tokens()[0].used
