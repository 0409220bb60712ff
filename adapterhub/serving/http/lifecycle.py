"""The life of a server: open the engine, load, warm up, serve, look for versions, and leave.

Adapters that were named are loaded while the server listens already, and says that it is not ready.
On SIGTERM it is not ready any more, finishes what is running, and leaves. If the compute thread
dies, nothing is computed any more, and the process leaves with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from adapterhub.backbones.fingerprint import fingerprint
from adapterhub.config.user_folders import is_folder
from adapterhub.errors import AdapterhubError, ConfigError, RegistryError, ServingError, warn_user
from adapterhub.inference.open import AdapterSource, Predictor
from adapterhub.registry.open_store import named_reference, registry_at
from adapterhub.registry.reference import NAME_RULE, Reference, is_name
from adapterhub.registry.store import Query
from adapterhub.serving.engine import ServingEngine
from adapterhub.serving.http.access import AllowedAdapters
from adapterhub.serving.http.admin import operations
from adapterhub.serving.http.app import ENDPOINTS, make_app
from adapterhub.serving.http.server_state import RequestLimits, Service
from adapterhub.serving.http.try_page import ENDPOINTS as TRY_PAGE
from adapterhub.serving.options import ServeOptions
from adapterhub.web.connections import BACKLOG, address_of, limited_protocol, listen
from adapterhub.web.frame import Endpoint
from adapterhub.web.tokens import TokenFile, default_token_file

_KEEP_ALIVE = 75  # seconds that an idle connection is kept
_WATCH = 0.25  # seconds between two looks at the compute thread
_LAST_ANSWERS = 1.0  # seconds in which a dead server still says so
_TRIED = 3  # adapters of the registry, until one is loaded
_WARM_WORDS = (1, 8, 32, 128)  # of the texts in the passes at the start
_MOST_LISTED = 100_000
_LAST_REQUESTS = 0.5  # seconds in which requests of open connections are still read
_CLOSING = 1.0  # seconds for what is still computed when all connections are closed


def open_tokens(options: ServeOptions) -> TokenFile | None:
    """Return the file of tokens; None if requests need none, which is so for this machine alone.

    Raises:
        ConfigError: others can reach the address, and there are no tokens.
        FileError: the file cannot be read.
    """
    file = TokenFile(Path(options.tokens) if options.tokens else default_token_file())
    if file.tokens():
        return file
    if options.tokens or not options.is_local:
        where = f" --file {options.tokens}" if options.tokens else ""
        reached = f"others can reach {options.host}, and there are no tokens"
        raise ConfigError(
            f"{options.tokens} has no tokens" if options.tokens else reached,
            expected="a token for each client, or an address of this machine",
            hint=f"adapterhub token create NAME{where}",
        )
    return None


def named_adapters(options: ServeOptions) -> tuple[dict[str, AdapterSource | None], frozenset[str]]:
    """Return the named adapters by the names that clients use, and which of them are folders.

    Raises:
        ConfigError: a reference is malformed, or two adapters have one name.
    """
    named: dict[str, AdapterSource | None] = {}
    folders = set()
    for text in options.adapters:
        name, reference = named_reference(text, options.registry)
        shown = name or _client_name(reference)
        if (name or reference.kind == "folder") and not is_name(shown):
            raise ConfigError(
                f"{shown!r} is no name for clients", expected=NAME_RULE, hint=f"NAME={reference}"
            )
        if shown in named:
            raise ConfigError(f"two adapters have the name {shown!r}", hint=f"OTHER={reference}")
        if reference.kind == "folder":
            folders.add(shown)
            named[shown] = AdapterSource(str(Path(reference.name).resolve()))
        else:
            named[shown] = AdapterSource(str(reference))
    return named, frozenset(folders)


def _client_name(reference: Reference) -> str:
    """Return what clients call an adapter: its reference, or the name of its folder.

    Those of sweeps, such as `method=lora,seed=0`, become `method-lora-seed-0`.
    """
    if reference.kind != "folder":
        return str(reference)
    path = Path(reference.name).resolve()
    name = path.parent.name if path.name == "adapter" else path.name
    return re.sub("[=,+]+", "-", name)


def _backbone_name(backbone: str | None) -> str:
    """Return what clients call the backbone without an adapter; "" if there is none."""
    if backbone is None:
        return ""
    return Path(backbone).resolve().name if is_folder(backbone) else backbone


def listed_backbone(options: ServeOptions, registry: str) -> str | None:
    """Return the id or the fingerprint of the backbone whose adapters of the registry are served.

    Raises:
        ConfigError: the registry has adapters of several, and none is named.
        BackboneError: the named one cannot be read.
    """
    if options.backbone is not None:
        name = options.backbone
        return fingerprint(name) if is_folder(name) else name
    found = registry_at(registry).search(Query(limit=_MOST_LISTED))
    backbones = sorted({each.backbone for each in found})
    if len(backbones) != 1:
        raise ConfigError(
            f"the registry {registry} has adapters for {len(backbones)} backbones",
            offenders=backbones,
            expected="references of adapters, or one backbone",
            hint=f"--backbone {backbones[0]}" if backbones else "adapterhub publish",
        )
    return backbones[0]


def open_service(options: ServeOptions) -> Service:
    """Open the engine, and decide who may ask for what; no adapter is loaded.

    Raises:
        ConfigError: options do not go together.
        RegistryError: all of the registry is served, and it cannot be read.
    """
    tokens = open_tokens(options)
    named, folders = named_adapters(options)
    # A bare name of a client is one of the registry, and never a folder where the server started.
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
    """Load the named adapters, and compute a pass for each kind of them.

    What is in memory then is not looked through for garbage again: that would stop every thread for
    0.3 s, now and then.

    Raises:
        AdapterhubError: a named one cannot be loaded.
    """
    _load_named(service)
    _warm_up(service)
    gc.collect()
    gc.freeze()


def _load_named(service: Service) -> None:
    """Load the named adapters and keep them, and look up the names of the registry.

    If none is named, one of the registry is loaded, so that the backbone is there; if some are, the
    registry need not be there yet.
    """
    try:
        service.list_published()
    except RegistryError as error:
        if not service.allowed.named:
            raise
        warn_user(f"{error.problem}: only what was named is served until it can be read")
    named = [each for each in service.allowed.named.values() if each is not None]
    service.engine.pin(*named)
    for name in service.allowed.listed[: 0 if named else _TRIED]:
        with contextlib.suppress(AdapterhubError):  # requests for it will be told
            service.engine.adapters.find(AdapterSource(name)).result()
            return


def _warm_up(service: Service) -> None:
    """Compute one pass for each kind of adapter in memory, and each length of texts."""
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
    """Return an input of an adapter that is made of one text."""
    count = predictor.task.fields(predictor.data)
    return text if count == 1 else (text,) * (count or 2)


def check_all(service: Service) -> dict[str, str]:
    """Load all adapters that may be asked for, predict once with each, and return the problems."""
    problems: dict[str, str] = {}
    for name in service.allowed.names:
        source = service.allowed.find(name)
        if source is None:
            continue
        try:
            served = service.engine.adapters.find(source).result()
            if not served.predictor.task.decodes:
                service.engine.submit(source, _sample(served.predictor, "a text")).result()
        except AdapterhubError as error:
            problems[name] = str(error)
    return problems


class _Uvicorn(uvicorn.Server):
    """Leaves when it is told to, says before that it is not ready, and has tasks beside it."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        beside: Callable[[], Sequence[Coroutine[Any, Any, None]]],
    ) -> None:
        super().__init__(config)
        self.service, self.beside = service, beside

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the server is told to leave."""
        tasks = [asyncio.create_task(each) for each in self.beside()]
        try:
            await super().serve(sockets)
        finally:
            for each in tasks:
                each.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and answer what their clients have sent, before they close.

        A connection that is closed while a request is in it would be reset.
        """
        await asyncio.sleep(0)  # those that wait to be accepted are
        for each in (*self.servers, *(sockets or ())):
            each.close()
        ends = time.monotonic() + _LAST_REQUESTS
        while time.monotonic() < ends and self.server_state.connections and not self.force_exit:
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop taking connections; a second signal ends at once."""
        self.service.leave()
        self.force_exit = self.should_exit
        self.should_exit = True


class HttpServer:
    """A server for one service.

    Args:
        service: what is served; one that is ready already is not loaded.
        options: where, and for how long.
        started: called in a thread of its own when all is loaded, with the address.
        endpoints: the paths, if not those of the options.
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
        """Serve until the process is told to leave.

        Raises:
            AdapterhubError: an adapter that was named cannot be loaded, the address cannot be
                listened at, or the compute thread has died.
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
        """Leave, as on SIGTERM."""
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
        """Leave when nothing is computed any more."""
        while self.service.engine.is_alive:
            await asyncio.sleep(_WATCH)
        await asyncio.sleep(_LAST_ANSWERS)
        self._leave(self.service.engine.problem or ServingError("the engine was closed"))

    async def _refresh(self) -> None:
        """Look for new versions, now and then."""
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
    """Return all paths, with those for who runs the server: without tokens there are no roles."""
    role = {"open": ""}.get(options.metrics, options.metrics)
    role = role if role == "off" or service.tokens is not None else ""
    page = TRY_PAGE if options.try_page else ()
    return tuple(
        each
        for each in (*ENDPOINTS, *page, *operations(role))
        if not (each.path == "/" and page and each not in page)
        if options.admin or each.role != "admin" or each.path == "/metrics"
    )
