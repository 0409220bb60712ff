"""A hub that attacks its clients, on top of the honest one of `hub_server`.

`hub.attack` is called with the handler of each request before the honest answer; it returns True if
it has answered. The functions below make such attacks.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.kit import hub_server

Attack = Callable[[Any], bool]


class HostileHandler(hub_server.Handler):
    """The honest handler, unless the attack answers."""

    def answer(self) -> None:
        """Let the attack answer, or answer honestly."""
        attack = self.hub.attack
        if attack is None or not attack(self):
            super().answer()

    do_GET = do_HEAD = do_POST = do_DELETE = do_PUT = hub_server.Handler.handle_any

    def raw(self, data: bytes) -> None:
        """Send bytes as they are, and close the connection."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    def head(self, headers: dict[str, str] | None = None, status: str = "200 OK") -> None:
        """Send a status line and headers, with nothing added."""
        lines = [f"HTTP/1.1 {status}", *(f"{k}: {v}" for k, v in (headers or {}).items()), "", ""]
        self.raw("\r\n".join(lines).encode("latin-1"))


@contextmanager
def serving(address: str = "127.0.0.1") -> Iterator[Any]:
    """Run a hostile hub; yield it with its URL as `address`."""
    hub = hub_server.Hub()
    hub.attack, hub.stopped = None, threading.Event()
    handler = type("Bound", (HostileHandler,), {"hub": hub})
    server = hub_server.Server((address, 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    hub.address, hub.port = f"http://{address}:{server.server_port}", server.server_port
    try:
        yield hub
    finally:
        hub.stopped.set()
        server.shutdown()
        server.server_close()


def on(pattern: str, act: Callable[[Any], Any], method: str = "") -> Attack:
    """Attack the requests whose path matches a pattern."""

    def attack(handler: Any) -> bool:
        if method not in ("", handler.command) or not re.search(pattern, handler.path):
            return False
        act(handler)
        return True

    return attack


def either(*attacks: Attack) -> Attack:
    """Attack with the first of several attacks that answers."""
    return lambda handler: any(attack(handler) for attack in attacks)


def flood(handler: Any) -> None:
    """Send a chunked body that never ends."""
    handler.head({"Transfer-Encoding": "chunked", "Content-Type": "application/json"})
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with contextlib.suppress(OSError):
        while not handler.hub.stopped.is_set():
            handler.wfile.write(chunk)


def endless(text: bytes, seconds: float = 0.0) -> Callable[[Any], None]:
    """Send the same bytes for ever."""

    def act(handler: Any) -> None:
        handler.close_connection = True
        with contextlib.suppress(OSError):
            while not handler.hub.stopped.is_set():
                handler.wfile.write(text)
                time.sleep(seconds)

    return act


def drip(start: bytes, seconds: float = 0.02) -> Callable[[Any], None]:
    """Send the start of an answer, and then one byte after the other."""

    def act(handler: Any) -> None:
        handler.raw(start)
        endless(b"1", seconds)(handler)

    return act


def silence(handler: Any) -> None:
    """Never answer."""
    handler.close_connection = True
    handler.hub.stopped.wait(20)


def body(data: bytes | object, **headers: str) -> Callable[[Any], None]:
    """Send a body; an object as JSON."""
    payload = data if isinstance(data, bytes) else json.dumps(data).encode()

    def act(handler: Any) -> None:
        handler.send(200, payload, {k.replace("_", "-"): v for k, v in headers.items()})

    return act


def claimed(size: int) -> Callable[[Any], None]:
    """Announce a body of some size, and send a part of it."""

    def act(handler: Any) -> None:
        handler.head({"Content-Length": str(size)})
        handler.raw(b"{" * min(size, 1000))

    return act


def bomb(size: int, encoding: str = "gzip") -> Callable[[Any], None]:
    """Send a compressed body that grows a thousandfold."""
    packer = zlib.compressobj(wbits=31)
    data = packer.compress(bytes(size)) + packer.flush()
    return body(data, Content_Encoding=encoding)


def redirect(location: str | Callable[[Any], str], status: int = 302) -> Callable[[Any], None]:
    """Redirect to a URL."""

    def act(handler: Any) -> None:
        target = location if isinstance(location, str) else location(handler)
        handler.head({"Location": target, "Content-Length": "0"}, f"{status} Moved")

    return act


def echo(status: int, code: str = "") -> Callable[[Any], None]:
    """Answer with an error that repeats the token in every place, with terminal escapes."""

    def act(handler: Any) -> None:
        token = (handler.headers.get("Authorization") or "").removeprefix("Bearer ")
        text = f"\x1b]0;{token}\x07 {token[::-1]} {token.encode().hex()} \x1b[2J {token}"
        data = json.dumps({"error": text, "errors": [{"message": text}]}).encode()
        headers = {"X-Error-Message": token, "X-Error-Code": code or token, "X-Request-Id": token,
                   "X-HF-Warning": f"t; {token}", "Content-Length": str(len(data)),
                   "Content-Type": "application/json"}  # fmt: skip
        handler.head(headers, f"{status} {token}")
        handler.raw(data)

    return act


def honest_but(**headers: str) -> Attack:
    """Answer honestly, with other headers in addition."""

    def attack(handler: Any) -> bool:
        send = type(handler).__mro__[2].send

        def with_headers(status: int, data: bytes, own: dict[str, str]) -> None:
            more = {key.replace("_", "-"): value for key, value in headers.items()}
            kept = {k: v for k, v in own.items() if k.lower() not in {m.lower() for m in more}}
            send(handler, status, data, {**kept, **more})

        handler.send = with_headers
        return False

    return attack
