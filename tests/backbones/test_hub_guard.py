"""The guard of huggingface_hub's session; tests/attacks/test_hostile_hub.py has the attacks."""

from __future__ import annotations

import threading

import pytest
from huggingface_hub import HfApi, constants, get_session, set_client_factory
from huggingface_hub.utils import _http as hub_http

from adapterhub.backbones import hub_network
from adapterhub.backbones.hub_network import guarded_hub
from adapterhub.errors import BackboneError
from tests.kit import fake_hub


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with fake_hub.attacking() as server:
        server.attack = fake_hub.on("", fake_hub.body({"id": "a/b", "sha": "a" * 40}))
        yield server


def test_the_session_is_guarded_inside_and_as_before_outside(hub):
    factory = hub_http._GLOBAL_CLIENT_FACTORY
    with guarded_hub(hub.address):
        with guarded_hub(hub.address):
            inner = get_session()
        assert get_session() is inner
        assert hub_network._check_response in inner.event_hooks["response"]
        assert inner.timeout.read == hub_network.TIMEOUT_SECONDS
    assert hub_network._check_response not in inner.event_hooks["response"]
    assert hub_http._GLOBAL_CLIENT_FACTORY is factory
    assert hub_network._check_response not in get_session().event_hooks["response"]


def test_the_users_own_session_is_used(hub):
    previous, made = hub_http._GLOBAL_CLIENT_FACTORY, []

    def factory():
        made.append(previous())
        return made[-1]

    set_client_factory(factory)
    try:
        with guarded_hub(hub.address):
            assert get_session() is made[-1]
        assert hub_http._GLOBAL_CLIENT_FACTORY is factory
    finally:
        set_client_factory(previous)


def test_threads_share_one_guard(hub):
    factory, barrier = hub_http._GLOBAL_CLIENT_FACTORY, threading.Barrier(4)

    def work():
        for _ in range(20):
            with guarded_hub(hub.address):
                pass
        with guarded_hub(hub.address):
            barrier.wait(10)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hub_http._GLOBAL_CLIENT_FACTORY is factory
    assert hub_network._active == hub_network._guarded_clients == []


def test_a_token_is_sent_to_the_endpoint_alone(hub):
    with fake_hub.attacking() as other:
        other.attack = hub.attack
        for server in (hub, other):
            with guarded_hub(hub.address):
                HfApi(endpoint=server.address, token="hf_secret").model_info("a/b")
    assert hub.authorizations == ["Bearer hf_secret"]
    assert other.authorizations == [None]


def test_slow_bodies_end(hub, monkeypatch):
    monkeypatch.setattr(hub_network, "GRACE_SECONDS", 0.2)
    start = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    hub.attack = fake_hub.on("", fake_hub.drip(start))
    with (
        guarded_hub(hub.address),
        pytest.raises(BackboneError, match="less than 4096 bytes per second"),
    ):
        HfApi(endpoint=hub.address, token=False).model_info("a/b")


@pytest.mark.parametrize("endpoint", ["ftp://x", "https://me:pw@h.org", "x"])
def test_an_endpoint_without_an_origin_is_an_error(endpoint):
    with pytest.raises(BackboneError, match="HF_ENDPOINT"), guarded_hub(endpoint):
        pass
