"""Check the responses of a hub before huggingface_hub uses them.

huggingface_hub joins the ETag of a response to its cache path, so a hostile hub can make it write
and read files anywhere. It also does not limit the size and duration of responses, prints headers,
and sends the token to every known hub. Inside `guarded_hub`, its session has two hooks that prevent
this. Commits, hashes and file names are also checked, wherever they are used.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any
from urllib.parse import urljoin, urlsplit

from huggingface_hub import constants
from huggingface_hub.utils import _http as hub_http

from adapterhub.backbones.hub_network import (
    COMMIT,
    MIN_RATE,
    SHA256,
    ForbiddenAddressError,
    HubNetwork,
    UnusableProxyError,
    Watchdog,
    redirect_target,
    url_origin,
    usable_proxies,
)
from adapterhub.errors import BackboneError

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
    return location is not None and _same(redirect_target(url, location), url)


def _check_routes(response: Any, network: HubNetwork) -> None:
    """Refuse redirects and next pages to forbidden URLs; drop Xet if its tokens are elsewhere."""
    url = str(response.request.url)
    try:
        if location := response.headers.get("location"):
            network.check(redirect_target(url, location))
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
                for chunk in stream:
                    watchdog.received += len(chunk)
                    if limit is not None and watchdog.received > limit:
                        raise _refusal(f"more than {limit} bytes")
                    yield chunk
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
