"""Writing to a hub: its errors, without its words where they repeat the token."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from adapterhub.errors import ConfigError, RegistryError
from adapterhub.registry.hub_writer import HubWriter
from tests.kit import fake_hub

TOKEN = "hf_AbCdEfGhIjKl"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with fake_hub.attacking() as server:
        yield server


def writer(hub, token=TOKEN):
    return HubWriter(hub.address, token, "hf:")


def test_a_repository_a_commit_and_a_tag(hub):
    writing = writer(hub)
    writing.create("acme/a", private=True)
    repository = hub.repositories["acme/a"]
    commit = writing.commit("acme/a", {"x": b"1"}, "Publish", repository.commits[-1][0])
    writing.create_tag("acme/a", "v1", commit)
    assert repository.private
    assert repository.tags == {"v1": commit}
    writing.delete_tag("acme/a", "v1")
    assert repository.tags == {}
    assert set(hub.authorizations) == {f"Bearer {TOKEN}"}


def test_no_token_is_no_token(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    writer(hub, None).create("acme/a", private=False)
    assert set(hub.authorizations) == {None}


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "", "adapterhub login http://127.0.0.1"),
        (404, "RepoNotFound", "you have no access"),
        (403, "", "lacks the permission"),
        (403, "GatedRepo", "gated"),
        (409, "", "another writer"),
        (412, "", "another writer"),
        (418, "", "repeats your token"),
    ],
)
def test_errors_are_explained(hub, status, code, words):
    hub.attack = fake_hub.on("", fake_hub.echo(status, code))
    with pytest.raises(RegistryError) as caught:
        writer(hub).create_tag("acme/a", "v1", "a" * 40)
    assert words in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_servers_own_words_are_shown_in_part(hub):
    hub.attack = fake_hub.on(
        "", lambda h: h.send(418, b'{"error": "%s"}' % (b"too large " * 99), {})
    )
    with pytest.raises(RegistryError, match="answered 418: too large") as caught:
        writer(hub).create_tag("acme/a", "v1", "a" * 40)
    assert len(caught.value.problem) < 400


def test_an_invalid_name_and_an_unreachable_hub(hub, monkeypatch):
    with pytest.raises(ConfigError, match="invalid repository name"):
        writer(hub).create_tag("a..b/c", "v1", "a" * 40)
    hub.address = "http://127.0.0.1:9"
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(RegistryError, match="cannot be reached"):
        writer(hub).create("acme/a", private=False)
