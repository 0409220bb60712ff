"""The HTTP client for hubs; tests/attacks/test_hostile_hub.py has the attacks on it."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading

import pytest
from huggingface_hub import constants, get_session
from huggingface_hub.errors import HTTPError

from adapterhub.backbones.hub_network import guarded_hub
from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.registry import hub_client
from adapterhub.registry.hub_client import (
    Expected,
    HubClient,
    MissingFileError,
    UnreachableError,
    network_hint,
)
from tests.kit import fake_hub
from tests.kit.selection import long_table

DATA = bytes(range(256)) * 400


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_client, "_WAITS", (0.0, 0.0, 0.0))
    with fake_hub.attacking() as server:
        made = server.repositories["acme/a"] = fake_hub.Repository()
        made.tags["v1"] = made.commit({"file": DATA})
        yield server


def download(hub, path, **expected):
    HubClient(hub.address).download(
        "/acme/a/resolve/v1/file", path, Expected(len(DATA), **expected), "acme/a"
    )


EXPECTED = (
    {"size": len(DATA)},
    {"sha256": hashlib.sha256(DATA).hexdigest()},
    {"git_sha1": fake_hub.git_sha1(DATA)},
)


def test_an_answer_has_a_limit_and_the_query_and_the_token_are_sent(hub):
    client = HubClient(f"{hub.address}/", "secret-token")
    assert client.read("/acme/a/resolve/v1/file", len(DATA), "acme/a") == DATA
    with pytest.raises(RegistryError, match="more than the 99 bytes"):
        client.read("/acme/a/resolve/v1/file", 99, "acme/a")
    hub.attack = lambda handler: fake_hub.body(handler.path.encode())(handler) or True
    assert client.read("/x", 99, "x", (("filter", "a:b/c"), ("n", "1"))) == (
        b"/x?filter=a%3Ab%2Fc&n=1"
    )
    assert set(hub.authorizations) == {"Bearer secret-token"}


@pytest.mark.parametrize("expected", EXPECTED, ids=str)
def test_a_download_is_verified(hub, tmp_path, expected):
    download(hub, tmp_path / "a", **expected)
    assert (tmp_path / "a").read_bytes() == DATA
    files = hub.repositories["acme/a"].commits[0][1]
    files["file"] = DATA[:-2]
    with pytest.raises((FileError, RegistryError)):
        download(hub, tmp_path / "b", **expected)


def test_a_download_goes_on_where_it_was_cut_or_without_ranges_begins_again(hub, tmp_path):
    cuts, client = iter((100, 5000, 0)), HubClient(hub.address)
    expected = Expected(len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
    for attack in (
        lambda handler: setattr(hub, "cut_after", next(cuts, None)),
        lambda handler: handler.headers.__delitem__("Range"),
    ):
        hub.attack, hub.cut_after, counts = attack, 100, []
        client.download("/acme/a/resolve/v1/file", tmp_path / "a", expected, "a", counts.append)
        assert (tmp_path / "a").read_bytes() == DATA
        assert sum(counts) == len(DATA)
        (tmp_path / "a").unlink()
    assert hub.resumed_at == [100, 5100, 5100]


def test_the_attempts_are_counted_from_the_last_progress(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_client, "_PROGRESS_BYTES", 10_000)
    hub.attack = lambda handler: setattr(hub, "cut_after", 11_000)
    download(hub, tmp_path / "a")
    assert len(hub.resumed_at) == len(DATA) // 11_000
    hub.attack = lambda handler: setattr(hub, "cut_after", 9_000)
    with pytest.raises(UnreachableError, match="try again"):
        download(hub, tmp_path / "b")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_overload_is_waited_for(hub, status):
    answers = iter((True, True))
    refuse = fake_hub.echo(status)
    hub.attack = lambda handler: next(answers, False) and (refuse(handler) or True)
    assert HubClient(hub.address).read("/acme/a/resolve/v1/file", 1 << 20, "a") == DATA
    assert len(hub.requests) == 3


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(401, "", "you have no access"), (404, "RepoNotFound", "you have no access"),
     (404, "", "you have no access"), (404, "RevisionNotFound", "no such version"),
     (403, "GatedRepo", "gated"), (403, "", "needs a token"), (410, "", "answered 410"),
     (206, "", "answered 206")],
)  # fmt: skip
def test_a_refusal_is_explained_without_the_servers_words(hub, status, code, words):
    hub.attack = fake_hub.on("", fake_hub.echo(status, code))
    with pytest.raises(RegistryError, match=words):
        HubClient(hub.address).read("/x", 99, "acme/a")


def test_a_missing_file_and_a_missing_hub_are_told_apart(hub, monkeypatch):
    with pytest.raises(MissingFileError):
        HubClient(hub.address).read("/acme/a/resolve/v1/other", 99, "acme/a")
    with pytest.raises(UnreachableError):
        HubClient("http://127.0.0.1:9").read("/x", 99, "acme/a")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    with pytest.raises(UnreachableError, match="HF_HUB_OFFLINE"):
        HubClient(hub.address).read("/x", 99, "acme/a")
    assert hub.requests == []


def test_no_thread_or_connection_is_left(hub):
    threads = threading.active_count()
    client = HubClient(hub.address)
    for _ in range(20):
        client.read("/acme/a/resolve/v1/file", 1 << 20, "a")
    assert threading.active_count() <= threads + 20  # those of the server here
    assert not [t for t in threading.enumerate() if "_watch" in t.name]


@pytest.mark.parametrize("base", ["", "h.org", "ftp://h.org", "https://me:pw@h.org"])
def test_a_malformed_endpoint_is_an_error(base):
    with pytest.raises(ConfigError, match="HF_ENDPOINT"):
        HubClient(base)
    assert hub_client.login_hint("https://huggingface.co") == "hf auth login, or set HF_TOKEN"
    assert hub_client.login_hint("https://h.org:443/x") == "adapterhub login https://h.org"


_UNUSABLE = (
    "socks5://u:secret@127.0.0.1:9", "socks5h://127.0.0.1:9", "socks4://127.0.0.1:9", "socks://h",
    "ftp://127.0.0.1:9", "http://[bad", "http://h:port", "http://", " http://h:9", "http://h h",
)  # fmt: skip
_DEAD = ("http://127.0.0.1:9", "127.0.0.1:9", "http://u:secret@127.0.0.1:9", "https://127.0.0.1:9")
_EXCLUDED = ("127.0.0.1", "localhost, 127.0.0.1", "*", "127.0.0.1:{port}", "127.0.0.0/8")


@pytest.fixture
def by_guard(hub, monkeypatch):
    """Ask the hub by huggingface_hub's client, as `push` and backbones do."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def ask():
        try:
            with guarded_hub(hub.address):
                get_session().get(f"{hub.address}/acme/a/resolve/v1/file").raise_for_status()
        except HTTPError as error:
            raise RegistryError(type(error).__name__, hint=network_hint(hub.address)) from None

    return ask


@long_table(
    ("name", "proxy"), itertools.product(["ALL_PROXY", "http_proxy"], [*_UNUSABLE, *_DEAD]), 3
)
def test_a_proxy_of_the_environment(hub, by_guard, monkeypatch, subtests, name, proxy):
    for variable in [v for v in os.environ if v.lower().endswith("_proxy")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(name, proxy)
    clients = {
        "own": lambda: HubClient(hub.address).read("/acme/a/resolve/v1/file", 1 << 20, "acme/a"),
        "huggingface_hub": by_guard,
    }
    for client, ask in clients.items():
        with subtests.test(client=client), pytest.raises(RegistryError) as caught:
            ask()
        assert name in caught.value.hint
        assert "NO_PROXY" in caught.value.hint
        assert "secret" not in str(caught.value)
        assert ("pip install socksio" in caught.value.hint) == proxy.startswith("socks5")
        assert os.environ[name] == proxy
        for excluded in _EXCLUDED:
            with subtests.test(client=client, excluded=excluded), monkeypatch.context() as patch:
                port = hub.address.rpartition(":")[2]
                patch.setenv("NO_PROXY", excluded.format(port=port))
                ask()
