"""The two parts of a server on a cluster, without one: what is handed on, and what returns."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from adapterhub.errors import ConfigError, ServingError
from adapterhub.ray_cluster import import_serve
from adapterhub.serving import ray_front
from adapterhub.serving.http.request import RequestLimits
from adapterhub.serving.options import ServeOptions
from adapterhub.serving.ray_front import Front, Replica, ReplicaEngine
from adapterhub.web.errors import NotReadyError
from adapterhub.web.frame import Endpoint
from adapterhub.web.tokens import AccessToken

exceptions = pytest.importorskip("ray.exceptions")

START = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}
SECURE = (b"cache-control", b"no-store")


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Responses:
    """What Ray Serve returns: batches of messages, or an error where one is."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.cancelled = batches, False

    async def __aiter__(self) -> AsyncIterator[Any]:
        for batch in self.batches:
            if isinstance(batch, BaseException):
                raise batch
            if batch == "wait":
                await asyncio.sleep(60)
            yield batch

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A handle whose replicas answer in turn; each call gets what the next one of them says."""

    def __init__(self, *answers: list[Any], alive: bool = True) -> None:
        self.answers, self.asked, self.alive = list(answers), [], alive
        self.responses: list[Responses] = []

    def options(self, **options: Any) -> Handle:
        self.asked.append(options["multiplexed_model_id"])
        return self

    def remote(self, *given: Any) -> Responses:
        self.responses.append(Responses(self.answers.pop(0)))
        return self.responses[-1]

    def broadcast(self, method: str, *given: Any) -> Any:
        return SimpleNamespace(results=lambda timeout_s: [(1, "node")] * self.alive)


def call(body: bytes = b"{}", deadline: float = 30.0, **params: str) -> Any:
    scope = {"type": "http", "path": "/", "headers": [(b"authorization", b"Bearer secret")]}
    request = SimpleNamespace(scope=scope)
    service = SimpleNamespace(limits=RequestLimits(deadline=deadline))
    return SimpleNamespace(
        request=request, token=None, raw_body=body, values=params, service=service
    )


def ask(handle: Handle, given: Any = None) -> Any:
    front = Front(ReplicaEngine(handle, lambda: None))
    return asyncio.run(front.to_one(given or call()))


def test_a_whole_answer_is_what_the_replica_has_sent():
    start = {**START, "status": 404, "headers": [(b"a", b"b"), SECURE]}
    answer = ask(Handle([[start, part(b"one")]]))
    assert (answer.status_code, answer.body) == (404, b"one")
    assert answer.raw_headers == [(b"a", b"b")], "the front adds the others"


def test_a_stream_is_handed_on_and_ends_with_its_client():
    async def read(parts: int) -> tuple[list[bytes], Responses]:
        handle = Handle([[START], [part(b"1", more=True)], [part(b"2", more=True), part(b"3")]])
        answer = await Front(ReplicaEngine(handle, lambda: None)).to_one(call())
        found = []
        async for each in answer.body_iterator:
            found.append(each)
            if len(found) == parts:
                break
        await answer.body_iterator.aclose()
        return found, handle.responses[0]

    assert asyncio.run(read(3))[0] == [b"1", b"2", b"3"]
    found, responses = asyncio.run(read(1))
    assert found == [b"1"]
    assert responses.cancelled


def test_what_no_byte_was_sent_of_is_asked_again_but_not_forever():
    whole = [[START, part(b"one")]]
    dead = exceptions.ActorDiedError
    handle = Handle([dead()], [[START], dead()], whole)
    assert ask(handle).body == b"one"
    with pytest.raises(NotReadyError, match="have died"):
        ask(Handle([dead()], [dead()], [dead()], whole))
    with pytest.raises(NotReadyError, match="without an answer"):
        ask(Handle([]))


def test_a_client_waits_only_while_there_are_replicas():
    assert ask(Handle([[START, part(b"one")]], alive=False)).body == b"one"
    waiting = Handle(["wait"], alive=False)
    with pytest.raises(NotReadyError, match="none is there yet"):
        ask(waiting, call(deadline=0.01))
    assert waiting.responses[0].cancelled


@pytest.mark.parametrize(
    ("params", "body", "expected"),
    [
        ({}, b'{"inputs": ["a"], "model" : "polite@3"}', "polite@3"),
        ({"reference": "hf:acme/polite"}, b'{"model": "x"}', "hf:acme/polite"),
        ({"name": "polite", "version": "3"}, b"", "polite"),
        ({}, b'{"inputs": ["a"]}', ""),
        ({}, b'{"model": "' + b"x" * 600 + b'"}', ""),
        ({}, b'{"model": "\xff"}', "\ufffd"),
    ],
)
def test_the_adapter_is_guessed(params, body, expected):
    assert ray_front.adapter_hint(params, body) == expected
    handle = Handle([[START, part(b"")]])
    ask(handle, call(body, **params))
    assert handle.asked == [expected]


def test_a_replica_gets_what_a_token_allows_and_not_the_token():
    token = AccessToken("a", "0" * 64, ("predict",), ("polite-*",), "2026-01-01T00:00:00Z")
    headers = [(b"authorization", b"Bearer ah_secret"), (b"accept", b"*/*")]
    assert ray_front.forwarded(None, headers) == [(b"accept", b"*/*")]
    accept, (name, value) = ray_front.forwarded(token, headers)
    assert accept == (b"accept", b"*/*")
    assert name == b"authorization"
    assert b"secret" not in value
    assert ray_front.ForwardedTokens().check(value.decode().removeprefix("Bearer ")) == token


def endpoint(path: str, role: str) -> Endpoint:
    async def answer(call: Any) -> dict[str, Any]:
        return {}

    return Endpoint("POST", path, answer, role, summary="")


def test_what_changes_something_goes_to_all_replicas_and_the_first_failure_is_the_answer():
    front = Front(ReplicaEngine(Handle(), lambda: None))
    given = [endpoint("/v1/predict", "predict"), endpoint("/v1/load_lora_adapter", "admin"),
             endpoint("/metrics", "admin"), endpoint("/admin/refresh", "admin")]  # fmt: skip
    answers = [each.answer for each in front.endpoints(given)]
    assert answers == [front.to_one, front.to_all, front.metrics, given[3].answer]
    failed = {**START, "status": 404}
    engine = ReplicaEngine(Handle(), lambda: None)
    engine.all = lambda *given: [[START, part(b"1")], [failed, part(b"2")]]
    answer = asyncio.run(Front(engine).to_all(call()))
    assert (answer.status_code, answer.body) == (404, b"2")


def test_a_node_with_another_version_is_refused_and_a_missing_extra_named(monkeypatch):
    with pytest.raises(ServingError, match=r"a node has adapterhub .*started with 0\.0\.1"):
        Replica(ServeOptions(), ("0.0.1", "."), False, 1)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "adapterhub\[serve,ray-serve\]"'):
        import_serve()


def test_numbers_of_replicas_are_one_group_each_with_a_label():
    registry = CollectorRegistry()
    text = '# HELP a_b_total Said.\n# TYPE a_b_total counter\na_b_total{{path="/x"}} {}\n'
    registry.register(ray_front.ReplicaNumbers({"r1": text.format(1), "r2": text.format(2)}))
    lines = generate_latest(registry).decode().splitlines()
    assert lines == [
        "# HELP a_b_total Said.",
        "# TYPE a_b_total counter",
        'a_b_total{path="/x",replica="r1"} 1.0',
        'a_b_total{path="/x",replica="r2"} 2.0',
    ]


def replica_of(app: Callable[..., Any]) -> tuple[Replica, list[str]]:
    """Return a replica with an application, and the adapters that it says it has."""
    replica, noted = Replica.__new__(Replica), []

    async def note(model: str) -> None:
        noted.append(model)

    replica.app, replica.note = app, note
    return replica, noted


async def answers_of(replica: Replica, body: bytes = b"x", model: str = "polite") -> list[Any]:
    return [each async for each in replica.answer({"type": "http"}, body, model)]


def test_a_replica_answers_in_as_few_messages_as_there_are():
    """It has an adapter that it has answered with, and none without."""

    async def app(scope, receive, send):
        body = (await receive())["body"]
        await send(START)
        await send(part(body, more=True))
        await asyncio.sleep(0.01)
        await send(part(b"end"))

    async def missing(scope, receive, send):
        await send({**START, "status": 404})
        await send(part(b""))

    async def broken(scope, receive, send):
        raise ValueError("broken")

    replica, noted = replica_of(app)
    assert asyncio.run(answers_of(replica)) == [[START, part(b"x", more=True)], [part(b"end")]]
    assert noted == ["polite"]
    replica, noted = replica_of(app)
    assert len(asyncio.run(replica.answer_whole({}, b"x"))) == 3
    assert noted == []
    replica, noted = replica_of(missing)
    asyncio.run(answers_of(replica))
    assert noted == []
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(answers_of(replica_of(broken)[0]))
