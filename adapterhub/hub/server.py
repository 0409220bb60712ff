"""The server of a hub: its sockets, and the steps from a request to the bytes of the response.

The steps are shared by all our servers (web/frame.py). `HubApp` implements them: the host name, the
endpoint, the visitor, the permissions, and the data that a mirror has to fetch.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import anyio
from starlette.requests import Request
from starlette.responses import Response

from adapterhub.errors import AdapterhubError, ConfigError, one_line
from adapterhub.hub.accounts import (
    READ,
    Visitor,
    count_tokens,
    note_use,
)
from adapterhub.hub.commit_endpoints import COMMITS
from adapterhub.hub.commits import MAIN
from adapterhub.hub.database import HubPlace
from adapterhub.hub.download_endpoints import DOWNLOADS
from adapterhub.hub.extensions import OWN
from adapterhub.hub.mirror import Mirror
from adapterhub.hub.page_endpoints import PAGES, error_page
from adapterhub.hub.read_endpoints import READS
from adapterhub.hub.readonly_registry import is_registry, viewing
from adapterhub.hub.repositories import HubRepository
from adapterhub.hub.request import (
    OPEN,
    PAGE,
    THREADS,
    HubCall,
    in_thread,
    json_answer,
    peer_of,
    redirect,
)
from adapterhub.hub.state import Hub, HubOptions, create_hub, open_hub, serving_alone
from adapterhub.hub.upload_endpoints import UPLOADS
from adapterhub.hub.write_endpoints import WRITES
from adapterhub.web.connections import (
    BACKLOG,
    ConnectionLimits,
    address_of,
    client_address,
    is_among,
    is_loopback_address,
    is_loopback_host,
    limited_protocol,
    listen,
)
from adapterhub.web.errors import (
    DeniedError,
    HubRefusal,
    LimitError,
    MissingRepositoryError,
    SlowError,
    UnknownTokenError,
    hub_body,
    refusal_of,
)
from adapterhub.web.frame import UNKNOWN, Endpoint, WebFrame, match_endpoint, place_of

log = logging.getLogger("adapterhub.hub")

ENDPOINTS: tuple[Endpoint, ...] = (
    *READS,
    *WRITES,
    *COMMITS,
    *UPLOADS,
    *DOWNLOADS,
    *OWN,
    *PAGES,
)
"""All endpoints, in order; the first match is used."""
_NOTE_SECONDS = 60.0  # between two updates of the last use of tokens
_WRITERS = 12  # threads; each may hold a connection to the database
_OF_REPOSITORY = re.compile(
    r"/api/(models|datasets|spaces)/[^/]+/"
    r"(?!tree/|revision/|commits?/|refs$|paths-info/|preupload/|tag/|branch/|resolve/)[^/]+/."
)
"""The endpoints of OWNER/NAME; a client may also omit the owner."""
_NOWHERE = Endpoint("GET", UNKNOWN, lambda call: None, OPEN)


class HubApp(WebFrame[HubCall]):
    """The web application of a hub."""

    def __init__(self, hub: Hub) -> None:
        self.hub, self.mirror = hub, Mirror(hub)
        public = urlsplit(hub.options.public_url or "")
        self._public, self._prefix = hub.options.public_url, public.path.rstrip("/")
        self._writers: anyio.CapacityLimiter | None = None  # it needs the event loop
        self._noting: asyncio.Task[None] | None = None
        self._hosts = {public.netloc.lower(), *map(str.lower, hub.options.hosts)} - {""}

    def find(self, request: Request) -> HubCall:
        """Return the host name and the endpoint of a request.

        Raises:
            HubRefusal: the hub does not have this name, or no endpoint matches.
        """
        base = self._base(request)
        raw = bytes(request.scope.get("raw_path") or request.url.path.encode())
        path = raw.split(b"?", 1)[0].decode("ascii", "replace")
        if self._prefix and (path == self._prefix or path.startswith(f"{self._prefix}/")):
            path = path[len(self._prefix) :] or "/"
        endpoint, values = find_endpoint(ENDPOINTS, request.method, path)
        return self._call(request, endpoint, values, base, path)

    def _call(
        self,
        request: Request,
        endpoint: Endpoint,
        values: Mapping[str, str],
        base: str,
        path: str,
    ) -> HubCall:
        return HubCall(
            request=request,
            endpoint=endpoint,
            values=values,
            hub=self.hub,
            mirror=self.mirror,
            base=base,
            path=path,
            address=client_address(
                peer_of(request),
                request.headers.getlist("x-forwarded-for"),
                self.hub.options.proxies,
            ),
        )

    async def admit(self, call: HubCall) -> Response | None:
        """Authenticate the visitor and check permissions; let a mirror fetch required data.

        Raises:
            HubRefusal: the request is not permitted.
        """
        role, is_read = call.endpoint.role, call.request.method in ("GET", "HEAD")
        if role != READ and not {"GET", "HEAD"} & {*call.endpoint.methods.split()}:
            THREADS.set(self._threads_of_writers())  # it waits for other writers
        if self.hub.options.is_read_only and not is_read:
            raise_if_writing(call)
        if role != OPEN:
            try:
                call.visitor, call.found = await self._admit(call)
            except UnknownTokenError:
                await in_thread(self.hub.note_failure, call.address, "token")
                raise
            self._check_visitor(call)
            if call.found and call.found.is_mirrored:
                await self.mirror.follow(call.found, call.values.get("rev", MAIN))
                call.visitor, call.found = await self._admit(call)  # it may have changed by now
        return _moved(call)

    async def read(self, call: HubCall) -> bytes:
        """Read the body if the endpoint has one."""
        return await call.read_body(call.endpoint.body) if call.endpoint.body else b""

    async def answer(self, call: HubCall) -> Response:
        """Return the response of an endpoint, in a thread unless it reads the body itself."""
        if call.endpoint.reads_itself:
            response: Response = await call.endpoint.answer(call)
            return response
        response = await in_thread(call.endpoint.answer, call)
        return response

    def refused(self, request: Request, call: HubCall | None, error: Exception) -> Response:
        """Return the response for an error: a page in a browser."""
        refusal = refusal_of(error)
        if not isinstance(error, AdapterhubError):
            log.error("%s: %s", request.method, place_of(error))
        answer, path = refused(refusal), request.url.path.removeprefix(self._prefix)
        is_shown = isinstance(error, HubRefusal | LimitError | SlowError) and (
            "text/html" in request.headers.get("accept", "")
        )
        if not is_shown or path.startswith("/api/") or refusal.status == 421:
            return answer
        call = call or self._call(request, _NOWHERE, {}, self._base(request), path)
        page = error_page(call, refusal)
        for name in ("x-error-message", "x-error-code", "retry-after"):
            if name in answer.headers:
                page.headers[name] = answer.headers[name]
        return page

    def count(self, method: str, call: HubCall | None, status: int, seconds: float) -> None:
        """Count a request by its method and path."""
        path = call.endpoint.shown if call else UNKNOWN
        self.hub.metrics.observe(method, path, status, seconds)

    def log_facts(self, call: HubCall) -> dict[str, Any]:
        """Return the user and the target of a request for the log."""
        return {
            "user": call.visitor.user,
            "token": call.visitor.token,
            "repository": call.found.name if call.found else "",
        }

    async def start(self) -> None:
        """Record the last use of tokens and copies periodically."""
        self._noting = asyncio.create_task(self._keep_noting())

    async def stop(self) -> None:
        """Record the last uses, and close the mirror."""
        if self._noting is not None:
            self._noting.cancel()
        with suppress(HubRefusal):
            await in_thread(self._note_uses)
        self.mirror.close()

    def _threads_of_writers(self) -> anyio.CapacityLimiter:
        """Return the threads for writers, so that readers do not wait behind them."""
        if self._writers is None:
            self._writers = anyio.CapacityLimiter(_WRITERS)
        return self._writers

    async def _admit(self, call: HubCall) -> tuple[Visitor, HubRepository | None]:
        """Identify the visitor and the target; a missing repository may exist upstream."""
        try:
            return await call.remembered(call.key, call.identify)
        except MissingRepositoryError:
            kind = call.values.get("type", call.values.get("kind", "models"))
            name = f"{call.values['owner']}/{call.values['name']}"
            if call.endpoint.role != READ or not await self.mirror.add(kind, name, call.visitor):
                raise
            await in_thread(self._note_mirrored, call, name)
        return await in_thread(call.identify)

    def _note_mirrored(self, call: HubCall, name: str) -> None:
        with self.hub.database.writing() as connection:
            call.note(connection, "mirror", name)

    def _check_visitor(self, call: HubCall) -> None:
        """Refuse a stranger if no repository has determined who may read it."""
        if call.visitor.token:
            self.hub.used_tokens.add(call.visitor.token)
        is_open = call.endpoint.role == READ and self.hub.options.open_reading
        if call.found or call.visitor.user or is_open or call.endpoint.role == PAGE:
            return
        raise HubRefusal(f"this needs a token of this hub: {call.base}/settings/tokens", status=401)

    def _base(self, request: Request) -> str:
        """Return the address that the client uses.

        Raises:
            HubRefusal: the address is not configured as one of this hub.
        """
        host = request.headers.get("host", "").lower()
        if host in self._hosts or is_loopback_host(host):
            return (self._public or f"{self._scheme(request)}://{host}").rstrip("/")
        raise HubRefusal(
            f"this hub is not known as {one_line(host, 100)!r}: its operator says its address with "
            "adapterhub hub start --public-url",
            status=421,
        )

    def _scheme(self, request: Request) -> str:
        """Return the scheme that the client used; a configured proxy may name it."""
        named = request.headers.get("x-forwarded-proto", "").lower()
        is_named = named in ("http", "https") and is_among(
            peer_of(request), self.hub.options.proxies
        )
        return named if is_named else request.url.scheme

    async def _keep_noting(self) -> None:
        while True:
            await asyncio.sleep(_NOTE_SECONDS)
            with suppress(HubRefusal):
                await in_thread(self._note_uses)

    def _note_uses(self) -> None:
        used, self.hub.used_tokens = sorted(self.hub.used_tokens), set()
        if used or self.mirror.has_notes:
            with self.hub.database.writing() as connection:
                note_use(connection, used)
                self.mirror.note_use(connection)


def _moved(call: HubCall) -> Response | None:
    """Return the redirect to a renamed repository, if clients follow redirects here."""
    name = f"{call.values.get('owner')}/{call.values.get('name')}"
    if call.found is None or call.found.name.casefold() == name.casefold():
        return None
    if call.request.method not in ("GET", "HEAD"):
        return None  # answered directly, since clients do not send a body again
    start, is_there, rest = call.path.partition(name)
    if not is_there:
        return None
    query = f"?{call.request.url.query}" if call.request.url.query else ""
    return redirect(call, f"{start}{call.found.name}{rest}{query}", 307)


def raise_if_writing(call: HubCall) -> None:
    """Refuse to change a registry in a folder.

    Raises:
        DeniedError: the endpoint writes.
    """
    if call.endpoint.role not in (OPEN, READ):
        raise DeniedError(
            "this hub shows a registry in a folder and changes nothing: adapterhub publish does"
        )


def refused(error: HubRefusal) -> Response:
    """Return the response for a refusal, with the headers that the Hub's clients read."""
    return json_answer(*hub_body(error))


def unquoted(part: str) -> str:
    """Decode a percent-encoded part of a path.

    Raises:
        HubRefusal: it is not UTF-8, or has a control character.
    """
    try:
        text = unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise HubRefusal("the path is not UTF-8") from None
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise HubRefusal("the path has a control character")
    return text


def find_endpoint(
    endpoints: Iterable[Endpoint], method: str, path: str
) -> tuple[Endpoint, dict[str, str]]:
    """Return the endpoint of a quoted path, and the parts of the path.

    Raises:
        MissingRepositoryError: no endpoint matches a path of a repository.
        HubRefusal: no endpoint matches.
    """
    is_api = path.startswith("/api/")
    among = (each for each in endpoints if each.path.startswith("/api/") == is_api)
    endpoint, values, methods = match_endpoint(among, method, path)
    if endpoint is not None:
        return endpoint, {name: unquoted(text) for name, text in values.items()}
    if methods:
        raise HubRefusal(f"this path does not accept {method}", status=405)
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


_WRITE_SECONDS = 60.0
_STOP_SECONDS = 20


def serve_hub(
    place: HubPlace,
    host: str,
    port: int,
    options: HubOptions,
    started: Callable[[str], object] = lambda address: None,
    blobs: str | None = None,
) -> None:
    """Create a hub, unless there is one, and serve it until the process is stopped.

    The folder of a registry is shown as a read-only hub.

    Args:
        place: a folder, or a PostgreSQL database that other processes may serve, too.
        host: the address to listen on.
        port: the port to listen on; 0 for a free one.
        options: the operator's options.
        started: receives the address when the hub is ready.
        blobs: the bucket of a new hub in a database.

    Raises:
        ConfigError: the options are not valid for this hub, or the address is in use.
    """
    import uvicorn

    check_address(options.public_url, "--public-url")
    check_address(options.upstream, "--upstream")
    check_proxies(options.proxies)
    with ExitStack() as stack:
        listening = stack.enter_context(listen(host, port))
        names = known_hosts(host, listening.getsockname()[1])
        options = replace(options, hosts=(*options.hosts, *names))
        _check_upstream(options)
        hub = stack.enter_context(_opened(place, blobs, options, stack))
        if not (is_loopback_address(host) or options.open_reading):
            _require_token(hub, host)
        config = uvicorn.Config(
            HubApp(hub),
            lifespan="on",
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # `HubCall.address` reads those of configured proxies
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        config.load()
        limits = ConnectionLimits(is_proxy=partial(is_among, networks=options.proxies))
        config.http_protocol_class = limited_protocol(
            config.http_protocol_class, _WRITE_SECONDS, limits
        )
        with suppress(KeyboardInterrupt):  # it has stopped by then
            _telling_server(config, started).run([listening])


def _opened(
    place: HubPlace, blobs: str | None, options: HubOptions, stack: ExitStack
) -> AbstractContextManager[Hub]:
    """Return a context that opens or creates a hub, or shows a registry."""
    if not isinstance(place, Path):
        create_hub(place, blobs)
        return open_hub(place, options)
    if is_registry(place):
        if options.upstream:
            raise ConfigError(
                f"{place} is a registry, which cannot store a mirror",
                expected="the folder of a hub",
                hint=f"adapterhub hub import HUB {place}",
            )
        return viewing(place, options)
    create_hub(place, blobs)
    stack.enter_context(serving_alone(place))
    return open_hub(place, options)


def _require_token(hub: Hub, host: str) -> None:
    """Refuse to listen on a public address without tokens to tell users apart.

    Raises:
        ConfigError: the hub has no token.
    """
    with hub.database.reading() as connection:
        if count_tokens(connection):
            return
    raise ConfigError(
        f"others could reach {host}, and this hub has no token yet",
        hint=f"adapterhub hub user {hub.place} NAME --admin, then adapterhub hub token create "
        f"{hub.place} --user NAME; or --open-reading, which lets anyone read and no one write",
    )


def known_hosts(host: str, port: int) -> tuple[str, ...]:
    """Return the host names that are valid for a listening address."""
    if host in ("0.0.0.0", "::", ""):  # all addresses: --public-url names the host
        return ()
    shown = f"[{host}]" if ":" in host else host
    return (f"{shown}:{port}", shown)


def _check_upstream(options: HubOptions) -> None:
    """Refuse an upstream that is this hub.

    Raises:
        ConfigError: the upstream is this hub.
    """
    own = urlsplit(options.public_url or "").netloc
    if options.upstream and urlsplit(options.upstream).netloc in {own, *options.hosts}:
        raise ConfigError(
            f"{options.upstream} is this hub itself", expected="another hub", hint="--upstream"
        )


def check_address(url: str | None, option: str) -> None:
    """Refuse an address that clients cannot use.

    Raises:
        ConfigError: it is not an http or https URL.
    """
    if url is None:
        return
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(
            f"{url!r} is not the address of a hub",
            expected="https://hub.example.org, or with a path",
            hint=option,
        )


def check_proxies(proxies: Sequence[str]) -> None:
    """Refuse proxies that are not valid addresses.

    Raises:
        ConfigError: one is neither an address nor a network.
    """
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy, strict=False)
        except ValueError:
            raise ConfigError(
                f"--trusted-proxy {proxy!r} is not an address",
                expected="an address, such as 10.0.0.5, or a network, such as 10.0.0.0/24",
            ) from None


def _telling_server(config: Any, started: Callable[[str], object]) -> Any:
    """Return a uvicorn server that reports when it is ready."""
    import uvicorn

    class Told(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                started(address_of(sockets[0]))

    return Told(config)
