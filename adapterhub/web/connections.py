"""Where a server listens, and limits of a connection that uvicorn keeps, besides a request's.

 - A head of a request that is too large, or does not come in time, ends the connection.
 - A client that does not read what it is sent is dropped after a time.

They are in the methods that asyncio calls, so that both parsers of uvicorn have them.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from adapterhub.errors import ConfigError

MOST_HEADER_BYTES = 32 << 10
HEADER_SECONDS = 20.0
_BACKLOG = 2048
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


def listen(host: str, port: int) -> socket.socket:
    """Open the address that is listened at; port 0 is a free one.

    Raises:
        ConfigError: it is taken, or is none of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error.strerror or error}",
            hint="--port 0 for a free one",
        ) from None


def address_of(listening: socket.socket) -> str:
    """Return the URL of an address that is listened at."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class LimitedConnection(asyncio.Protocol):
    """What a protocol of uvicorn has in front of it.

    Attributes:
        write_seconds: how long a client may read nothing of what waits for it.
    """

    write_seconds = 30.0
    cycle: Any
    transport: asyncio.Transport
    _head = 0  # bytes of the request whose head is not complete
    _writing: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the head of a request."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._cancel_reading()
        self._cancel_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Let the parser have bytes, and count those of a head that is not complete."""
        before, transport = self.cycle, self.transport
        super().data_received(data)
        if self.cycle is not before:
            self._head = 0
            self._cancel_reading()
        elif before is None or before.response_complete:
            if not self._head and self._reading is None:
                self._expect_head()
            self._head += len(data)
            if self._head > MOST_HEADER_BYTES and not transport.is_closing():
                transport.write(_TOO_LARGE)
                transport.close()

    def pause_writing(self) -> None:
        """Wait until the client reads."""
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._writing = loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client reads."""
        self._cancel_writing()
        super().resume_writing()

    def _expect_head(self) -> None:
        loop = asyncio.get_running_loop()
        self._reading = loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _cancel_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _cancel_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None


def limited_protocol(base: type[Any], write_seconds: float) -> type[Any]:
    """Return a protocol of uvicorn with limits.

    `write_seconds` is how long a client may read nothing of what waits for it.
    """
    return type("LimitedProtocol", (LimitedConnection, base), {"write_seconds": write_seconds})
