"""A server on a Ray cluster: replicas that compute, and a front that clients connect to.

A request takes the same path as on one machine (`web/frame.py`), in two parts. The front checks the
client's token, the rate of its requests and the size of the body. It then forwards the whole
request to a replica, which has the same application and its own engine. That engine forms batches
with rows of any adapters. Ray Serve starts replicas, replaces dead ones, and chooses a replica for
each request, preferably one that holds its adapter (`multiplexed`).

If a replica dies before a byte of the answer was sent, the front retries on another replica. The
front also looks for new versions, for all replicas at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import replace
from typing import Any, cast

import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import Response, StreamingResponse

from adapterhub._version import __version__
from adapterhub.config.options import from_dict, to_dict
from adapterhub.config.user_folders import is_folder
from adapterhub.errors import ServingError
from adapterhub.ray_cluster import connect_ray, import_serve, share_out
from adapterhub.serving.adapter_cache import ModelUse
from adapterhub.serving.engine import ServingEngine
from adapterhub.serving.http.access import AllowedAdapters
from adapterhub.serving.http.admin import METRICS_TYPE
from adapterhub.serving.http.lifecycle import (
    load_and_warm,
    make_app,
    open_service,
    open_tokens,
    served_endpoints,
)
from adapterhub.serving.http.request import Call, RequestLimits, Service
from adapterhub.serving.options import ServeOptions
from adapterhub.web.errors import NotReadyError
from adapterhub.web.frame import SECURE_HEADERS, Endpoint
from adapterhub.web.tokens import AccessToken, TokenFile

_TRIES = 3  # of a request: one that kills each replica must not kill all
_HINTS = 1000  # adapters of a replica reported to Ray Serve
_ONGOING = 10_000  # requests of a replica; the engine refuses requests beyond its capacity
_LOOKING = 60.0  # seconds for all replicas to look for new versions
_HEALTH = 2.0  # seconds between two health checks of a replica
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{1,512})"')
_HEAD = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
         "root_path", "headers", "client", "server")  # fmt: skip
_OF_THE_FRONT = ("/healthz", "/readyz", "/admin/refresh")
_SECURE = {name for name, _ in SECURE_HEADERS}
Message = MutableMapping[str, Any]


class ForwardedTokens:
    """Tokens of requests already checked by the front: each request carries its permissions."""

    def check(self, text: str) -> AccessToken:
        """Return the permissions of a token."""
        return from_dict(AccessToken, json.loads(text))

    def note_uses(self, at_once: bool = False) -> None:
        """Do nothing: the front records uses."""


def forwarded(token: AccessToken | None, headers: Sequence[tuple[bytes, bytes]]) -> list[Any]:
    """Return the headers of a request, with its token replaced by the token's permissions."""
    others = [(name, value) for name, value in headers if name != b"authorization"]
    if token is None:
        return others
    return [*others, (b"authorization", b"Bearer " + json.dumps(to_dict(token)).encode())]


class Replica:
    """A server without connections, in a process of the cluster.

    Args:
        options: the options of the server.
        front: the adapterhub version of the front, and its working directory, for relative paths.
        needs_tokens: whether requests carry the permissions of their tokens.
        threads: threads of torch.

    Raises:
        ServingError: this node has another version of adapterhub.
        AdapterhubError: a named adapter cannot be loaded.
    """

    def __init__(
        self, options: ServeOptions, front: tuple[str, str], needs_tokens: bool, threads: int
    ) -> None:
        version, folder = front
        if version != __version__:
            raise ServingError(
                f"a node has adapterhub {__version__}; the server was started with {version}"
            )
        _, serve = import_serve()
        torch.set_num_threads(threads)
        if is_folder(folder):
            os.chdir(folder)
        # The front checks tokens and rates.
        inside = replace(options, host="127.0.0.1", tokens=None, requests_per_minute=0)
        self.service = open_service(inside)
        self.service.tokens = cast(TokenFile, ForwardedTokens()) if needs_tokens else None
        load_and_warm(self.service)
        self.service.is_ready = True
        self.app = make_app(self.service, served_endpoints(options, self.service))

        async def noted(model: str) -> str:
            return model

        self.note = serve.multiplexed(max_num_models_per_replica=_HINTS)(noted)

    async def answer(
        self, scope: dict[str, Any], body: bytes, model: str
    ) -> AsyncIterator[list[Message]]:
        """Yield the messages that answer a request, grouped as they become available."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        request = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not request:
                await asyncio.Event().wait()  # the client stays until this task is cancelled
            return request.pop()

        task = asyncio.ensure_future(self.app({**scope, "state": {}}, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            ended = False
            while not ended:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                ended = batch[-1] is None
                parts = [each for each in batch if each is not None]
                if model and any(each.get("status") == 200 for each in parts):
                    await self.note(model)
                if parts:
                    yield parts
            task.result()
        finally:
            task.cancel()

    async def answer_whole(self, scope: dict[str, Any], body: bytes) -> list[Message]:
        """Return all messages that answer a request."""
        return [each async for batch in self.answer(scope, body, "") for each in batch]

    def refresh(self) -> int:
        """Look for new versions; return the number of references that have moved."""
        return self.service.refresh()

    def models(self) -> list[ModelUse]:
        """List the model that computes each adapter."""
        return self.service.engine.models()

    def process(self) -> tuple[int, str]:
        """Return the process id and the node."""
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id()

    def numbers(self) -> tuple[str, str]:
        """Return the name of this replica and its metrics in Prometheus format."""
        from ray import serve

        return serve.get_replica_context().replica_tag, self.service.metrics.text().decode()

    def check_health(self) -> None:
        """Raise if computing has stopped, so that Ray Serve replaces the replica."""
        if not self.service.is_alive:
            raise RuntimeError("the compute thread is dead or stuck")


class ReplicaEngine:
    """The engine interface of the front's server, for all replicas.

    Args:
        handle: the handle of the deployment.
        close: removes the deployment.
    """

    def __init__(self, handle: Any, close: Callable[[], None]) -> None:
        self.handle, self._close = handle, close
        self.is_alive = True

    def busy_seconds(self) -> float:
        """Return 0: Ray Serve replaces stuck replicas."""
        return 0.0

    def refresh(self) -> int:
        """Look for new versions on all replicas; return how many references have moved in one."""
        return max(self.all("refresh"), default=0)

    def models(self) -> list[ModelUse]:
        """List the model that computes each adapter, on one of the replicas."""
        return next(iter(self.all("models")), [])

    def has_replicas(self) -> bool:
        """Return whether any replica answers."""
        try:
            return bool(self.all("process"))
        except Exception:  # Ray raises various classes while it replaces a replica
            return False

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all replicas, and return their results."""
        results: list[Any] = self.handle.broadcast(method, *arguments).results(timeout_s=_LOOKING)
        return results

    def close(self, seconds: float = 0.0) -> None:
        """Remove the replicas."""
        self.is_alive = False
        self._close()


class Front:
    """Forwards requests to replicas."""

    def __init__(self, engine: ReplicaEngine) -> None:
        self.engine = engine

    def endpoints(self, endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
        """Return the same endpoints, answered by replicas."""
        return tuple(map(self._endpoint, endpoints))

    def _endpoint(self, endpoint: Endpoint) -> Endpoint:
        if endpoint.path in _OF_THE_FRONT:
            return endpoint
        answer = self.to_all if endpoint.role == "admin" else self.to_one
        answer = self.metrics if endpoint.path == "/metrics" else answer
        return replace(endpoint, request=None, read=None, answer=answer)

    async def to_one(self, call: Call) -> Response:
        """Forward a request to a replica, and retry on another if it dies before a byte was sent.

        Raises:
            NotReadyError: every replica that was tried has died, or there are no replicas.
        """
        from ray.exceptions import RayActorError

        scope, model = _scope(call), adapter_hint(call.values, call.raw_body)
        handle = self.engine.handle.options(
            method_name="answer", stream=True, multiplexed_model_id=model
        )
        for _ in range(_TRIES):
            try:
                return await self._patiently(
                    _begun(handle.remote(scope, call.raw_body, model)), call.service.limits.deadline
                )
            except RayActorError:
                continue
        raise NotReadyError("the replicas that were tried have died")

    async def _patiently(self, answer: Coroutine[Any, Any, Response], seconds: float) -> Response:
        """Wait for an answer while there are replicas; check every `seconds` that there are."""
        task = asyncio.create_task(answer)
        try:
            while not (await asyncio.wait({task}, timeout=seconds))[0]:
                if not await asyncio.to_thread(self.engine.has_replicas):
                    raise NotReadyError("all replicas have died, and none is there yet")
            return task.result()
        finally:
            task.cancel()

    async def to_all(self, call: Call) -> Response:
        """Forward a request that changes something to each replica; return the first answer."""
        arguments = "answer_whole", _scope(call), call.raw_body
        answers = await asyncio.to_thread(self.engine.all, *arguments)
        failed = [each for each in answers if each[0]["status"] >= 400]
        return _whole((failed or answers)[0])

    async def metrics(self, call: Call) -> Response:
        """Return the metrics of all replicas."""
        texts = await asyncio.to_thread(self.engine.all, "numbers")
        registry = CollectorRegistry()
        registry.register(ReplicaNumbers(dict(texts)))
        return Response(generate_latest(registry), media_type=METRICS_TYPE)


def open_replicas(options: ServeOptions) -> tuple[Service, tuple[Endpoint, ...]]:
    """Start replicas on a cluster, and wait until all named adapters are loaded.

    Returns:
        A service that is ready, and the endpoints of a server that forward requests to replicas.
        Closing the engine of the service removes the replicas.

    Raises:
        ConfigError: Ray Serve is not installed, the address does not answer, or the cluster is too
            small.
        ServingError: a replica cannot be started, for example because an adapter cannot be loaded.
    """
    tokens = open_tokens(options)
    ray, serve = import_serve()
    connect_ray(ray, options.ray_address)
    name = f"adapterhub-{socket.gethostname()}-{os.getpid()}"

    def close() -> None:
        serve.delete(name)
        ray.shutdown()

    try:
        handle = _deployed(ray, serve, name, options, tokens is not None)
    except BaseException:
        close()
        raise
    engine = ReplicaEngine(handle, close)
    service = Service(
        cast(ServingEngine, engine),
        AllowedAdapters({}),
        backbone=options.backbone or "",
        limits=RequestLimits(
            options.size("body"),
            deadline=options.seconds("deadline"),
            per_minute=options.requests_per_minute,
        ),
        tokens=tokens,
    )
    return service, Front(engine).endpoints(served_endpoints(options, service))


def _deployed(ray: Any, serve: Any, name: str, options: ServeOptions, needs_tokens: bool) -> Any:
    """Start the replicas, and return their handle when all are ready."""
    shares = share_out(ray.nodes(), options.workers)
    cpus, gpus = min(share.cpus for share in shares), min(share.gpus for share in shares)
    deployment = serve.deployment(
        Replica,
        name="engine",
        num_replicas=len(shares),
        max_ongoing_requests=_ONGOING,
        max_constructor_retry_count=1,
        health_check_period_s=_HEALTH,
        graceful_shutdown_timeout_s=options.seconds("drain"),
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
    )
    bound = deployment.bind(
        replace(options, registry=options.own_registry),
        (__version__, os.getcwd()),
        needs_tokens,
        options.threads or cpus,
    )
    serve.start(proxy_location="Disabled")
    try:
        return serve.run(bound, name=name, route_prefix=None)
    except RuntimeError:
        failed = serve.status().applications[name].deployments.values()
        raise ServingError(
            "the replicas cannot be started",
            offenders=[_error_in(each.message) for each in failed],
        ) from None


def _error_in(traceback: str) -> str:
    """Return the message of the error at the end of a traceback."""
    *_, last = re.finditer(r"^(?:\w+\.)*\w+: ", f"\nRay: {traceback}", re.MULTILINE)
    return f"\nRay: {traceback}"[last.end() :]


def _scope(call: Call) -> dict[str, Any]:
    """Return the scope of a request for a replica; its body is sent separately."""
    scope = {name: call.request.scope[name] for name in _HEAD if name in call.request.scope}
    return {**scope, "headers": forwarded(call.token, scope["headers"])}


def adapter_hint(path_params: Mapping[str, str], body: bytes) -> str:
    """Return the adapter that a request probably names; "" if it is not obvious.

    Ray Serve prefers a replica that holds it. A wrong guess does not change the answer.
    """
    named = next((path_params[n] for n in ("reference", "name", "model") if n in path_params), "")
    if not named and (match := _MODEL.search(body)):
        named = match[1].decode(errors="replace")
    return named[:512]


async def _begun(responses: Any) -> Response:
    """Return a replica's answer once it is complete, or once more than its start has been sent."""
    messages: list[Message] = []
    parts = aiter(responses)
    try:
        while len(messages) < 2:
            messages += await anext(parts)
    except StopAsyncIteration:
        raise NotReadyError("a replica has ended without an answer") from None
    except BaseException:
        responses.cancel()
        raise
    if not messages[-1].get("more_body", False):
        return _whole(messages)
    return _as_sent(StreamingResponse(_rest(messages[1:], parts, responses)), messages[0])


async def _rest(
    messages: list[Message], parts: AsyncIterator[list[Message]], responses: Any
) -> AsyncIterator[bytes]:
    try:
        for each in messages:
            yield each.get("body", b"")
        async for batch in parts:
            for each in batch:
                yield each.get("body", b"")
    finally:
        responses.cancel()


def _whole(messages: Sequence[Message]) -> Response:
    body = b"".join(each.get("body", b"") for each in messages[1:])
    return _as_sent(Response(body), messages[0])


def _as_sent(response: Response, start: Message) -> Response:
    """Give an answer the status and headers sent by a replica."""
    response.status_code = start["status"]
    # The front adds these again.
    response.raw_headers = [(n, v) for n, v in start["headers"] if n not in _SECURE]
    return response


class ReplicaNumbers(Collector):
    """The metrics of all replicas, labelled by replica."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts

    def collect(self) -> Iterator[Metric]:
        """Yield each metric of all replicas."""
        families: dict[str, Metric] = {}
        for replica, text in self.texts.items():
            for own in text_string_to_metric_families(text):
                family = families.setdefault(
                    own.name, Metric(own.name, own.documentation, own.type)
                )
                for sample in own.samples:
                    labels = {**sample.labels, "replica": replica}
                    family.add_sample(sample.name, labels, sample.value)
        yield from families.values()
