"""A request on its way: who asks, for which repository, with which body; and how it is answered."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import unquote_to_bytes

import anyio
import anyio.to_thread
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from adapterhub.errors import one_line
from adapterhub.files.schema import json_depth
from adapterhub.hub.accounts import READ, Visitor, namespace_of
from adapterhub.hub.content_policy import NamespaceRules, parse_rules
from adapterhub.hub.errors import (
    HubRefusal,
    MissingRepositoryError,
    SlowBodyError,
    TooManyBytesError,
)
from adapterhub.hub.gate import CheckedFiles, changing
from adapterhub.hub.repositories import HubRepository, find_repository, missing
from adapterhub.hub.state import Hub
from adapterhub.web.connections import client_address

if TYPE_CHECKING:
    from adapterhub.hub.mirror import Mirror

OPEN, TOKEN, PAGE = "", "token", "page"
"""What an endpoint needs, besides the roles: nothing at all, any token, or what it says itself."""
_MOST_DEPTH = 16
_MOST_REMEMBERED = 20_000
_PIECE = 256 << 10
PIECE_SECONDS = 30.0  # that a piece of a body, or the rest of it, may take to come
THREADS: ContextVar[anyio.CapacityLimiter | None] = ContextVar("threads", default=None)
"""The threads in which a request is answered; None for those of readers."""
_PARTS = {
    "type": "models|datasets|spaces",
    "kind": "datasets|spaces",
    "rest": ".*",
}
_OF_REPOSITORY = re.compile(
    r"/api/(models|datasets|spaces)/[^/]+/"
    r"(?!tree/|revision/|commits?/|refs$|paths-info/|preupload/|tag/|branch/|resolve/)[^/]+/."
)
"""What is asked of OWNER/NAME; a client may also leave the owner out."""
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class HubRoute:
    """An endpoint.

    Attributes:
        methods: of HTTP, with spaces.
        path: its path, with names in braces for parts of it.
        answer: answers a call, in a thread; or a coroutine, which reads the body itself.
        needs: a role in the repository or `OPEN` or `TOKEN`.
        body: the bytes of the largest body; 0 for none.
        reads_itself: whether `answer` is a coroutine.
        pattern: compiled from the path.
    """

    methods: str
    path: str
    answer: Callable[[HubCall], Any]
    needs: str
    body: int = 0
    reads_itself: bool = False
    pattern: re.Pattern[str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        def part(match: re.Match[str]) -> str:
            return f"(?P<{match[1]}>{_PARTS.get(match[1], '[^/]+')})"

        object.__setattr__(self, "pattern", re.compile(re.sub(r"\{(\w+)\}", part, self.path)))

    @property
    def writes(self) -> bool:
        """Whether it changes the hub, and so waits for others who do."""
        return self.needs != READ and not {"GET", "HEAD"} & {*self.methods.split()}


@dataclass
class HubCall:
    """A request.

    Attributes:
        hub: the hub that it is for.
        mirror: what it keeps of its upstream.
        request: as it came.
        base: the address that the client asks by, without a slash at the end.
        path: of the request, without the prefix that the hub is at, and as it was quoted.
        route: its endpoint.
        values: the parts of the path, not quoted any more.
        visitor: who sends it.
        repository: what it is about.
        body: its body.
    """

    hub: Hub
    mirror: Mirror
    request: Request
    base: str
    path: str
    route: HubRoute
    values: Mapping[str, str]
    visitor: Visitor = field(default_factory=Visitor)
    found: HubRepository | None = None
    body: bytes = b""

    @property
    def repository(self) -> HubRepository:
        """The repository in the path."""
        assert self.found is not None
        return self.found

    @cached_property
    def address(self) -> str:
        """The address of who sends it, as far back as configured proxies vouch for it."""
        headers = self.request.headers.getlist("x-forwarded-for")
        return client_address(self.peer, headers, self.hub.options.proxies)

    @property
    def prefix(self) -> str:
        """The path at which the hub is."""
        return "/".join(["", *self.base.split("/")[3:]]).rstrip("/")

    @property
    def peer(self) -> str:
        """The address at the other end of the connection."""
        return self.request.client.host if self.request.client else ""

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The body as an object; it is refused if it is none."""
        return json_fields(self.body or b"{}", "the body", _MOST_DEPTH)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text of the body.

        Raises:
            HubRefusal: it is missing, and there is no default, or it is no text.
        """
        value = self.fields.get(name)
        if value is None:
            value = default
        if not isinstance(value, str):
            raise HubRefusal(f"the body has no text {name!r}")
        return value

    def query(self, name: str) -> str:
        """Return the last value of a parameter; "" without one."""
        return self.request.query_params.get(name, "")

    def is_asked(self, name: str) -> bool:
        """Return whether a parameter is true."""
        return self.query(name).lower() in ("true", "1")

    def current(self, connection: Connection) -> HubRepository:
        """Return the repository as it is in a transaction that writes.

        Raises:
            MissingRepositoryError: it was deleted or moved meanwhile.
        """
        found = find_repository(connection, self.repository.type, self.repository.name)
        if found is None or found.id != self.repository.id:
            raise missing(self.repository.name, self.visitor)
        return found

    def rules(self, connection: Connection) -> NamespaceRules:
        """Return the rules of the repository's namespace."""
        return parse_rules(namespace_of(connection, self.repository.namespace).rules)

    def changing(self, checked: CheckedFiles | None = None) -> AbstractContextManager[Connection]:
        """Return the transaction in which this call changes what can be downloaded."""
        return changing(self.hub, self.visitor, checked)

    def note(self, connection: Connection, action: str, target: str) -> None:
        """Write to the audit log, in the transaction that does it."""
        self.hub.note_action(connection, self.visitor, action, target, self.address)

    async def remembered(self, key: Hashable, read: Callable[[], _Result]) -> _Result:
        """Return what `read` returns; in a thread, unless it is known and nobody has written."""
        database = self.hub.database
        known = await in_thread(database.unchanged) if database.waits else database.unchanged()
        if key in known:
            found: _Result = known[key]
            return found
        value = await in_thread(read)
        if len(known) < _MOST_REMEMBERED:
            known[key] = value
        return value

    async def read_body(self, most: int) -> bytes:
        """Read the body.

        Raises:
            TooManyBytesError: it has more bytes, as its head says, or as they come.
            SlowBodyError: it does not come in time.
        """
        return b"".join([piece async for piece in self.pieces(most)])

    async def pieces(self, most: int | None = None) -> AsyncIterator[bytes]:
        """Yield the body in pieces of a quarter of a mebibyte.

        Raises:
            TooManyBytesError: it has more bytes than `most`.
            SlowBodyError: a piece does not come in time.
        """
        length = self.request.headers.get("content-length", "")
        too_large = TooManyBytesError(f"the body has more than {most or 0:,} bytes")
        if most is not None and length.isdecimal() and int(length[:20]) > most:
            raise too_large
        size, stream = 0, self.request.stream()
        while held := await _piece(stream):
            size += len(held)
            if most is not None and size > most:
                raise too_large
            yield held


async def _piece(stream: AsyncIterator[bytes]) -> bytes:
    """Return the next piece of a body, or its rest; b"" at its end."""
    held = bytearray()
    try:
        with anyio.fail_after(PIECE_SECONDS):
            async for chunk in stream:
                held += chunk
                if len(held) >= _PIECE:
                    break
    except TimeoutError:
        raise SlowBodyError from None
    return bytes(held)


async def in_thread(
    work: Callable[_Parameters, _Result],
    *args: _Parameters.args,
    **options: _Parameters.kwargs,
) -> _Result:
    """Do work that waits for the disk in a thread, while others are answered."""
    return await anyio.to_thread.run_sync(partial(work, *args, **options), limiter=THREADS.get())


def json_fields(data: bytes, name: str, depth: int) -> dict[str, Any]:
    """Return the object of JSON that a client sends; `name` says what it is.

    Raises:
        HubRefusal: it is none, or is nested deeper.
    """
    if json_depth(data) > depth:
        raise HubRefusal(f"{name} is nested too deep")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise HubRefusal(f"{name} is not JSON in UTF-8") from None
    if not isinstance(found, dict):
        raise HubRefusal(f"{name} is not an object of JSON")
    return found


def unquoted(part: str) -> str:
    """Return a part of a path as its text.

    Raises:
        HubRefusal: it is not UTF-8, or has a control character.
    """
    try:
        found = unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise HubRefusal("the path is not UTF-8") from None
    if any(ord(c) < 32 or ord(c) == 127 for c in found):
        raise HubRefusal("the path has a control character")
    return found


def match_route(
    routes: Iterable[HubRoute], method: str, path: str
) -> tuple[HubRoute, dict[str, str]]:
    """Return the endpoint of a path as it is quoted, and the parts of the path.

    Raises:
        MissingRepositoryError: there is none, where a client asks for a repository.
        HubRefusal: there is none.
    """
    is_path = False
    for route in routes:
        found = route.pattern.fullmatch(path)
        if found is not None and path.startswith("/api/") == route.path.startswith("/api/"):
            if method in route.methods.split():
                return route, {name: unquoted(text) for name, text in found.groupdict().items()}
            is_path = True
    if is_path:
        raise HubRefusal(f"this path is not asked by {method}", status=405)
    is_own = re.match(r"/api/(?!models|datasets|spaces)", path)
    if is_own or _OF_REPOSITORY.match(path):
        raise HubRefusal(
            f"not supported here: this hub has no {method} {one_line(path, 100)}", status=501
        )
    if re.match(r"/api/(models|datasets|spaces)/[^/]+|.*/resolve/", path):
        raise MissingRepositoryError(
            "a repository has the form OWNER/NAME on this hub, as openai-community/gpt2 for gpt2; "
            "models of other hubs are found with --upstream, or without HF_ENDPOINT",
        )
    raise HubRefusal("there is nothing at this address", status=404)


def json_answer(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer in JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Response(
        text.encode("utf-8", "replace"), status, dict(headers or {}), "application/json"
    )


def redirect(call: HubCall, path: str, status: int = 303) -> Response:
    """Return the redirect to a path of this hub."""
    return Response(b"", status, {"location": f"{call.prefix}{path}"})


def listed_answer(call: HubCall, items: list[Any], offset: int, limit: int) -> Response:
    """Return a page of a list; `items` has one more than fits, if there is a next page."""
    headers = {}
    if len(items) > limit:
        url = call.request.url.include_query_params(cursor=str(offset + limit))
        headers["link"] = f'<{call.base}{call.path}?{url.query}>; rel="next"'
    return json_answer(items[:limit], headers=headers)


def part_of_list(call: HubCall, usual: int, most: int) -> tuple[int, int]:
    """Return the offset and the limit of a list, as its parameters say."""
    limit, cursor = call.query("limit"), call.query("cursor")
    size = min(int(limit[:9]), most) if limit.isdecimal() and int(limit[:9]) else usual
    return (int(cursor[:9]) if cursor.isdecimal() else 0), size
