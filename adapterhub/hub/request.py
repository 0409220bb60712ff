"""Requests: their visitor, repository and body, and the responses to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import anyio
import anyio.to_thread
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from adapterhub.files.schema import json_depth
from adapterhub.hub.accounts import (
    COOKIE,
    READ,
    Visitor,
    namespace_of,
    session_visitor,
    visitor_of,
    visitor_of_proxy,
)
from adapterhub.hub.database import write_audit
from adapterhub.hub.gate import CheckedFiles, NamespaceRules, changing, parse_rules
from adapterhub.hub.repositories import HubRepository, find_repository, missing, visible_repository
from adapterhub.hub.state import Hub
from adapterhub.web.connections import is_among
from adapterhub.web.errors import (
    HubRefusal,
    UnknownTokenError,
)
from adapterhub.web.frame import WebCall

if TYPE_CHECKING:
    from adapterhub.hub.mirror import Mirror

OPEN, TOKEN, PAGE = "", "token", "page"
"""The access that an endpoint requires in addition to roles: none, any token, or its own check."""
_MOST_DEPTH = 16
_MOST_REMEMBERED = 20_000
THREADS: ContextVar[anyio.CapacityLimiter | None] = ContextVar("threads", default=None)
"""The threads in which a request is handled; None for the threads of readers."""
TYPE = "{type:models|datasets|spaces}"
REPOSITORY = f"/api/{TYPE}/{{owner}}/{{name}}"
"""The path of a repository, the prefix of most of the Hub's protocol."""
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@dataclass(kw_only=True)
class HubCall(WebCall):
    """A request.

    Attributes:
        hub: the hub that it is for.
        mirror: the mirror of the hub's upstream.
        base: the address that the client uses, without a trailing slash.
        path: the quoted path of the request, without the hub's prefix.
        address: the address of the sender, as far back as configured proxies vouch for it.
        visitor: the sender.
        found: the target of the request.
    """

    hub: Hub
    mirror: Mirror
    base: str
    path: str
    address: str
    visitor: Visitor = field(default_factory=Visitor)
    found: HubRepository | None = None

    @property
    def repository(self) -> HubRepository:
        """The repository in the path."""
        assert self.found is not None
        return self.found

    @property
    def key(self) -> Hashable:
        """A key of everything that determines the visitor, the repository and the needed role."""
        headers, values = self.request.headers, self.values
        place = (values.get("type", values.get("kind")), values.get("owner"), values.get("name"))
        known = (headers.get("authorization"), headers.get("cookie"), self._named_user())
        return ("admitted", self.endpoint.role, self.request.method, *place, *known)

    def identify(self) -> tuple[Visitor, HubRepository | None]:
        """Identify the visitor and the repository in the path.

        Raises:
            HubRefusal: the token is unknown, or does not permit the request.
        """
        needs, values = self.endpoint.role, self.values
        with self.hub.database.reading() as connection:
            self.visitor = visitor = self._visitor(connection)
            if "owner" not in values:
                return visitor, None
            return visitor, visible_repository(
                connection,
                values.get("type", values.get("kind", "models")),
                f"{values['owner']}/{values['name']}",
                visitor,
                READ if needs == TOKEN else needs,
                open_reading=self.hub.options.open_reading,
                was_named=True,
            )

    def _visitor(self, connection: Connection) -> Visitor:
        """Return the visitor, by token, by login cookie, or by a trusted proxy's header."""
        kind, _, token = self.request.headers.get("authorization", "").partition(" ")
        if kind:
            visitor = None
            if kind.lower() == "bearer":
                visitor = visitor_of(connection, token.strip(), operator=self.hub.operator)
            if visitor is None:
                raise UnknownTokenError
            return visitor
        if self.request.method in ("GET", "HEAD"):
            if user := self._named_user():
                return visitor_of_proxy(connection, user)
            if cookie := self.request.cookies.get(COOKIE):
                return session_visitor(connection, cookie)
        return Visitor()

    def _named_user(self) -> str:
        """Return the user named by a trusted proxy."""
        options = self.hub.options
        if options.user_header and is_among(self.peer, options.proxies):
            return self.request.headers.get(options.user_header, "")
        return ""

    @property
    def prefix(self) -> str:
        """The path prefix of the hub."""
        return "/".join(["", *self.base.split("/")[3:]]).rstrip("/")

    @property
    def peer(self) -> str:
        """The address at the other end of the connection."""
        return peer_of(self.request)

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The body as an object; any other body is refused."""
        return json_fields(self.raw_body or b"{}", "the body", _MOST_DEPTH)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text field of the body.

        Raises:
            HubRefusal: it is missing and has no default, or it is not a text.
        """
        value = self.fields.get(name)
        if value is None:
            value = default
        if not isinstance(value, str):
            raise HubRefusal(f"the body has no text {name!r}")
        return value

    def query(self, name: str) -> str:
        """Return the last value of a query parameter; "" if it is missing."""
        return self.request.query_params.get(name, "")

    def is_asked(self, name: str) -> bool:
        """Return whether a query parameter is true."""
        return self.query(name).lower() in ("true", "1")

    def current(self, connection: Connection) -> HubRepository:
        """Return the current state of the repository in a transaction that writes.

        Raises:
            MissingRepositoryError: it was deleted or moved meanwhile.
        """
        repository = find_repository(connection, self.repository.type, self.repository.name)
        if repository is None or repository.id != self.repository.id:
            raise missing(self.repository.name, self.visitor)
        return repository

    def rules(self, connection: Connection) -> NamespaceRules:
        """Return the rules of the repository's namespace."""
        return parse_rules(namespace_of(connection, self.repository.namespace).rules)

    def changing(self, checked: CheckedFiles | None = None) -> AbstractContextManager[Connection]:
        """Return the transaction in which this call changes downloadable data."""
        return changing(self.hub, self.visitor, checked)

    def note(self, connection: Connection, action: str, target: str) -> None:
        """Write to the audit log, in the transaction of the action."""
        write_audit(connection, self.visitor.user, self.visitor.token, action, target, self.address)

    async def remembered(self, key: Hashable, read: Callable[[], _Result]) -> _Result:
        """Return the cached result of `read`, or run it in a thread after a write."""
        database = self.hub.database
        results = await in_thread(database.unchanged) if database.waits else database.unchanged()
        if key in results:
            result: _Result = results[key]
            return result
        value = await in_thread(read)
        if len(results) < _MOST_REMEMBERED:
            results[key] = value
        return value


def peer_of(request: Request) -> str:
    """Return the address at the other end of a connection."""
    return request.client.host if request.client else ""


async def in_thread(
    work: Callable[_Parameters, _Result],
    *args: _Parameters.args,
    **options: _Parameters.kwargs,
) -> _Result:
    """Run work that waits for the disk in a thread, so that other requests proceed."""
    return await anyio.to_thread.run_sync(partial(work, *args, **options), limiter=THREADS.get())


def json_fields(data: bytes, name: str, depth: int) -> dict[str, Any]:
    """Parse a JSON object from a client; `name` describes it in errors.

    Raises:
        HubRefusal: it is not a JSON object, or is nested too deeply.
    """
    if json_depth(data) > depth:
        raise HubRefusal(f"{name} is nested too deep")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise HubRefusal(f"{name} is not JSON in UTF-8") from None
    if not isinstance(fields, dict):
        raise HubRefusal(f"{name} is not an object of JSON")
    return fields


def json_answer(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Response(
        text.encode("utf-8", "replace"), status, dict(headers or {}), "application/json"
    )


def redirect(call: HubCall, path: str, status: int = 303) -> Response:
    """Return a redirect to a path of this hub."""
    return Response(b"", status, {"location": f"{call.prefix}{path}"})


def listed_answer(call: HubCall, items: list[Any], offset: int, limit: int) -> Response:
    """Return a page of a list; `items` has one extra item if there is a next page."""
    headers = {}
    if len(items) > limit:
        url = call.request.url.include_query_params(cursor=str(offset + limit))
        headers["link"] = f'<{call.base}{call.path}?{url.query}>; rel="next"'
    return json_answer(items[:limit], headers=headers)


def part_of_list(call: HubCall, usual: int, most: int) -> tuple[int, int]:
    """Return the offset and the limit of a list from the query parameters."""
    limit, cursor = call.query("limit"), call.query("cursor")
    size = min(int(limit[:9]), most) if limit.isdecimal() and int(limit[:9]) else usual
    return (int(cursor[:9]) if cursor.isdecimal() else 0), size
