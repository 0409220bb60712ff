"""Network rules for every client of a hub, both huggingface_hub (hub_guard.py) and our own.

The rules cover the server that a token belongs to, the addresses that requests may reach, the
minimum rate of responses, and the formats of commits and hashes.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

MIN_RATE = 4096  # bytes per second of a response: half the rate of a telephone modem
COMMIT, SHA256 = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{64}")
_GLANCE_SECONDS = 1.0
_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"[\x21-\x7e]{1,8192}")  # signed URLs of object stores have up to 2 kB
_HOST = re.compile(r"[A-Za-z0-9_.:-]{1,255}")
_UNUSABLE = "unusable-proxy.invalid"  # RFC 6761: no such host exists
_SOCKS = ("socks5", "socks5h")
_environment = threading.Lock()


def is_commit(value: object) -> bool:
    """Return whether a value is a full commit hash."""
    return isinstance(value, str) and COMMIT.fullmatch(value) is not None


class Reach(IntEnum):
    """The reach of an address: public, one network, or one machine."""

    PUBLIC = 0
    PRIVATE = 1
    LOOPBACK = 2


class ForbiddenAddressError(Exception):
    """A URL or address that requests for a hub must not reach; the text gives the reason."""


class UnusableProxyError(Exception):
    """A request would go through an unusable proxy; `proxy_advice` gives the reason."""


class HubNetwork:
    """The destinations of requests for one hub: its own origin, or another one by a redirect.

    Another origin must use https (http only from this machine to this machine). It must not be
    closer to this machine than the hub: a hub on the internet cannot redirect a request into the
    user's network. The address is checked when the connection is open, so a name that resolves to a
    private address is refused. Behind a proxy, only the URL can be checked.
    """

    def __init__(self, base: str) -> None:
        self.origin = url_origin(base)
        self.reach = reach_of(_split(base).hostname or "") or Reach.PUBLIC
        self._peers: set[Reach] = set()

    def check(self, url: str) -> None:
        """Refuse a URL that a request for this hub must not go to.

        Raises:
            ForbiddenAddressError: the URL is malformed, not https, or on a closer network.
        """
        origin = url_origin(url)
        if origin == self.origin:
            return
        reach = reach_of(_split(url).hostname or "")
        if origin.startswith("http:") and not self.reach == reach == Reach.LOOPBACK:
            raise ForbiddenAddressError("a redirect to http")
        if reach is not None:
            self._check_reach(reach)

    def trace(self, url: str) -> Callable[[str, Mapping[str, Any]], None]:
        """Return a callback for httpx's extension `trace` that checks the address of the peer.

        The callback raises ForbiddenAddressError before anything is sent, and UnusableProxyError
        before a connection is made.
        """
        hostname, is_hub = _split(url).hostname, url_origin(url) == self.origin
        connected: dict[str, str] = {}

        def callback(event: str, info: Mapping[str, Any]) -> None:
            if event.endswith("connect_tcp.started"):
                connected["host"] = str(info["host"]).strip("[]")
                if connected["host"] == _UNUSABLE:
                    raise UnusableProxyError
            elif event.endswith("connect_tcp.complete") and connected.get("host") == hostname:
                stream = info["return_value"]
                reach = reach_of(str(stream.get_extra_info("server_addr")[0]))
                try:
                    self._check_peer(reach, is_hub)
                except ForbiddenAddressError:
                    stream.close()
                    raise

        return callback

    def _check_peer(self, reach: Reach | None, is_hub: bool) -> None:
        if reach is None:
            return
        if is_hub:
            # Keep the farthest reach: a name may resolve to this machine once and elsewhere later.
            self._peers.add(reach)
            self.reach = min(self._peers)
        else:
            self._check_reach(reach)

    def _check_reach(self, reach: Reach) -> None:
        if reach > self.reach:
            raise ForbiddenAddressError("a redirect to an address of a private network")


class Watchdog:
    """Ends a connection that is too slow in any part of a response.

    The timeouts of HTTP libraries apply to each packet, and one byte is a packet. `trace` receives
    the library's events after `inner`. `sockets` are connections that other responses also use.

    Attributes:
        received: the bytes of the response so far, counted by its reader.
        expired: whether the connection was ended.
    """

    def __init__(
        self,
        inner: Callable[[str, Mapping[str, Any]], None],
        sockets: list[socket.socket] | None = None,
    ) -> None:
        self.received = 0
        self.expired = False
        self._inner, self._end = inner, 0.0
        self._sockets: list[socket.socket] = [] if sockets is None else sockets
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, grace: float, began: float | None = None) -> None:
        """Allow a response `grace` seconds, from now or from `began`; then require `MIN_RATE`."""
        self._end = (time.monotonic() if began is None else began) + grace
        if self._thread is None and not self._done.is_set():
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._done.set()

    def close(self) -> None:
        """Stop watching, and close the connections."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        for connection in self._sockets:
            connection.close()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Receive an event of the HTTP library, and record its connections."""
        self._inner(event, info)
        if event.endswith("connect_tcp.complete"):
            # A duplicate, since TLS takes over the socket; shutting it down ends both.
            self._sockets.append(info["return_value"].get_extra_info("socket").dup())

    def _watch(self) -> None:
        while (left := self._end + self.received / MIN_RATE - time.monotonic()) > 0:
            if self._done.wait(min(left, _GLANCE_SECONDS)):  # the end may change
                return
        self.expired = True
        while not self._done.wait(0.1):  # a connection may be opened after the end
            for connection in tuple(self._sockets):
                with suppress(OSError):  # already closed
                    connection.shutdown(socket.SHUT_RDWR)


def redirect_target(url: str, location: str) -> str:
    """Return the absolute URL of a redirect.

    Raises:
        ForbiddenAddressError: the URL is malformed.
    """
    try:
        return urljoin(url, location)
    except ValueError:
        raise ForbiddenAddressError("a malformed URL") from None


def url_origin(url: str) -> str:
    """Return the origin of a URL as `scheme://host[:port]`, in lower case.

    Raises:
        ForbiddenAddressError: the text is not an http or https URL, or it has a user name.
    """
    parts = _split(url)
    host = parts.hostname or ""
    if parts.scheme not in _PORTS or not _HOST.fullmatch(host) or "@" in parts.netloc:
        raise ForbiddenAddressError("a malformed URL")
    host = f"[{host}]" if ":" in host else host
    port = "" if parts.port in (None, _PORTS[parts.scheme]) else f":{parts.port}"
    return f"{parts.scheme}://{host}{port}"


def reach_of(host: str) -> Reach | None:
    """Return the reach of a host by its address; None for a name other than localhost."""
    if host == "localhost" or host.endswith(".localhost"):
        return Reach.LOOPBACK
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    address = getattr(address, "ipv4_mapped", None) or address
    # Linux connects 0.0.0.0 to this machine.
    if address.is_loopback or address.is_unspecified:
        return Reach.LOOPBACK
    return Reach.PUBLIC if address.is_global else Reach.PRIVATE


@contextmanager
def usable_proxies() -> Iterator[None]:
    """Allow creating a client despite unusable proxies in the environment.

    A client sets up all proxies at once, and raises if one has an unknown scheme, even if NO_PROXY
    excludes the only host that it would serve. Inside this context, a placeholder name replaces
    such a proxy. `HubNetwork.trace` refuses it when a request would go there.
    """
    with _environment:
        unusable = {
            name: value
            for name, value in os.environ.items()
            if name.lower() in ("http_proxy", "https_proxy", "all_proxy") and _fault_of(value)
        }
        os.environ.update(dict.fromkeys(unusable, f"http://{_UNUSABLE}"))
        try:
            yield
        finally:
            os.environ.update(unusable)


def proxy_advice(url: str) -> str:
    """Return advice for a URL that is requested through a proxy, or ""."""
    proxies, parts = getproxies(), _split(url)
    kind = parts.scheme if proxies.get(parts.scheme) else "all"
    host = parts.hostname or ""
    if not (proxy := proxies.get(kind)) or proxy_bypass(host):
        return ""
    name = next((n for n in os.environ if n.lower() == f"{kind}_proxy"), "the system's settings")
    shown = re.sub(r"(?<=//).*@|^[^/]*@", "", proxy)[:200]  # not the password
    fault, remedies = _fault_of(proxy), [f"unset {name}", f"add {host} to NO_PROXY"]
    if _kind_of(proxy) in _SOCKS and fault:
        remedies.insert(0, "pip install socksio")
    if fault:
        return f"{', or '.join(remedies)}: the proxy {shown} {fault}"
    return f"check the proxy {shown} of {name}; or {', or '.join(remedies)}"


def _fault_of(proxy: str) -> str:
    """Return the reason that a proxy of the environment is unusable, or ""."""
    kind = _kind_of(proxy)
    if kind in _SOCKS and importlib.util.find_spec("socksio") is None:
        return "needs the package socksio"
    if kind not in (*_PORTS, *_SOCKS):
        return f"is of the kind {kind!r}, not http, https, socks5 or socks5h"
    try:
        parts = _split(proxy if "://" in proxy else f"http://{proxy}")
    except ForbiddenAddressError:
        return "is malformed: it is not http://HOST:PORT"
    return "" if _HOST.fullmatch(parts.hostname or "") else "names no host: http://HOST:PORT"


def _kind_of(proxy: str) -> str:
    return proxy.partition("://")[0].lower() if "://" in proxy else "http"


def _split(url: str) -> SplitResult:
    if not _URL.fullmatch(url) or "\\" in url:
        raise ForbiddenAddressError("a malformed URL")
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError unless it is a number
    except ValueError:
        raise ForbiddenAddressError("a malformed URL") from None
    return parts
