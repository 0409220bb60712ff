"""Framework of our servers: endpoints, and the steps of a request from its path to its response.

A server consists of a list of endpoints and a subclass of `WebFrame` that implements the steps.
`WebFrame.__call__` runs them in order:

 1. `find` matches the path to an endpoint, and extracts the parts of the path.
 2. `admit` authenticates and authorizes the client, before any of the body is read.
 3. `read` reads the body, within limits on size and time.
 4. `answer` returns the result of the endpoint's function.
 5. `refused` converts an error in any of these steps to a response.
 6. `complete` adds the headers of every response; then the response is sent.
 7. `count` counts the request, and a line is logged.

The log line never contains texts, tokens, or other values that a client chooses freely. It shows
the path of the endpoint, and a trace id only if that is well-formed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from html import unescape
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adapterhub.web.errors import LargeBodyError, SlowError

if TYPE_CHECKING:
    from pydantic import BaseModel

log = logging.getLogger("adapterhub.requests")
SECURE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"same-origin"),
)
"""Headers of every response, as bytes."""
LEFT = 499  # status in metrics and logs of a request whose client disconnected
UNKNOWN = "unknown"  # path in metrics and logs of a request that matches no endpoint
PIECE = 256 << 10  # bytes of a body per piece
PIECE_SECONDS = 30.0  # seconds for a piece of a body to arrive
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_PART = re.compile(r"\{(\w+)(?::([^}]+))?\}")
_POLICY = re.compile('http-equiv="Content-Security-Policy" content="([^"]*)"')
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_WATCHED_AFTER = 0.02  # seconds
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Endpoint:
    """One endpoint; routes, limits, metrics and descriptions are derived from a list of these.

    Attributes:
        methods: HTTP methods, separated by spaces.
        path: the path, with the names of its parts in braces: `{name}` is one part, `{name:path}`
            any number of them, `{name:one|other}` one of these words.
        answer: the function that answers a call.
        role: the role that a client needs; "": none.
        body: the maximum size of the body in bytes; None: the server's default.
        reads_itself: whether `answer` reads the body as it arrives.
        summary: a one-line description.
        request: the model of the body; None: the body is empty, or `read` reads it.
        response: the model of the response; None: another media type.
        tags: the chapter in the documentation.
        example: returns an example body for an adapter; None if the adapter does not fit.
        while_starting: whether it answers while the server starts and shuts down.
        read: reads a body that is not plain JSON; None: the body has the class `request`.
        shown: the path without the patterns of its parts.
        pattern: the regular expression of the path.
    """

    methods: str
    path: str
    answer: Callable[[Any], Any]
    role: str = "predict"
    body: int | None = None
    reads_itself: bool = False
    summary: str = ""
    request: type[BaseModel] | None = None
    response: type[BaseModel] | None = None
    tags: tuple[str, ...] = ()
    example: Callable[[Any], dict[str, Any] | None] | None = None
    while_starting: bool = False
    read: Callable[[Any], BaseModel] | None = None
    shown: str = field(init=False, compare=False)
    pattern: re.Pattern[str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        def part(match: re.Match[str]) -> str:
            form = {None: "[^/]+", "path": ".*"}.get(match[2], match[2])
            return f"(?P<{match[1]}>{form})"

        object.__setattr__(self, "shown", _PART.sub(r"{\1}", self.path))
        object.__setattr__(self, "pattern", re.compile(_PART.sub(part, self.path)))

    @property
    def parts(self) -> list[str]:
        """The names of the parts of the path."""
        return [name for name, _ in _PART.findall(self.path)]


def match_endpoint(
    endpoints: Iterable[Endpoint], method: str, path: str
) -> tuple[Endpoint | None, dict[str, str], set[str]]:
    """Return the first endpoint for a path and method, the parts of the path, and the methods.

    If no endpoint matches, the methods are the ones that the path accepts.
    """
    methods: set[str] = set()
    for each in endpoints:
        match = each.pattern.fullmatch(path)
        if match is not None:
            methods.update(each.methods.split())
            if method in each.methods.split():
                return each, match.groupdict(), methods
    return None, {}, methods


@dataclass(kw_only=True)
class WebCall:
    """A request to an endpoint.

    Attributes:
        request: the request object of starlette.
        endpoint: the requested endpoint.
        values: the parts of the path.
        raw_body: the bytes of the body.
        began: the arrival time of the request.
        at_end: functions to call when the response was sent, or the client has left.
    """

    request: Request
    endpoint: Endpoint
    values: Mapping[str, str] = field(default_factory=dict)
    raw_body: bytes = b""
    began: float = field(default_factory=time.perf_counter)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    _leaving: asyncio.Task[None] | None = None
    _watching: asyncio.TimerHandle | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the request."""
        return self.request.headers

    async def read_body(self, most: int, seconds: float | None = None) -> bytes:
        """Read the body.

        Args:
            most: the maximum size in bytes.
            seconds: the timeout for the whole body; None: the timeout of `pieces`.

        Raises:
            LargeBodyError: the body is larger, by its header or by the bytes received.
            SlowError: the body does not arrive in time.
        """
        try:
            with anyio.fail_after(seconds):
                return b"".join([piece async for piece in self.pieces(most)])
        except TimeoutError:
            raise SlowError("the body did not arrive in time") from None

    async def pieces(self, most: int | None = None) -> AsyncIterator[bytes]:
        """Yield the body in pieces of a quarter of a mebibyte.

        Raises:
            LargeBodyError: the body has more bytes than `most`.
            SlowError: a piece does not arrive in time.
        """
        length = self.headers.get("content-length", "")
        if most is not None and length.isdecimal() and int(length[:20]) > most:
            raise LargeBodyError(most)
        size, stream = 0, self.request.stream()
        while held := await _piece(stream, PIECE if most is None else min(PIECE, most + 1)):
            size += len(held)
            if most is not None and size > most:
                raise LargeBodyError(most)
            yield held

    @property
    def has_left(self) -> bool:
        """Whether the client has closed its connection."""
        return self._leaving is not None and self._leaving.done()

    def watch(self) -> None:
        """Cancel this task when the client closes its connection.

        Most requests are answered before the first check.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()

        async def cancel_when_left() -> None:
            while (await self.request.receive())["type"] != "http.disconnect":
                pass
            if task is not None:
                task.cancel()

        def begin() -> None:
            self._leaving = loop.create_task(cancel_when_left())

        self._watching = loop.call_later(_WATCHED_AFTER, begin)

    def end(self) -> None:
        """Stop watching the connection, and call the functions of `at_end`."""
        for waiting in (self._watching, self._leaving):
            if waiting is not None:
                waiting.cancel()
        for each in self.at_end:
            each()


async def _piece(stream: AsyncIterator[bytes], size: int) -> bytes:
    """Return the next piece of a body, or the rest; b"" at the end."""
    held = bytearray()
    try:
        with anyio.fail_after(PIECE_SECONDS):
            async for chunk in stream:
                held += chunk
                if len(held) >= size:
                    break
    except TimeoutError:
        raise SlowError("the body did not arrive in time") from None
    return bytes(held)


C = TypeVar("C", bound=WebCall)


class WebFrame(ABC, Generic[C]):
    """ASGI application that runs the steps of a request; subclasses implement the steps."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, count and log a request, or handle the server's startup and shutdown."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        began, status, request = time.perf_counter(), LEFT, Request(scope, receive)
        call: C | None = None
        try:
            try:
                call = self.find(request)
                response = await self._walk(call)
            except ClientDisconnect:
                raise
            except Exception as error:
                response = self.refused(request, call, error)
            self.complete(call, response)
            await response(scope, receive, send)
            status = response.status_code
        except ClientDisconnect:
            pass  # the client has disconnected
        except asyncio.CancelledError:
            if call is None or not call.has_left:
                raise
        finally:
            if call is not None:
                call.end()
            self._note(request, call, status, time.perf_counter() - began)

    async def _walk(self, call: C) -> Response:
        early = await self.admit(call)
        if early is not None:
            return early
        if not call.endpoint.reads_itself:
            call.raw_body = await self.read(call)
        return await self.answer(call)

    @abstractmethod
    def find(self, request: Request) -> C:
        """Return the call for a request.

        Raises:
            AdapterhubError: no endpoint matches.
        """

    @abstractmethod
    async def admit(self, call: C) -> Response | None:
        """Reject a request, or answer it, before its body is read.

        Raises:
            AdapterhubError: the request is rejected.
        """

    @abstractmethod
    async def read(self, call: C) -> bytes:
        """Read the body of a request."""

    @abstractmethod
    async def answer(self, call: C) -> Response:
        """Return the result of the endpoint's function."""

    @abstractmethod
    def refused(self, request: Request, call: C | None, error: Exception) -> Response:
        """Return an error as a response."""

    def complete(self, call: C | None, response: Response) -> None:
        """Add the headers of every response."""
        known = {name for name, _ in response.raw_headers}
        response.raw_headers.extend(pair for pair in SECURE_HEADERS if pair[0] not in known)

    @abstractmethod
    def count(self, method: str, call: C | None, status: int, seconds: float) -> None:
        """Count a request that was answered."""

    def log_facts(self, call: C) -> dict[str, Any]:
        """Return the fields of the log line in addition to path and status."""
        return {}

    async def start(self) -> None:
        """Run at the server's startup."""

    async def stop(self) -> None:
        """Run at the server's shutdown."""

    def _note(self, request: Request, call: C | None, status: int, seconds: float) -> None:
        method = request.method if request.method in _METHODS else UNKNOWN
        self.count(method, call, status, seconds)
        if log.isEnabledFor(logging.INFO):
            facts = {
                "method": method,
                "path": call.endpoint.shown if call else UNKNOWN,
                "status": status,
                "ms": round(1000 * seconds, 2),
                **(self.log_facts(call) if call else {}),
                "trace": trace_of(request.headers.get("traceparent")),
            }
            known = {name: value for name, value in facts.items() if value not in ("", None)}
            log.info("%s", json.dumps(known))

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})


class RequestMetrics:
    """Counters of requests by endpoint and status, and their durations, for Prometheus.

    Args:
        prefix: the start of the names.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.registry = CollectorRegistry()
        labels = ("method", "path", "status")
        self._requests = Counter(
            f"{prefix}_requests",
            "Requests that were answered.",
            labels,
            registry=self.registry,
        )
        self._seconds = Histogram(
            f"{prefix}_request_seconds",
            "Time to an answer.",
            registry=self.registry,
            buckets=_BOUNDS,
        )

    def observe(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(method, path, str(status)).inc()
        self._seconds.observe(seconds)

    def text(self, gauges: Mapping[str, int]) -> bytes:
        """Return all metrics as text, including some figures of the server."""
        shown = CollectorRegistry()
        shown.register(self.registry)
        for name, value in gauges.items():
            Gauge(f"{self.prefix}_{name}", name.replace("_", " "), registry=shown).set(value)
        return generate_latest(shown)


def trace_of(traceparent: str | None) -> str:
    """Return the trace id in a header of the W3C trace context, or ""."""
    match = _TRACE.fullmatch(traceparent) if traceparent else None
    return match[1] if match else ""


def place_of(error: Exception) -> str:
    """Return the class of an unexpected error, and the place where it was raised.

    The message is left out, because it may quote the client's data.
    """
    trace = "".join(traceback.format_tb(error.__traceback__))
    return f"{type(error).__name__}\n{trace}"


def page_response(page: str, status: int = 200) -> Response:
    """Return one of our pages, with its security policy in a header that also forbids frames."""
    policy = _POLICY.search(page)
    assert policy is not None, "each page has a policy: pages/head.html"
    headers = {"content-security-policy": f"{unescape(policy[1])}; frame-ancestors 'none'"}
    data = page.encode("utf-8", "replace")
    return Response(data, status, headers, "text/html; charset=utf-8")
