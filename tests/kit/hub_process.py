"""Hubs in processes of their own, with one user and a token."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2

from adapterhub.hub.accounts import create_hub_token, create_namespace
from adapterhub.hub.database import HubPlace
from adapterhub.hub.state import create_hub, open_hub
from tests.kit.commit_body import commit, create

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
