"""The server: its endpoints, the steps of a request (web/frame.py), startup and shutdown.

The server listens and reports that it is not ready while the named adapters are loaded. On SIGTERM
it stops being ready, finishes running requests, and exits. If the compute thread dies, the process
exits with an error.

One table in `web/errors.py` maps errors to responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.datastructures import URL
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp

from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.config.user_folders import is_folder
from adapterhub.errors import AdapterhubError, ConfigError, RegistryError, ServingError, warn_user
from adapterhub.inference.open import AdapterSource, Predictor
from adapterhub.registry.local import registry_at
from adapterhub.registry.pull import named_reference
from adapterhub.registry.store import NAME_RULE, Query, Reference, is_name
from adapterhub.serving.engine import ServingEngine
from adapterhub.serving.http.access import AllowedAdapters
from adapterhub.serving.http.admin import operations
from adapterhub.serving.http.hugging_face import ENDPOINTS as HUGGING_FACE
from adapterhub.serving.http.inference_protocol import ENDPOINTS as INFERENCE_PROTOCOL
from adapterhub.serving.http.lora_updates import ENDPOINTS as LORA_UPDATES
from adapterhub.serving.http.metrics import OTHER
from adapterhub.serving.http.openai_embeddings import ENDPOINTS as OPENAI_EMBEDDINGS
from adapterhub.serving.http.openai_generation import ENDPOINTS as OPENAI_GENERATION
from adapterhub.serving.http.predict import ENDPOINTS as PREDICT
from adapterhub.serving.http.request import AdapterFacts, Answered, Call, RequestLimits, Service
from adapterhub.serving.http.scoring import ENDPOINTS as SCORING
from adapterhub.serving.http.text_embeddings import ENDPOINTS as TEXT_EMBEDDINGS
from adapterhub.serving.http.try_page import ENDPOINTS as TRY_PAGE
from adapterhub.serving.options import ServeOptions
from adapterhub.web.connections import (
    BACKLOG,
    MOST_HEADER_BYTES,
    address_of,
    is_of_this_machine,
    limited_protocol,
    listen,
)
from adapterhub.web.errors import (
    HeadError,
    NoPathError,
    NoTokenError,
    NotReadyError,
    Problem,
    RefusedError,
    body_of,
    malformed,
    problem_of,
)
from adapterhub.web.frame import SECURE_HEADERS, Endpoint, WebFrame, match_endpoint, place_of
from adapterhub.web.tokens import TokenFile, default_token_file

log = logging.getLogger("adapterhub.serve")

ENDPOINTS: tuple[Endpoint, ...] = (
    *PREDICT,
    *OPENAI_GENERATION,
    *OPENAI_EMBEDDINGS,
    *SCORING,
    *TEXT_EMBEDDINGS,
    *HUGGING_FACE,
    *INFERENCE_PROTOCOL,
    *LORA_UPDATES,
)
"""All endpoints for clients; the API of another client is one more file here."""
BODY_SECONDS = 30.0  # seconds for the body to arrive


def make_app(service: Service, endpoints: Sequence[Endpoint]) -> ASGIApp:
    """Return the ASGI application of a service."""
    service.endpoints = tuple(endpoints)
    app = ServingApp(service)
    if not service.origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=sorted(service.origins),
        allow_methods=("GET", "POST"),
        allow_headers=("authorization", "content-type", "x-adapter"),
        expose_headers=("x-adapter-version", "x-adapter-digest", "retry-after"),
    )


class ServingApp(WebFrame[Call]):
    """ASGI application that answers requests for a service."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def find(self, request: Request) -> Call:
        """Return the call for a request; endpoints for GET also answer HEAD.

        Raises:
            NoPathError: the path does not exist or does not accept the method.
        """
        path, endpoints = request.scope["path"], self.service.endpoints
        method = "GET" if request.method == "HEAD" else request.method
        endpoint, values, methods = match_endpoint(endpoints, method, path)
        if endpoint is None:
            raise NoPathError(methods)
        return Call(service=self.service, request=request, endpoint=endpoint, values=values)

    async def admit(self, call: Call) -> None:
        """Check the headers and the token of a request, and the server's state.

        Raises:
            AdapterhubError: the request is rejected.
        """
        service, role = self.service, call.endpoint.role
        head = sum(len(name) + len(value) for name, value in call.request.scope["headers"])
        if head > MOST_HEADER_BYTES:
            raise HeadError("the headers are too large", expected=f"{MOST_HEADER_BYTES:,} bytes")
        if service.tokens is not None:
            call.token = service.check_token(call.headers.get("authorization"))
            if role and call.token is None:
                raise NoTokenError("no valid token", hint="the header Authorization: Bearer TOKEN")
            if role and call.token is not None and role not in call.token.roles:
                raise RefusedError(f"this token lacks the role {role}")
        elif not is_of_this_machine(call.headers.get("host"), self._foreign_origin(call)):
            raise RefusedError(
                "a server without tokens answers this machine alone",
                expected="the headers Host and Origin of localhost",
            )
        if not (service.is_ready or service.is_leaving or call.endpoint.while_starting):
            raise NotReadyError("the server is starting")
        if role:
            service.rate.take(call.token.name if call.token else "")

    def _foreign_origin(self, call: Call) -> str | None:
        """Return the origin of the page that sent the request, unless the operator allows it."""
        origin: str | None = call.headers.get("origin")
        return None if origin in self.service.origins else origin

    async def read(self, call: Call) -> bytes:
        """Read the body."""
        return await call.read_body(self.service.limits.body, BODY_SECONDS)

    async def answer(self, call: Call) -> Response:
        """Return the endpoint's response; cancel the computation if the client disconnects."""
        call.watch()
        call.body = await call.in_thread(call.read_form)
        return rendered(await call.endpoint.answer(call))

    def refused(self, request: Request, call: Call | None, error: Exception) -> Response:
        """Return an error in the format of a path's API."""
        if isinstance(error, NoPathError) and (other := self._other_path(request)):
            return other
        problem = problem_for(error)
        path = call.endpoint.path if call else request.method
        if not isinstance(error, AdapterhubError | ValidationError):
            log.error("%s: %s", path, place_of(error))
        elif problem.status.code >= 500 and not problem.status.retry:
            log.error("%s: %s", path, error)
        return error_response(problem, request.url.path)

    def _other_path(self, request: Request) -> Response | None:
        """Return a redirect to the path with or without a trailing slash, if that one exists."""
        path = request.scope["path"]
        other = path.rstrip("/") if path.endswith("/") else f"{path}/"
        if path == "/" or not match_endpoint(self.service.endpoints, "", other)[2]:
            return None
        return RedirectResponse(str(URL(scope={**request.scope, "path": other})))

    def complete(self, call: Call | None, response: Response) -> None:
        """Add the headers with the adapter's version, and the headers of every response."""
        if call is not None and call.facts_of_answer is not None:
            response.headers.update(adapter_headers(call.facts_of_answer))
        response.raw_headers.extend(SECURE_HEADERS)
        if self.service.is_leaving:
            response.headers["connection"] = "close"

    def count(self, method: str, call: Call | None, status: int, seconds: float) -> None:
        """Count a request by its path and its adapter."""
        facts = call.facts_of_answer if call else None
        task, reference = (facts.task, facts.reference) if facts else ("", "")
        path, rows = (call.endpoint.path, call.rows) if call else (OTHER, 0)
        self.service.metrics.observe_request(path, task, reference, status, seconds, rows)

    def log_facts(self, call: Call) -> dict[str, Any]:
        """Return the client and the adapter of a request, for the log."""
        return {
            "adapter": call.facts_of_answer.reference if call.facts_of_answer else "",
            "inputs": call.rows,
            "token": call.token.name if call.token else "",
        }


def adapter_headers(facts: AdapterFacts) -> dict[str, str]:
    """Return the headers with the version of the adapter that answered."""
    reference = facts.reference.encode("ascii", "backslashreplace").decode()
    return {"x-adapter-version": reference, "x-adapter-digest": facts.digest}


def rendered(answer: Answered) -> Response:
    """Return a JSON response, unless the result is already a response."""
    if isinstance(answer, Response):
        return answer
    return Response(to_json(answer), media_type="application/json")


def problem_for(error: Exception) -> Problem:
    """Return an error in the form sent to a client; pydantic lists the errors of a body."""
    return malformed(error.errors()) if isinstance(error, ValidationError) else problem_of(error)


def error_response(problem: Problem, path: str) -> Response:
    """Return an error in the format of a path's API."""
    body = to_json(body_of(problem, path))
    return Response(body, problem.status.code, problem.headers, media_type="application/json")


_KEEP_ALIVE = 75  # seconds before an idle connection is closed
_WATCH = 0.25  # seconds between two checks of the compute thread
_LAST_ANSWERS = 1.0  # seconds in which a failed server still reports it
_TRIED = 3  # adapters of the registry, until one is loaded
_WARM_WORDS = (1, 8, 32, 128)  # of the texts in the warm-up passes
_MOST_LISTED = 100_000
_LAST_REQUESTS = 0.5  # seconds to read further requests from open connections
_CLOSING = 1.0  # seconds to finish computing after all connections are closed


def open_tokens(options: ServeOptions) -> TokenFile | None:
    """Return the token file; None if requests need no token, which requires a loopback address.

    Raises:
        ConfigError: other machines can reach the address, and tokens are not required.
        FileError: the file cannot be read.
    """
    file = TokenFile(Path(options.tokens) if options.tokens else default_token_file())
    if file.tokens():
        return file
    if options.tokens or not options.is_local:
        flag = f" --file {options.tokens}" if options.tokens else ""
        reached = f"others can reach {options.host}, and no tokens are set"
        raise ConfigError(
            f"{options.tokens} has no tokens" if options.tokens else reached,
            expected="a token for each client, or an address of this machine",
            hint=f"adapterhub token create NAME{flag}",
        )
    return None


def named_adapters(options: ServeOptions) -> tuple[dict[str, AdapterSource | None], frozenset[str]]:
    """Return the named adapters by client name, and the names of those that are folders.

    Raises:
        ConfigError: a reference is malformed, or two adapters have the same name.
    """
    named: dict[str, AdapterSource | None] = {}
    folders = set()
    for text in options.adapters:
        name, reference = named_reference(text, options.registry)
        client_name = name or _client_name(reference)
        if (name or reference.kind == "folder") and not is_name(client_name):
            raise ConfigError(
                f"{client_name!r} is not a valid name for clients",
                expected=NAME_RULE,
                hint=f"NAME={reference}",
            )
        if client_name in named:
            raise ConfigError(
                f"two adapters have the name {client_name!r}", hint=f"OTHER={reference}"
            )
        if reference.kind == "folder":
            folders.add(client_name)
            named[client_name] = AdapterSource(str(Path(reference.name).resolve()))
        else:
            named[client_name] = AdapterSource(str(reference))
    return named, frozenset(folders)


def _client_name(reference: Reference) -> str:
    """Return the client name of an adapter: its reference, or the name of its folder.

    Folder names of sweeps, such as `method=lora,seed=0`, become `method-lora-seed-0`.
    """
    if reference.kind != "folder":
        return str(reference)
    path = Path(reference.name).resolve()
    name = path.parent.name if path.name == "adapter" else path.name
    return re.sub("[=,+]+", "-", name)


def _backbone_name(backbone: str | None) -> str:
    """Return the client name of the backbone without an adapter; "" if there is no backbone."""
    if backbone is None:
        return ""
    return Path(backbone).resolve().name if is_folder(backbone) else backbone


def listed_backbone(options: ServeOptions, registry: str) -> str | None:
    """Return the id or fingerprint of the backbone whose adapters in the registry are served.

    Raises:
        ConfigError: the registry has adapters for several backbones, and no backbone is named.
        BackboneError: the named backbone cannot be read.
    """
    if options.backbone is not None:
        name = options.backbone
        return fingerprint(name) if is_folder(name) else name
    rows = registry_at(registry).search(Query(limit=_MOST_LISTED))
    backbones = sorted({each.backbone for each in rows})
    if len(backbones) != 1:
        raise ConfigError(
            f"the registry {registry} has adapters for {len(backbones)} backbones",
            offenders=backbones,
            expected="references of adapters, or one backbone",
            hint=f"--backbone {backbones[0]}" if backbones else "adapterhub publish",
        )
    return backbones[0]


def open_service(options: ServeOptions) -> Service:
    """Open the engine and set up access control, without loading any adapter.

    Raises:
        ConfigError: options are incompatible.
        RegistryError: the whole registry is to be served, but cannot be read.
    """
    tokens = open_tokens(options)
    named, folders = named_adapters(options)
    # A bare name from a client is a name in the registry, never a folder in the working directory.
    registry = options.own_registry
    patterns = options.allow if named or options.allow else ("*",)
    of_all = bool(patterns) and not named
    among = listed_backbone(options, registry) if of_all or options.backbone else None
    bare = _backbone_name(options.backbone)
    if bare:
        named[bare] = None
    engine = ServingEngine(
        options.backbone,
        registry=registry,
        among=among,
        signed=options.require_signature,
        batch_tokens=options.batch_tokens,
        max_length=options.max_length,
        queue_tokens=options.queue_tokens,
        adapter_memory=options.size("adapter_memory"),
        dtype=options.dtype,
        quantize=options.quantize,
    )
    service = Service(
        engine,
        AllowedAdapters(named, tuple(patterns), folders),
        backbone=bare,
        limits=RequestLimits(
            options.size("body"),
            options.inputs,
            options.seconds("deadline"),
            options.seconds("generation_time"),
            options.requests_per_minute,
        ),
        tokens=tokens,
        metric_adapters=options.metric_adapters,
        origins=frozenset(options.allow_origin),
    )
    service.is_ready = False
    return service


def load_and_warm(service: Service) -> None:
    """Load the named adapters and run a warm-up pass for each kind.

    The objects in memory are then excluded from garbage collection, which would occasionally stop
    all threads for 0.3 s.

    Raises:
        AdapterhubError: a named adapter cannot be loaded.
    """
    _load_named(service)
    _warm_up(service)
    gc.collect()
    gc.freeze()


def _load_named(service: Service) -> None:
    """Load and pin the named adapters, and look up the names in the registry.

    If no adapter is named, one from the registry is loaded, so that the backbone is in memory.
    Otherwise the registry need not exist yet.
    """
    try:
        service.list_published()
    except RegistryError as error:
        if not service.allowed.named:
            raise
        warn_user(f"{error.problem}: only the named adapters are served until it can be read")
    named = [each for each in service.allowed.named.values() if each is not None]
    service.engine.pin(*named)
    for name in service.allowed.listed[: 0 if named else _TRIED]:
        with contextlib.suppress(AdapterhubError):  # reported to requests for it
            service.engine.find(AdapterSource(name)).result()
            return


def _warm_up(service: Service) -> None:
    """Run one pass for each kind of loaded adapter and each text length."""
    kinds: dict[Any, tuple[AdapterSource, Predictor]] = {}
    for source, served in service.engine.adapters.loaded().items():
        if isinstance(source, AdapterSource):
            kind = (id(served.model), id(served.head), served.virtual)
            kinds.setdefault(kind, (source, served.predictor))
    futures = [
        service.engine.submit(source, _sample(predictor, " ".join(["a"] * words)))
        for source, predictor in kinds.values()
        for words in _WARM_WORDS
        if not predictor.task.decodes
    ]
    for future in futures:
        if (error := future.exception()) is not None:
            raise error


def _sample(predictor: Predictor, text: str) -> Any:
    """Return an input for an adapter, built from one text."""
    count = predictor.task.fields(predictor.data)
    return text if count == 1 else (text,) * (count or 2)


def check_all(service: Service) -> dict[str, str]:
    """Load all allowed adapters, run one prediction with each, and return the problems."""
    problems: dict[str, str] = {}
    for name in service.allowed.names:
        source = service.allowed.find(name)
        if source is None:
            continue
        try:
            served = service.engine.find(source).result()
            if not served.predictor.task.decodes:
                service.engine.submit(source, _sample(served.predictor, "a text")).result()
        except AdapterhubError as error:
            problems[name] = str(error)
    return problems


class _Uvicorn(uvicorn.Server):
    """Uvicorn server that stops being ready before shutdown, and runs background tasks."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        beside: Callable[[], Sequence[Coroutine[Any, Any, None]]],
    ) -> None:
        super().__init__(config)
        self.service, self.beside = service, beside

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until shutdown is requested."""
        tasks = [asyncio.create_task(each) for each in self.beside()]
        try:
            await super().serve(sockets)
        finally:
            for each in tasks:
                each.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and answer the requests already sent before closing them.

        Closing a connection with an unread request would reset it.
        """
        await asyncio.sleep(0)  # accept the waiting connections
        for each in (*self.servers, *(sockets or ())):
            each.close()
        ends = time.monotonic() + _LAST_REQUESTS
        while time.monotonic() < ends and self.server_state.connections and not self.force_exit:
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop accepting connections; a second signal exits at once."""
        self.service.leave()
        self.force_exit = self.should_exit
        self.should_exit = True


class HttpServer:
    """HTTP server for one service.

    Args:
        service: the service; if it is already ready, nothing is loaded.
        options: the options, such as address and timeouts.
        started: called in a separate thread with the address, after all adapters are loaded.
        endpoints: the endpoints; by default, the ones selected by the options.
    """

    def __init__(
        self,
        service: Service,
        options: ServeOptions,
        started: Callable[[str], None],
        endpoints: Sequence[Endpoint] = (),
    ) -> None:
        self.service, self.options, self.started = service, options, started
        self._is_loaded = service.is_ready
        self.error: Exception | None = None
        config = uvicorn.Config(
            make_app(service, endpoints or served_endpoints(options, service)),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=max(1, int(options.seconds("drain") - _CLOSING)),
        )
        config.load()
        config.http_protocol_class = limited_protocol(
            config.http_protocol_class, options.seconds("write_timeout")
        )
        self.server = _Uvicorn(config, service, lambda: (self._watch(), self._refresh()))

    def run(self) -> None:
        """Serve until shutdown is requested.

        Raises:
            AdapterhubError: a named adapter cannot be loaded, the server cannot listen on the
                address, or the compute thread died.
        """
        try:
            listening = listen(self.options.host, self.options.port)
            threading.Thread(target=self._load, args=(listening,), daemon=True).start()
            self.server.run(sockets=[listening])
        finally:
            self.service.is_ready = False
            self.service.engine.close(_CLOSING)
            gc.unfreeze()
            if self.service.tokens is not None:
                self.service.tokens.note_uses(at_once=True)
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Shut down, as on SIGTERM."""
        self.service.leave()
        self.server.should_exit = True

    def _load(self, listening: socket.socket) -> None:
        address = address_of(listening)
        try:
            if not self._is_loaded:
                load_and_warm(self.service)
            self.service.is_ready = not self.server.should_exit
            self.started(address)
        except Exception as error:
            self._leave(error)

    async def _watch(self) -> None:
        """Shut down when the compute thread stops working."""
        while self.service.computes:
            await asyncio.sleep(_WATCH)
        await asyncio.sleep(_LAST_ANSWERS)
        self._leave(self.service.engine.problem or ServingError("the engine was closed"))

    async def _refresh(self) -> None:
        """Look up new versions periodically."""
        seconds = self.options.seconds("refresh")
        while seconds < float("inf"):
            await asyncio.sleep(seconds)
            try:
                await asyncio.to_thread(self.service.refresh)
            except Exception as error:
                warn_user(f"new versions could not be looked for: {type(error).__name__}")

    def _leave(self, error: Exception) -> None:
        self.error = self.error or error
        self.stop()


def served_endpoints(options: ServeOptions, service: Service) -> tuple[Endpoint, ...]:
    """Return all endpoints, with the operator's; without tokens there are no roles."""
    role = {"open": ""}.get(options.metrics, options.metrics)
    role = role if role == "off" or service.tokens is not None else ""
    page = TRY_PAGE if options.try_page else ()
    return tuple(
        each
        for each in (*ENDPOINTS, *page, *operations(role))
        if not (each.path == "/" and page and each not in page)
        if options.admin or each.role != "admin" or each.path == "/metrics"
    )
