"""A request on its way: who asks, for which repository, with which body; and how it is answered."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import unquote_to_bytes

import anyio
import anyio.to_thread
from sqlalchemy import Connection
from starlette.responses import Response

from adapterhub.errors import one_line
from adapterhub.files.schema import json_depth
from adapterhub.hub.accounts import Visitor, namespace_of
from adapterhub.hub.content_policy import NamespaceRules, parse_rules
from adapterhub.hub.errors import (
    HubRefusal,
    MissingRepositoryError,
)
from adapterhub.hub.gate import CheckedFiles, changing
from adapterhub.hub.repositories import HubRepository, find_repository, missing
from adapterhub.hub.state import Hub
from adapterhub.web.connections import client_address
from adapterhub.web.frame import Endpoint, WebCall, match_endpoint

if TYPE_CHECKING:
    from adapterhub.hub.mirror import Mirror

OPEN, TOKEN, PAGE = "", "token", "page"
"""What an endpoint needs, besides the roles: nothing at all, any token, or what it says itself."""
_MOST_DEPTH = 16
_MOST_REMEMBERED = 20_000
THREADS: ContextVar[anyio.CapacityLimiter | None] = ContextVar("threads", default=None)
"""The threads in which a request is answered; None for those of readers."""
TYPE = "{type:models|datasets|spaces}"
REPOSITORY = f"/api/{TYPE}/{{owner}}/{{name}}"
"""The path of a repository, at which most of the Hub's protocol is."""
_OF_REPOSITORY = re.compile(
    r"/api/(models|datasets|spaces)/[^/]+/"
    r"(?!tree/|revision/|commits?/|refs$|paths-info/|preupload/|tag/|branch/|resolve/)[^/]+/."
)
"""What is asked of OWNER/NAME; a client may also leave the owner out."""
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@dataclass(kw_only=True)
class HubCall(WebCall):
    """A request.

    Attributes:
        hub: the hub that it is for.
        mirror: what it keeps of its upstream.
        base: the address that the client asks by, without a slash at the end.
        path: of the request, without the prefix that the hub is at, and as it was quoted.
        visitor: who sends it.
        found: what it is about.
    """

    hub: Hub
    mirror: Mirror
    base: str
    path: str
    visitor: Visitor = field(default_factory=Visitor)
    found: HubRepository | None = None

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
        return json_fields(self.raw_body or b"{}", "the body", _MOST_DEPTH)

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


def find_endpoint(
    endpoints: Iterable[Endpoint], method: str, path: str
) -> tuple[Endpoint, dict[str, str]]:
    """Return the endpoint of a path as it is quoted, and the parts of the path.

    Raises:
        MissingRepositoryError: there is none, where a client asks for a repository.
        HubRefusal: there is none.
    """
    is_api = path.startswith("/api/")
    among = (each for each in endpoints if each.path.startswith("/api/") == is_api)
    found, values, methods = match_endpoint(among, method, path)
    if found is not None:
        return found, {name: unquoted(text) for name, text in values.items()}
    if methods:
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
