"""A hub of ours in this process, on a free port, with the users and tokens of a test."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from adapterhub.hub.accounts import create_hub_token, create_namespace, set_member
from adapterhub.hub.database import HubPlace
from adapterhub.hub.import_export import answering_in_thread
from adapterhub.hub.server import HubApp, known_hosts
from adapterhub.hub.state import Hub, HubOptions, create_hub, open_hub


@dataclass
class RunningHub:
    """A hub that answers, and what tests ask it with."""

    hub: Hub
    address: str
    tokens: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None  # drop the connection of the next download after this many bytes

    def user(self, name: str, role: str = "write", *, is_admin: bool = False, **orgs: str) -> str:
        """Create a user with a token, in organisations, each with a role; return the token."""
        with self.hub.database.writing() as connection:
            create_namespace(connection, name, "user", is_admin=is_admin)
            for org, own in orgs.items():
                set_member(connection, org, name, own)
            self.tokens[name] = create_hub_token(connection, name, f"{name}-laptop", role)
        return self.tokens[name]

    def refuse_writers(self) -> Callable[[], None]:
        """Let ada only read in acme; return what undoes that."""

        def set_role(role: str) -> None:
            with self.hub.database.writing() as connection:
                set_member(connection, "acme", "ada", role)

        set_role("read")
        return lambda: set_role("write")

    def org(self, name: str) -> None:
        """Create an organisation."""
        with self.hub.database.writing() as connection:
            create_namespace(connection, name, "org")

    def token(self, user: str, role: str, name: str, **options: object) -> str:
        """Create one more token of a user."""
        with self.hub.database.writing() as connection:
            return create_hub_token(connection, user, name, role, **options)

    def client(self, user: str | None = None, token: str | None = None) -> httpx2.Client:
        """Return a client of HTTP with the token of a user."""
        token = token or (self.tokens[user] if user else None)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        kind = httpx2.Client if self.is_folder else BucketClient
        return kind(base_url=self.address, headers=headers, timeout=60)

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
