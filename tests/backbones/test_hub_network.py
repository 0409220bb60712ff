"""The guard of connections to a hub: origins, redirects, sessions and slow bodies.

tests/attacks/test_hostile_hub.py has the attacks."""

import contextlib
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, get_session, set_client_factory
from huggingface_hub.utils import _http as hub_http

from adapterhub.backbones import hub_network
from adapterhub.errors import BackboneError
from tests.kit import fake_hub


def test_the_origin_of_a_url():
    origins = [
        ("https://Hub.Example.org/a/b?c#d", "https://hub.example.org"),
        ("https://hub.example.org:443", "https://hub.example.org"),
        ("http://hub.example.org:443", "http://hub.example.org:443"),
        ("http://localhost:80/x", "http://localhost"),
        ("https://[::1]:8443/x", "https://[::1]:8443"),
    ]
    assert [(url, hub_network.url_origin(url)) for url, _ in origins] == origins


WITHOUT_ORIGIN = (
    ["", "x", "//h.org", "https://", "https:///x", "ftp://h.org", "file:///etc/passwd",
     "https://user@h.org", "https://user:pw@h.org", "https://@h.org", "https://h.org:x",
     "https://h.org:99999", "https://[::1", "https://h.org\\@e.org", "https://h.org\n",
     "https://h.org/\x1b", "https://h org", "https://h\u00e9.org", "https://h.org/" + "a" * 9000,
     "https://h,org", "javascript:alert(1)"]
)  # fmt: skip


@pytest.mark.parametrize("url", WITHOUT_ORIGIN, ids=lambda url: ascii(url[:40]))
def test_a_text_without_an_origin(url):
    with pytest.raises(hub_network.ForbiddenAddressError):
        hub_network.url_origin(url)


Reach = hub_network.Reach
REACHES = {
    Reach.PUBLIC: ["8.8.8.8", "2606:4700::1111"],
    Reach.LOOPBACK: ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "0.0.0.0", "localhost",
                     "a.localhost"],
    Reach.PRIVATE: ["10.0.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "fe80::1%eth0",
                    "fd00::1", "::ffff:10.0.0.1"],
    # Numbers are names for this module; the address is checked when it is connected.
    None: ["hub.example.org", "127.1", "2130706433"],
}  # fmt: skip


@pytest.mark.parametrize("reach", REACHES)
def test_the_reach_of_an_address(reach):
    assert {host: hub_network.reach_of(host) for host in REACHES[reach]} == dict.fromkeys(
        REACHES[reach], reach
    )


PUBLIC, PRIVATE, LOCAL = "https://8.8.8.8", "https://10.0.0.1", "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("base", "url", "allowed"),
    [
        (PUBLIC, "https://cdn.example.org/x", True),
        (PUBLIC, "http://cdn.example.org/x", False),
        (PUBLIC, "https://10.0.0.2/x", False),
        (PUBLIC, "https://127.0.0.1/x", False),
        (PUBLIC, f"{PUBLIC}/x", True),
        (PRIVATE, "https://10.0.0.2/x", True),
        (PRIVATE, "https://cdn.example.org/x", True),
        (PRIVATE, "https://localhost/x", False),
        (LOCAL, "http://localhost:9000/x", True),
        (LOCAL, "https://10.0.0.2/x", True),
        (LOCAL, "http://10.0.0.2/x", False),
        (LOCAL, "http://cdn.example.org/x", False),
    ],
)
def test_where_a_redirect_may_lead(base, url, allowed):
    with contextlib.nullcontext() if allowed else pytest.raises(hub_network.ForbiddenAddressError):
        hub_network.HubNetwork(base).check(url)


def connect(network, url, host, address):
    """Report a connection to the network's callback; return whether it was closed."""
    closed = []
    stream = SimpleNamespace(
        get_extra_info=lambda _: (address, 443), close=lambda: closed.append(1)
    )
    callback = network.trace(url)
    callback("connection.connect_tcp.started", {"host": host, "port": 443})
    try:
        callback("connection.connect_tcp.complete", {"return_value": stream})
    except hub_network.ForbiddenAddressError:
        assert closed
    return bool(closed)


CDN, STORE = "cdn.example.org", "store.lan"


@pytest.mark.parametrize(
    ("hub", "connections", "reach"),
    [
        # Whether a connection to a host at an address is closed, one after the other.
        (
            "hub.example.org",
            [("hub.example.org", "8.8.8.8", False), (CDN, "10.0.0.1", True),
             (CDN, "127.0.0.1", True), (CDN, "9.9.9.9", False)],
            Reach.PUBLIC,
        ),
        # It cannot come closer by changing its address.
        (
            "hub.example.org",
            [("hub.example.org", "127.0.0.1", None), ("hub.example.org", "8.8.8.8", None),
             ("hub.example.org", "127.0.0.1", None), (CDN, "10.0.0.1", True)],
            Reach.PUBLIC,
        ),
        # One in the own network leads to its own object store.
        (
            "hub.lan",
            [("hub.lan", "10.0.0.1", None), (STORE, "10.0.0.2", False), (STORE, "127.0.0.1", True)],
            Reach.PRIVATE,
        ),
    ],
)  # fmt: skip
def test_the_address_of_the_peer_counts(hub, connections, reach):
    network = hub_network.HubNetwork(f"https://{hub}")
    for host, address, closed in connections:
        found = connect(network, f"https://{host}/x", host, address)
        assert closed in (None, found), (host, address)
    assert network.reach == reach
    # A proxy is the user's own choice.
    assert not connect(network, f"https://{CDN}/x", "proxy.lan", "10.0.0.1")


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with fake_hub.attacking() as server:
        server.attack = fake_hub.on("", fake_hub.body({"id": "a/b", "sha": "a" * 40}))
        yield server


def test_the_session_is_guarded_inside_and_as_before_outside(hub):
    factory = hub_http._GLOBAL_CLIENT_FACTORY
    with hub_network.guarded_hub(hub.address):
        with hub_network.guarded_hub(hub.address):
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
        with hub_network.guarded_hub(hub.address):
            assert get_session() is made[-1]
        assert hub_http._GLOBAL_CLIENT_FACTORY is factory
    finally:
        set_client_factory(previous)


@pytest.mark.parametrize("endpoint", ["ftp://x", "https://me:pw@h.org", "x"])
def test_an_endpoint_without_an_origin_is_an_error(endpoint):
    with pytest.raises(BackboneError, match="HF_ENDPOINT"), hub_network.guarded_hub(endpoint):
        pass
