"""Network rules for every client of a hub: our own, and huggingface_hub inside `guarded_hub`.

The rules cover the server that a token belongs to, the addresses that requests may reach, the
minimum rate of responses, and the formats of commits and hashes.

huggingface_hub joins the ETag of a response to its cache path, so a hostile hub can make it write
and read files anywhere. It also does not limit the size and duration of responses, prints headers,
and sends the token to every known hub. Inside `guarded_hub`, its session has two hooks that prevent
this. Commits, hashes and file names are also checked, wherever they are used.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from itertools import chain
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants
from huggingface_hub.utils import _http as hub_http

from adapterhub.errors import BackboneError

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


class OversizedError(Exception):
    """A response is larger than its limit; the text gives the limit."""


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

    def redirected(self, url: str, location: str) -> str:
        """Return the absolute URL of a redirect from `url`.

        Raises:
            ForbiddenAddressError: as `check`.
        """
        try:
            target = urljoin(url, location)
        except ValueError:
            raise ForbiddenAddressError("a malformed URL") from None
        self.check(target)
        return target

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
        received: the bytes of the response so far.
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

    def counted(
        self, chunks: Iterable[bytes], limit: int | None, stated: int = 0
    ) -> Iterator[bytes]:
        """Yield the body of a response, of at most `limit` bytes; `stated` is its stated size.

        Raises:
            OversizedError: it has more, or states more.
        """
        most = math.inf if limit is None else limit
        if stated <= most:
            for chunk in chunks:
                self.received += len(chunk)
                if self.received > most:
                    break
                yield chunk
        if max(stated, self.received) > most:
            raise OversizedError(f"more than {limit} bytes")

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


MAX_ANSWER_BYTES = 64 << 20  # API responses: listings of repositories with 100,000 files
GRACE_SECONDS = 60.0  # before MIN_RATE applies
HEADER_SECONDS = 300.0  # for all headers of a response
TIMEOUT_SECONDS = 300.0  # between two packets; a hub may take minutes to check a large commit
_ETAG = re.compile(r'(W/)?"?[A-Za-z0-9_+=-]{8,128}"?')
_HEADERS = {
    "etag": _ETAG,
    "x-linked-etag": _ETAG,
    "x-repo-commit": COMMIT,
    "x-xet-hash": SHA256,
    "x-linked-size": re.compile(r"\d{1,18}"),
}
# They would be printed, or could make the client sleep indefinitely.
_DROPPED = ("x-hf-warning", "retry-after", "ratelimit")
_XET = ("x-xet-hash", "x-xet-refresh-route", "link")
_XET_LINK = "xet-auth"
_API = re.compile(r".*/api/(?!resolve-cache/).*")  # the Hub's cache of small files is below /api
_PART = re.compile(r"(?!\.{1,2}$)[^\x00-\x1f\x7f-\x9f\\/:]{1,255}")

_lock = threading.Lock()
_active: list[HubNetwork] = []
_guarded_clients: list[Any] = []
_connections: dict[str, list[socket.socket]] = {}  # by origin; duplicates
_previous_factory: Callable[[], Any] | None = None


@contextmanager
def guarded_hub(endpoint: str | None = None) -> Iterator[None]:
    """Check the responses that huggingface_hub receives inside this context.

    The token is sent only to the origin of `endpoint`, by default huggingface_hub's endpoint.

    Raises:
        BackboneError: a response is malformed, too large or too slow.
    """
    try:
        network = HubNetwork(endpoint or constants.ENDPOINT)
    except ForbiddenAddressError as error:
        raise BackboneError(
            f"the address of the hub is {error}", hint="check HF_ENDPOINT"
        ) from None
    _enter(network)
    try:
        yield
    finally:
        _leave(network)


def _enter(network: HubNetwork) -> None:
    global _previous_factory
    with _lock:
        _active.append(network)
        if len(_active) == 1:
            _previous_factory = hub_http._GLOBAL_CLIENT_FACTORY
            hub_http.set_client_factory(_guarded_client)


def _leave(network: HubNetwork) -> None:
    with _lock:
        _active.remove(network)
        if _active:
            return
        for client in _guarded_clients:
            client.event_hooks["request"].remove(_check_request)
            client.event_hooks["response"].remove(_check_response)
        _guarded_clients.clear()
        for connection in chain.from_iterable(_connections.values()):
            connection.close()
        _connections.clear()
        if hub_http._GLOBAL_CLIENT_FACTORY is _guarded_client and _previous_factory is not None:
            hub_http.set_client_factory(_previous_factory)


def _guarded_client() -> Any:
    assert _previous_factory is not None
    with usable_proxies():
        client = _previous_factory()
    client.event_hooks["request"].append(_check_request)
    client.event_hooks["response"].append(_check_response)
    if client.timeout.read is None:
        client.timeout = TIMEOUT_SECONDS
    _guarded_clients.append(client)
    return client


def _check_request(request: Any) -> None:
    """Remove the token from a request to another origin; request an uncompressed response."""
    networks, url = tuple(_active), str(request.url)
    if not networks:  # a request of another thread that began inside the context
        return
    try:
        is_hub = url_origin(url) in {network.origin for network in networks}
        if not is_hub:
            request.headers.pop("authorization", None)
            networks[-1].check(url)
    except ForbiddenAddressError as error:
        raise _refusal(f"{error}") from None
    request.headers["accept-encoding"] = "identity"
    is_api = is_hub and _API.fullmatch(request.url.path) is not None
    # A redirected request keeps `is_api` of the first one: its response serves the same call.
    watchdog = _watchdog(networks[-1], url, _library_of(request))
    request.extensions = {
        "is_api": is_api,
        **request.extensions,
        "trace": watchdog.trace,
        "watchdog": watchdog,
    }


def _watchdog(network: HubNetwork, url: str, library: Any) -> Watchdog:
    """Return a watchdog that checks the peer of a request and ends a slow one."""
    check_peer = network.trace(url)

    def inner(event: str, info: Mapping[str, Any]) -> None:
        try:
            check_peer(event, info)
        except UnusableProxyError:  # like a proxy that does not respond: the cache may be used
            raise library.ConnectError("the proxy cannot be used") from None
        if event.endswith("receive_response_headers.started"):  # the request may take long
            watchdog.begin(HEADER_SECONDS)
        elif event.endswith(".failed"):
            watchdog.stop()

    with _lock:
        watchdog = Watchdog(inner, _connections.setdefault(url_origin(url), []))
    return watchdog


def _check_response(response: Any) -> None:
    """Refuse a response with names that could redirect a path; limit its size and time."""
    networks, request = tuple(_active), response.request
    # A request that began outside the context lacks a watchdog.
    watchdog = request.extensions.get("watchdog") or Watchdog(lambda event, info: None)
    if not networks:
        watchdog.stop()
        return
    is_api = request.extensions.get("is_api", False)
    response.stream = _limited(response.stream, MAX_ANSWER_BYTES if is_api else None, watchdog)
    for header in _DROPPED:
        response.headers.pop(header, None)
    if response.headers.get("content-encoding", "identity") != "identity":
        raise _refusal("a compressed body")
    _check_routes(response, networks[-1])
    if request.method == "HEAD" and not _stays(response):
        for header, pattern in _HEADERS.items():
            if not all(map(pattern.fullmatch, response.headers.get_list(header))):
                raise _refusal(f"an invalid {header} header")
    elif is_api and _lists_files(request) and response.status_code < 300:
        response.read()
        _check_names(response.content)


def _lists_files(request: Any) -> bool:
    return request.method == "GET" or "/paths-info/" in request.url.path


def _stays(response: Any) -> bool:
    """Return whether a response redirects within its origin; then its headers are not used."""
    url, location = str(response.request.url), response.headers.get("location")
    return location is not None and _same(urljoin(url, location), url)


def _check_routes(response: Any, network: HubNetwork) -> None:
    """Refuse redirects and next pages to forbidden URLs; drop Xet if its tokens are elsewhere."""
    url = str(response.request.url)
    try:
        if location := response.headers.get("location"):
            network.redirected(url, location)
        links = {rel: urljoin(url, link.get("url", "")) for rel, link in response.links.items()}
        following = links.get("next")
        if following and not (_same(following, url) and _API.fullmatch(urlsplit(following).path)):
            raise ForbiddenAddressError("a next page on another server")
        # The client requests Xet tokens from this URL with the user's token.
        routes = [links[_XET_LINK]] if _XET_LINK in links else []
        routes += [urljoin(url, r) for r in response.headers.get_list("x-xet-refresh-route")]
        if not all(_same(route, url) for route in routes):
            for header in _XET:  # the file is then downloaded without Xet
                response.headers.pop(header, None)
    except (ForbiddenAddressError, ValueError) as error:
        raise _refusal(f"{error}") from None


def _same(first: str, second: str) -> bool:
    return url_origin(first) == url_origin(second)


def _check_names(data: bytes) -> None:
    """Refuse a listing whose commits, hashes or file names could redirect a path."""
    try:
        tree = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise _refusal("malformed JSON") from None
    items = tree if isinstance(tree, list) else [tree]
    for item in items:
        if not isinstance(item, dict):
            continue
        siblings = item.get("siblings")
        names = [s.get("rfilename") for s in siblings or () if isinstance(s, dict)]
        for name in [*names, *([item["path"]] if "path" in item else [])]:
            if not isinstance(name, str) or not all(map(_PART.fullmatch, name.split("/"))):
                raise _refusal(f"an invalid file name {str(name)[:80]!a}")
        large = item.get("lfs")
        hashes = [(item.get("sha"), COMMIT), (item.get("xetHash"), SHA256)]
        hashes += [(large.get("oid"), SHA256)] if isinstance(large, dict) else []
        for value, pattern in hashes:
            if value is not None and not pattern.fullmatch(str(value)):
                raise _refusal(f"an invalid hash {str(value)[:80]!a}")


def _limited(stream: Any, limit: int | None, watchdog: Watchdog) -> Any:
    """Wrap the stream of a body to end it at a size limit, or when it is too slow."""

    class LimitedStream(_library_of(stream).SyncByteStream):  # type: ignore[misc]
        def __iter__(self) -> Iterator[bytes]:
            watchdog.begin(GRACE_SECONDS)
            try:
                yield from watchdog.counted(stream, limit)
            except OversizedError as error:
                raise _refusal(f"{error}") from None
            finally:
                watchdog.stop()
                if watchdog.expired:
                    raise _refusal(f"less than {MIN_RATE} bytes per second") from None

        def close(self) -> None:
            watchdog.stop()
            stream.close()

    return LimitedStream()


def _library_of(part: object) -> Any:
    """Return the library of a request or stream: httpx2 for huggingface_hub 2, httpx for 1."""
    return sys.modules[type(part).__module__.partition(".")[0]]


def _refusal(problem: str) -> BackboneError:
    return BackboneError(
        f"the hub's answer is refused: {problem}",
        hint="check HF_ENDPOINT; the hub is broken or hostile",
    )
