"""Listening addresses of a server, and limits of its connections.

 - A connection is closed if the head of a request is too large or does not arrive in time.
 - A client that does not read its response is disconnected after a timeout.
 - The number of connections is limited, in total and per address. A new connection replaces one
   that waits for its client. It is rejected if all others are being answered.

The limits are in the methods that asyncio calls, so that they hold for both parsers of uvicorn.

A request has the address of its client, and the origin of the page for which a browser sent it.
Forwarded headers are trusted only from a configured proxy. A page on the internet can make a
browser send requests to a server on this machine: under a name that resolves to this machine, or
across origins. The headers reveal both cases.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from adapterhub.errors import ConfigError

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@lru_cache(maxsize=64)
def is_of_this_machine(host: str | None, origin: str | None) -> bool:
    """Return whether the headers Host and Origin of a request both name this machine."""
    if host is not None and not is_loopback_host(host):
        return False
    return origin is None or _is_loopback(origin)


def is_loopback_host(host: str) -> bool:
    """Return whether a Host header names this machine."""
    return _is_loopback(f"http://{host}")


def is_loopback_address(host: str) -> bool:
    """Return whether a listening address can be reached only from this machine."""
    try:
        return host in _LOOPBACK_NAMES or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_form(headers: Mapping[str, str], base: str) -> bool:
    """Return whether a form was sent from a page of `base`, or not by a browser."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    own = "/".join(base.split("/")[:3])
    return origin in (None, own) and site in ("none", "same-origin")


def client_address(peer: str, forwarded: Sequence[str], proxies: Iterable[str]) -> str:
    """Return the address of a client, also behind any number of configured proxies.

    Args:
        peer: the address at the other end of the connection.
        forwarded: the X-Forwarded-For headers, in order.
        proxies: the addresses or networks of the trusted proxies.
    """
    address, networks = _plain_address(peer), tuple(proxies)
    hops = [hop.strip() for line in forwarded for hop in line.split(",")]
    while hops and is_among(address, networks):
        hop = _plain_address(hops.pop())
        if not hop:  # the client may have forged the rest
            break
        address = hop
    return address or peer


def is_among(address: str, networks: Iterable[str]) -> bool:
    """Return whether an address is among these addresses and networks."""
    plain = _plain_address(address)
    return bool(plain) and any(
        ipaddress.ip_address(plain) in network for network in map(_network, networks)
    )


@lru_cache(maxsize=64)
def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(text, strict=False)


def _plain_address(text: str) -> str:
    """Return an address without port, brackets and zone; "" for any other text."""
    host = text.partition("]")[0][1:] if text.startswith("[") else text
    if host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _is_loopback(url: str) -> bool:
    try:
        return urlsplit(url).hostname in _LOOPBACK_NAMES
    except ValueError:
        return False


MOST_HEADER_BYTES = 32 << 10
HEADER_SECONDS = 20.0
BACKLOG = 256  # connections accepted together before any of them is counted
_MOST_CONNECTIONS = 8192
_OTHER_FILES = 512  # for databases, files being sent, and connections not counted yet
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 selects a free port.

    Raises:
        ConfigError: the address is in use, or is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error.strerror or error}",
            hint="--port 0 for a free one",
        ) from None


def address_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_file_limit() -> str:
    """Raise the limit of open files as far as the system allows; return a message, or ""."""
    try:
        import resource
    except ImportError:  # Windows lacks such a limit
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return ""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS: the hard limit exceeds the kernel's
        return ""
    return f"open files: at most {_limit_text(hard)}, raised from {_limit_text(soft)}"


def _limit_text(limit: int) -> str:
    return f"{limit:,}" if 0 <= limit < 1 << 62 else "any number"


def most_connections() -> int:
    """Return the number of connections that leaves enough open files for everything else."""
    try:
        import resource
    except ImportError:
        return _MOST_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(_MOST_CONNECTIONS, max(files - _OTHER_FILES, files // 4))


class ConnectionLimits:
    """Limit on a server's connections; one address may hold at most half of them.

    Args:
        most: the maximum number in total; None: as many as the limit of open files allows.
        is_proxy: whether an address is a proxy with the connections of many clients.
    """

    def __init__(
        self,
        most: int | None = None,
        is_proxy: Callable[[str], bool] = lambda address: False,
    ) -> None:
        self.most = most_connections() if most is None else most
        self.is_proxy = is_proxy
        self.open: dict[LimitedConnection, str] = {}  # and their addresses, idle longest first
        self.counts: Counter[str] = Counter()  # of addresses

    def admit(self, new: LimitedConnection, address: str) -> bool:
        """Return whether a new connection is accepted; another one may be closed to make room."""
        if self.counts[address] >= max(1, self.most // 2) and not self.is_proxy(address):
            is_room = self._drop([each for each, of in self.open.items() if of == address])
        else:
            is_room = len(self.open) < self.most or self._drop([*self.open])
        if is_room:
            self.open[new] = address
            self.counts[address] += 1
        return is_room

    def forget(self, connection: LimitedConnection) -> None:
        """Remove a closed connection."""
        address = self.open.pop(connection, None)
        if address is not None:
            self.counts[address] -= 1
            if not self.counts[address]:
                del self.counts[address]

    def note(self, connection: LimitedConnection) -> None:
        """Record that a client has sent data."""
        address = self.open.pop(connection, None)
        if address is not None:
            self.open[connection] = address

    def _drop(self, among: list[LimitedConnection]) -> bool:
        """Drop a connection that waits for its client, preferably one never answered before."""
        waiting = [each for each in among if each.waits_for_client]
        if not waiting:
            return False
        oldest = next((each for each in waiting if not each.was_answered), waiting[0])
        self.forget(oldest)
        oldest.transport.abort()
        return True


class LimitedConnection(asyncio.Protocol):
    """Mixin that adds connection limits to a protocol of uvicorn.

    Attributes:
        limits: the limits shared by all connections.
        write_seconds: the timeout for a client that does not read pending data.
    """

    limits: ConnectionLimits
    write_seconds = 30.0
    cycle: Any
    transport: asyncio.Transport
    _head = 0  # bytes of a request with an incomplete head
    _writing: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the head of a request, or close the connection if there are too many."""
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        if self.limits.admit(self, str(peer[0]) if peer else ""):
            self._expect_head()
        else:
            self.transport.write(_TOO_MANY)
            self.transport.close()

    @property
    def waits_for_client(self) -> bool:
        """Whether the server is waiting for the client to send data."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def was_answered(self) -> bool:
        """Whether the last request received has been answered."""
        return self.cycle is not None and self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeouts and forget the connection."""
        self.limits.forget(self)
        self._cancel_reading()
        self._cancel_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the parser, and count the bytes of an incomplete head."""
        self.limits.note(self)
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
        """Start the timeout for a client that does not read."""
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._writing = loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the timeout, because the client reads again."""
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


def limited_protocol(
    base: type[Any], write_seconds: float, limits: ConnectionLimits | None = None
) -> type[Any]:
    """Return a protocol class of uvicorn with connection limits.

    `write_seconds` is the timeout for a client that does not read pending data.
    """
    chosen = {"write_seconds": write_seconds, "limits": limits or ConnectionLimits()}
    return type("LimitedProtocol", (LimitedConnection, base), chosen)
