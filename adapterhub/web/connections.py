"""Where a server listens, and limits of its connections, besides those of a request.

 - A head of a request that is too large, or does not come in time, ends the connection.
 - A client that does not read what it is sent is dropped after a time.
 - There are at most so many connections, in all and of one address. A new one takes the place of
   one that waits for its client; while all are being answered, it is refused.

They are in the methods that asyncio calls, so that both parsers of uvicorn have them.

A request comes from the address of its client, and from the page for which a browser made it.
Forwarded headers count only if a configured proxy wrote them. A page on the internet can make a
browser send requests to a server on this machine: under a name that resolves to this machine, or
across origins. Both are seen in the headers.
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
    """Return whether a request is for this machine by its headers Host and Origin."""
    if host is not None and not is_loopback_host(host):
        return False
    return origin is None or _is_loopback(origin)


def is_loopback_host(host: str) -> bool:
    """Return whether a header Host names this machine."""
    return _is_loopback(f"http://{host}")


def is_loopback_address(host: str) -> bool:
    """Return whether an address to listen at is reached from this machine alone."""
    try:
        return host in _LOOPBACK_NAMES or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_form(headers: Mapping[str, str], base: str) -> bool:
    """Return whether a browser sent a form from a page of `base`, or no browser sent it."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    own = "/".join(base.split("/")[:3])
    return origin in (None, own) and site in ("none", "same-origin")


def client_address(peer: str, forwarded: Sequence[str], proxies: Iterable[str]) -> str:
    """Return the address of a client behind any number of configured proxies.

    Args:
        peer: the address at the other end of the connection.
        forwarded: the headers X-Forwarded-For, in their order.
        proxies: addresses, or networks, of the proxies whose headers are read.
    """
    found, networks = _plain_address(peer), tuple(proxies)
    hops = [hop.strip() for line in forwarded for hop in line.split(",")]
    while hops and is_among(found, networks):
        hop = _plain_address(hops.pop())
        if not hop:  # what is left of a text that is not an address, a client may have written
            break
        found = hop
    return found or peer


def is_among(address: str, networks: Iterable[str]) -> bool:
    """Return whether an address is one of these addresses, or in one of these networks."""
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
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def _is_loopback(url: str) -> bool:
    try:
        return urlsplit(url).hostname in _LOOPBACK_NAMES
    except ValueError:
        return False


MOST_HEADER_BYTES = 32 << 10
HEADER_SECONDS = 20.0
BACKLOG = 256  # connections that are accepted at once, before any of them is counted
_MOST_CONNECTIONS = 8192
_OTHER_FILES = 512  # for databases, files that are sent, and what is accepted but not counted
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


def listen(host: str, port: int) -> socket.socket:
    """Open the address that is listened at; port 0 is a free one.

    Raises:
        ConfigError: it is taken, or is none of this machine.
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
    """Return the URL of an address that is listened at."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_file_limit() -> str:
    """Let this process open as many files as the system allows; return what is to be said of it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return ""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS: hard is no limit, and more than the kernel has
        return ""
    return f"open files: at most {_limit_text(hard)}, raised from {_limit_text(soft)}"


def _limit_text(limit: int) -> str:
    return f"{limit:,}" if 0 <= limit < 1 << 62 else "any number"


def most_connections() -> int:
    """Return how many connections leave enough of this process's files for everything else."""
    try:
        import resource
    except ImportError:
        return _MOST_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(_MOST_CONNECTIONS, max(files - _OTHER_FILES, files // 4))


class ConnectionLimits:
    """How many connections a server has; one address has half of them at most.

    Args:
        most: how many in all; None for what the process's limit of files allows.
        is_proxy: whether an address has the connections of many clients.
    """

    def __init__(
        self,
        most: int | None = None,
        is_proxy: Callable[[str], bool] = lambda address: False,
    ) -> None:
        self.most = most_connections() if most is None else most
        self.is_proxy = is_proxy
        self.open: dict[LimitedConnection, str] = {}  # and their addresses, the quietest first
        self.counts: Counter[str] = Counter()  # of addresses

    def admit(self, new: LimitedConnection, address: str) -> bool:
        """Return whether there is room for one more; another one may have to leave for it."""
        if self.counts[address] >= max(1, self.most // 2) and not self.is_proxy(address):
            is_room = self._drop([each for each, of in self.open.items() if of == address])
        else:
            is_room = len(self.open) < self.most or self._drop([*self.open])
        if is_room:
            self.open[new] = address
            self.counts[address] += 1
        return is_room

    def forget(self, connection: LimitedConnection) -> None:
        """Note that a connection is closed."""
        address = self.open.pop(connection, None)
        if address is not None:
            self.counts[address] -= 1
            if not self.counts[address]:
                del self.counts[address]

    def note(self, connection: LimitedConnection) -> None:
        """Note that a client has sent something."""
        address = self.open.pop(connection, None)
        if address is not None:
            self.open[connection] = address

    def _drop(self, among: list[LimitedConnection]) -> bool:
        """Drop a connection that waits for its client, and rather one that never got an answer."""
        waiting = [each for each in among if each.waits_for_client]
        if not waiting:
            return False
        found = next((each for each in waiting if not each.was_answered), waiting[0])
        self.forget(found)
        found.transport.abort()
        return True


class LimitedConnection(asyncio.Protocol):
    """What a protocol of uvicorn has in front of it.

    Attributes:
        limits: of this and the other connections.
        write_seconds: how long a client may read nothing of what waits for it.
    """

    limits: ConnectionLimits
    write_seconds = 30.0
    cycle: Any
    transport: asyncio.Transport
    _head = 0  # bytes of the request whose head is not complete
    _writing: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the head of a request, unless there are too many connections."""
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        if self.limits.admit(self, str(peer[0]) if peer else ""):
            self._expect_head()
        else:
            self.transport.write(_TOO_MANY)
            self.transport.close()

    @property
    def waits_for_client(self) -> bool:
        """Whether the client is to send something before it gets anything."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def was_answered(self) -> bool:
        """Whether the last request that came has its answer."""
        return self.cycle is not None and self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self.limits.forget(self)
        self._cancel_reading()
        self._cancel_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Let the parser have bytes, and count those of a head that is not complete."""
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


def limited_protocol(
    base: type[Any], write_seconds: float, limits: ConnectionLimits | None = None
) -> type[Any]:
    """Return a protocol of uvicorn with limits.

    `write_seconds` is how long a client may read nothing of what waits for it.
    """
    chosen = {"write_seconds": write_seconds, "limits": limits or ConnectionLimits()}
    return type("LimitedProtocol", (LimitedConnection, base), chosen)
