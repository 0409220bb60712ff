"""The frame of our servers: endpoints, and the walk of a request from its path to its answer.

A server is a list of endpoints and a `WebFrame`, whose methods are the steps that servers fill in.
The walk is `WebFrame.__call__`:

 1. `find`: the endpoint of the path, and the parts of the path.
 2. `admit`: who sends the request, and whether they may. Nothing of the body is read before.
 3. `read`: the body, within its size and its time.
 4. `answer`: what the function of the endpoint returns.
 5. `refused`: an error of any of these steps is an answer, too.
 6. `complete`: the headers that every answer has; then the answer is sent.
 7. `count`, and the line of the log.

That line has no text, no token, and nothing else that a client chooses freely: the path is that of
the endpoint, and an id of a trace is in it only if it has the form of one.
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
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adapterhub.errors import ServingError

if TYPE_CHECKING:
    from pydantic import BaseModel

log = logging.getLogger("adapterhub.requests")
SECURE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"same-origin"),
)
"""What every answer has, as bytes."""
LEFT = 499  # the status of a request whose client has left, in metrics and logs
UNKNOWN = "unknown"  # the path of a request to no endpoint, in metrics and logs
PIECE = 256 << 10  # bytes of a body that are handed on at once
PIECE_SECONDS = 30.0  # that a piece of a body, or the rest of it, may take to come
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_PART = re.compile(r"\{(\w+)(?::([^}]+))?\}")
_POLICY = re.compile('http-equiv="Content-Security-Policy" content="([^"]*)"')
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_WATCHED_AFTER = 0.02  # seconds


class LimitError(ServingError):
    """A request is larger than the server takes."""


class SlowError(ServingError):
    """The body of a request does not come in time."""


class LargeBodyError(LimitError):
    """A body has more bytes than it may have.

    Attributes:
        most: the bytes that it may have.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        super().__init__("the body is too large", expected=f"at most {most:,} bytes")


@dataclass(frozen=True)
class Endpoint:
    """One path: routes, limits, metrics and descriptions are made of a list of these.

    Attributes:
        methods: of HTTP, with spaces between them.
        path: with the names of its parts in braces: `{name}` is one part, `{name:path}` any number
            of them, `{name:one|other}` one of these words.
        answer: the function that answers a call.
        role: what a client must be allowed; "": anybody is.
        body: the bytes of the largest body; None: as many as the server takes elsewhere.
        reads_itself: whether `answer` reads the body, as it comes.
        summary: what it does, in one line.
        request: the form of the body; None: it has none, or one that `read` reads.
        response: the form of the answer; None: another media type.
        tags: its chapter in the documentation.
        example: returns a body for an adapter, for the documentation; None where it does not fit.
        while_starting: whether it answers before the server is ready, and while it leaves.
        read: reads a body that is more than JSON; None: it is of the class `request`.
        shown: the path without the forms of its parts.
        pattern: what matches the path.
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
    """Return the first endpoint of a path and a method, the parts of the path, and its methods.

    Without an endpoint, the methods are those that the path has.
    """
    methods: set[str] = set()
    for each in endpoints:
        found = each.pattern.fullmatch(path)
        if found is not None:
            methods.update(each.methods.split())
            if method in each.methods.split():
                return each, found.groupdict(), methods
    return None, {}, methods


@dataclass(kw_only=True)
class WebCall:
    """One request to an endpoint.

    Attributes:
        request: as starlette has it.
        endpoint: what is requested.
        values: the parts of the path.
        raw_body: the bytes of the body.
        began: when it came.
    """

    request: Request
    endpoint: Endpoint
    values: Mapping[str, str] = field(default_factory=dict)
    raw_body: bytes = b""
    began: float = field(default_factory=time.perf_counter)
    _leaving: asyncio.Task[None] | None = None
    _watching: asyncio.TimerHandle | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the request."""
        return self.request.headers

    async def read_body(self, most: int, seconds: float | None = None) -> bytes:
        """Read the body.

        Args:
            most: the bytes that it may have.
            seconds: that all of it may take to come; None: as `pieces` says.

        Raises:
            LargeBodyError: it has more bytes, as its head says, or as they come.
            SlowError: it does not come in time.
        """
        try:
            with anyio.fail_after(seconds):
                return b"".join([piece async for piece in self.pieces(most)])
        except TimeoutError:
            raise SlowError("the body does not come in time") from None

    async def pieces(self, most: int | None = None) -> AsyncIterator[bytes]:
        """Yield the body in pieces of a quarter of a mebibyte.

        Raises:
            LargeBodyError: it has more bytes than `most`.
            SlowError: a piece does not come in time.
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
        """Cancel this task when the client has closed its connection.

        Most requests are answered before that is looked at.
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
        """Watch no more."""
        for waiting in (self._watching, self._leaving):
            if waiting is not None:
                waiting.cancel()


async def _piece(stream: AsyncIterator[bytes], size: int) -> bytes:
    """Return the next piece of a body, or its rest; b"" at its end."""
    held = bytearray()
    try:
        with anyio.fail_after(PIECE_SECONDS):
            async for chunk in stream:
                held += chunk
                if len(held) >= size:
                    break
    except TimeoutError:
        raise SlowError("the body does not come in time") from None
    return bytes(held)


C = TypeVar("C", bound=WebCall)


class WebFrame(ABC, Generic[C]):
    """An ASGI application: the walk of a request, of which a server fills in the steps."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and count and log it; or start and stop with the server."""
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
            pass  # there is nobody to answer
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
        """Return the call of an endpoint that a request is.

        Raises:
            AdapterhubError: there is no such endpoint.
        """

    @abstractmethod
    async def admit(self, call: C) -> Response | None:
        """Refuse a request before its body is read, or answer it already.

        Raises:
            AdapterhubError: it is refused.
        """

    @abstractmethod
    async def read(self, call: C) -> bytes:
        """Read the body of a request."""

    @abstractmethod
    async def answer(self, call: C) -> Response:
        """Return what the function of an endpoint answers."""

    @abstractmethod
    def refused(self, request: Request, call: C | None, error: Exception) -> Response:
        """Return an error as an answer."""

    def complete(self, call: C | None, response: Response) -> None:
        """Add the headers that every answer has."""
        known = {name for name, _ in response.raw_headers}
        response.raw_headers.extend(pair for pair in SECURE_HEADERS if pair[0] not in known)

    @abstractmethod
    def count(self, method: str, call: C | None, status: int, seconds: float) -> None:
        """Count a request that was answered."""

    def log_facts(self, call: C) -> dict[str, Any]:
        """Return what the line of a request has besides its path and status."""
        return {}

    async def start(self) -> None:
        """Begin with the server."""

    async def stop(self) -> None:
        """End with the server."""

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


def trace_of(traceparent: str | None) -> str:
    """Return the id of a trace in a header of W3C's trace context, or ""."""
    found = _TRACE.fullmatch(traceparent) if traceparent else None
    return found[1] if found else ""


def place_of(error: Exception) -> str:
    """Return the class of an unexpected error, and where it was raised.

    Its words are left out: they may quote what a client has sent.
    """
    where = "".join(traceback.format_tb(error.__traceback__))
    return f"{type(error).__name__}\n{where}"


def page_response(page: str, status: int = 200) -> Response:
    """Return a page of ours, with its own policy as a header, which also forbids frames."""
    policy = _POLICY.search(page)
    assert policy is not None, "each page has a policy: pages/head.html"
    headers = {"content-security-policy": f"{unescape(policy[1])}; frame-ancestors 'none'"}
    data = page.encode("utf-8", "replace")
    return Response(data, status, headers, "text/html; charset=utf-8")
