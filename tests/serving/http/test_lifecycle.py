"""The life of a server: its options, what it loads and warms, and how connections and it end."""

import asyncio
import socket
import time
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest
from starlette.responses import StreamingResponse

import adapterhub as ah
from adapterhub.errors import AdapterhubError, ConfigError, NotPublishedError
from adapterhub.registry.local import LocalRegistry
from adapterhub.serving.http import lifecycle as http_server
from adapterhub.serving.http.lifecycle import HttpServer, check_all, open_service
from adapterhub.serving.options import ServeOptions, read_serve_options
from adapterhub.serving.shared_backbone import SharedBody
from adapterhub.web import connections
from adapterhub.web.frame import Endpoint
from adapterhub.web.tokens import TokenFile
from tests.kit.server import EXAMPLES, TEXTS, started, write_adapter
from tests.kit.session import wait_until
from tests.kit.web_servers import ask, predict


@pytest.fixture(scope="module")
def registry(backbone, tmp_path_factory):
    root = tmp_path_factory.mktemp("lifecycle")
    for seed, example in enumerate((EXAMPLES[0], EXAMPLES[4], EXAMPLES[5])):
        folder = write_adapter(backbone, root / example.task, example=example, seed=seed)
        ah.publish(folder, example.task, registry=root / "registry")
    return root / "registry"


def test_named_adapters_are_loaded_and_each_length_is_warm(registry, tmp_path, backbone):
    folder = write_adapter(backbone, tmp_path / "mine", seed=5)
    named = ("classification", "tags=tagging@1", folder)
    given = {"adapters": named, "registry": str(registry), "backbone": str(backbone)}
    with started(**given) as (url, server, _):
        loaded = {use.reference for use in server.service.engine.models()}
        assert loaded >= {"classification@v1", "tagging@v1", folder}
        assert server.service.engine.counts["answers"] == 2 * len(http_server._WARM_WORDS)
        assert predict(url, "mine", TEXTS[0]).json["model"] == "mine"
        assert predict(url, "tags", TEXTS[0]).json["model"] == "tagging@v1"
        assert predict(url, "classification@v1", TEXTS[0]).status == 200
        assert "vector" in predict(url, backbone.name, TEXTS[0]).json["predictions"][0]
        for model in (str(backbone), "reranking", "tagging", "tagging@1", folder):
            assert predict(url, model, TEXTS[0]).status == 404


def test_all_that_the_registry_has_for_the_backbone(registry, backbone):
    with started(registry=str(registry), refresh="0.1s") as (url, server, _):
        assert server.service.allowed.names == ["classification", "reranking", "tagging"]
        assert [use.reference for use in server.service.engine.models()] == ["classification@v1"]
        assert server.service.engine.counts["answers"] == len(http_server._WARM_WORDS)
        assert predict(url, "tagging", TEXTS[0]).status == 200
        store = LocalRegistry(registry)
        before = predict(url, "classification", TEXTS[0]).json
        folder = write_adapter(backbone, registry.parent / "new", seed=9)
        ah.publish(folder, "classification", registry=registry)
        ah.publish(folder, "later", registry=registry)
        wait_until(lambda: "later" in server.service.allowed.names)
        wait_until(lambda: predict(url, "classification", TEXTS[0]).json["model"][-1] == "2")
        after = predict(url, "classification", TEXTS[0]).json
        assert after["predictions"] != before["predictions"]
        store.delete("classification", "v2")
        store.delete("later", "v1")


def test_what_cannot_be_served_is_told_first(registry):
    service = open_service(ServeOptions(registry=str(registry)))
    service.list_published()
    assert check_all(service) == {}
    assert service.engine.counts["answers"] == 3
    service.engine.close()
    service = open_service(ServeOptions(("nothing", "tagging"), registry=str(registry)))
    assert [*check_all(service)] == ["nothing"]
    service.engine.close()
    with started(adapters=("tagging", "nothing"), registry=str(registry)) as (url, _, errors):
        assert not url
    assert isinstance(errors[0], NotPublishedError)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ServeOptions(("tagging",), registry=str(registry), port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen at"):
            HttpServer(open_service(options), options, print).run()


def test_others_need_tokens_and_names_are_valid(registry, tmp_path):
    (tmp_path / "mod\u00e8le").mkdir()
    file = tmp_path / "tokens.json"
    for names, more, words in (
        ((), {"host": "0.0.0.0"}, r"others can reach 0\.0\.0\.0"),
        ((), {"tokens": str(file)}, "has no tokens"),
        ((f"{tmp_path}/mod\u00e8le",), {}, "is not a valid name for clients"),
        (("a b=polite",), {}, "is not a valid name for clients"),
        (("a=polite", "a=other"), {}, "two adapters have the name 'a'"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_service(ServeOptions(names, registry=str(registry), **more))
    token = TokenFile(file).create("one")
    with started(registry=str(registry), tokens=str(file)) as (url, _, _):
        assert predict(url, "tagging", TEXTS[0]).status == 401
        assert predict(url, "tagging", TEXTS[0], token=token).status == 200
        assert ask(url, "/metrics").status == 401
    assert TokenFile(file).tokens()[0].used


def test_a_registry_of_several_backbones_needs_one_named(registry, tmp_path, backbones):
    folder = write_adapter(backbones("llama"), tmp_path / "llama")
    other = tmp_path / "registry"
    ah.publish(folder, "one", registry=other)
    ah.publish(str(registry.parent / "tagging"), "two", registry=other)
    ah.publish(str(registry.parent / "tagging"), "both", registry=other)
    ah.publish(folder, "both", registry=other)
    with pytest.raises(ConfigError, match="adapters for 2 backbones"):
        open_service(ServeOptions(registry=str(other)))
    with started(registry=str(other), backbone=str(backbones("llama"))) as (url, server, _):
        assert server.service.allowed.listed == ("both", "one")
        one, both = (predict(url, name, TEXTS[0]) for name in ("one", "both"))
        assert (one.status, both.json["predictions"]) == (200, one.json["predictions"])
        assert server.service.refresh() == 0
        assert predict(url, "two", TEXTS[0]).status == 409


def test_a_compute_thread_that_dies_ends_the_server(registry, monkeypatch):
    monkeypatch.setattr(http_server, "_LAST_ANSWERS", 1.5)
    with started(adapters=("tagging",), registry=str(registry)) as (url, _, errors):

        def die(self, asked):
            raise KeyboardInterrupt("by a test")

        monkeypatch.setattr(SharedBody, "compute", die)
        for _ in range(2):
            assert predict(url, "tagging", TEXTS[0]).status == 503
        for path in ("/healthz", "/readyz"):
            assert ask(url, path).status == 503
        assert b"adapterhub_up 0.0" in ask(url, "/metrics").data
        wait_until(lambda: errors)
    assert isinstance(errors[0], AdapterhubError)
    assert "KeyboardInterrupt: by a test" in str(errors[0])


def ends(client):
    """Return whether a connection ends, by its end or by a reset, however much is read before."""
    with suppress(ConnectionError):
        while client.recv(1 << 20):
            pass
    return True


@contextmanager
def streaming(registry, monkeypatch, **given):
    """Run a server with an endpoint that sends without an end."""
    sent = []

    async def answer(call):
        async def pieces():
            while True:
                sent.append(1)
                yield b"x" * 65536
                await asyncio.sleep(0)

        return StreamingResponse(pieces())

    endpoint = Endpoint("GET", "/stream", answer, summary="Send")
    monkeypatch.setattr(http_server, "ENDPOINTS", (*http_server.ENDPOINTS, endpoint))
    with started(adapters=("tagging",), registry=str(registry), **given) as (url, _, _):
        yield url, sent


def test_a_slow_reader_is_dropped_and_another_stays(registry, monkeypatch):
    request = b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with streaming(registry, monkeypatch, write_timeout="0.3s") as (url, sent):
        address = "127.0.0.1", urlsplit(url).port
        with socket.create_connection(address) as client:
            client.sendall(request)
            dropped = 'adapterhub_errors_total{adapter="",path="/stream",status="499"'
            wait_until(lambda: dropped in ask(url, "/metrics").data.decode())
            assert sent
            client.settimeout(10)
            assert ends(client)
        with socket.create_connection(address, timeout=10) as client:
            client.sendall(request)
            until = time.monotonic() + 0.6
            while time.monotonic() < until:
                assert client.recv(1 << 20)


def test_a_head_that_does_not_end(registry, monkeypatch):
    """It is dropped when it is too large, and when it takes too long."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
    with started(adapters=("tagging",), registry=str(registry)) as (url, _, _):
        address = ("127.0.0.1", urlsplit(url).port)
        with socket.create_connection(address) as client:
            client.settimeout(10)
            client.sendall(b"GET /healthz HTTP/1.1\r\n")
            with suppress(ConnectionError):
                for _ in range(100):
                    client.sendall(b"x-more: " + b"a" * 1000 + b"\r\n")
                    time.sleep(0.001)
            assert ends(client)
        began = time.monotonic()
        with socket.create_connection(address) as client:
            client.settimeout(10)
            client.sendall(b"GET /healthz HTTP/1.1\r\n")
            assert ends(client)
        assert time.monotonic() - began < 5
        assert ask(url, "/healthz").status == 200


# What `adapterhub serve` can be told


def test_flags_are_taken_before_the_file_and_what_is_not_valid_is_told(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("adapters: [polite@3, shop=./run]\nport: 9000\nadapter_memory: 1.5GiB\n")
    options = read_serve_options(str(file), {"port": 9001, "refresh": "off"})
    assert (options.adapters, options.port) == (("polite@3", "shop=./run"), 9001)
    assert options.size("adapter_memory") == 3 << 29
    assert (options.seconds("refresh"), options.seconds("deadline")) == (float("inf"), 30)
    for given, said in (
        ({"prot": 1}, "port"),
        ({"deadline": "soon"}, "'soon' is not a time"),
        ({"deadline": "off"}, "'off' is not a time"),
        ({"body": "large"}, "'large' is not a size"),
        ({"port": 70000}, "port: 70000, must be at least 0 and at most 65535"),
        ({"inputs": 0}, "inputs: 0, must be at least 1"),
        ({"metrics": "all"}, "metrics"),
    ):
        with pytest.raises(ConfigError) as error:
            read_serve_options(None, given)
        assert said in str(error.value)
