"""Writing to a hub: its errors, without its words where they repeat the token."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from adapterhub.errors import ConfigError, RegistryError
from adapterhub.registry.hub_writer import HubWriter, entry_from_card, hub_card
from adapterhub.registry.store import Entry
from tests.kit import fake_hub
from tests.kit.fake_hub import card_data

TOKEN = "hf_AbCdEfGhIjKl"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with fake_hub.attacking() as server:
        yield server


def writer(hub, token=TOKEN):
    return HubWriter(hub.address, token, "hf:")


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(401, "", "adapterhub login http://127.0.0.1"), (404, "RepoNotFound", "you have no access"),
     (403, "", "lacks the permission"), (403, "GatedRepo", "gated"), (409, "", "another writer"),
     (412, "", "another writer"), (418, "", "repeats your token")],
)  # fmt: skip
def test_errors_are_explained(hub, monkeypatch, status, code, words):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    writer(hub, None).create("acme/a", private=False)
    assert set(hub.authorizations) == {None}  # no token is no token
    hub.attack = fake_hub.on("", fake_hub.echo(status, code))
    with pytest.raises(RegistryError) as caught:
        writer(hub).create_tag("acme/a", "v1", "a" * 40)
    assert words in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_servers_own_words_are_shown_in_part(hub, monkeypatch):
    with pytest.raises(ConfigError, match="invalid repository name"):
        writer(hub).create_tag("a..b/c", "v1", "a" * 40)
    hub.attack = fake_hub.on(
        "", lambda h: h.send(418, b'{"error": "%s"}' % (b"too large " * 99), {})
    )
    with pytest.raises(RegistryError, match="answered 418: too large") as caught:
        writer(hub).create_tag("acme/a", "v1", "a" * 40)
    assert len(caught.value.problem) < 400
    hub.address = "http://127.0.0.1:9"
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(RegistryError, match="cannot be reached"):
        writer(hub).create("acme/a", private=False)


# The metadata of a card: an entry is written to it and read back.


ENTRY = Entry(
    reference="hf:acme/polite@v2", name="acme/polite", version="v2", digest="0" * 64,
    backbone="acme/bert", fingerprint=f"bf16-{'1' * 64}", methods=("lora", "norms"), task="tagging",
    metrics={"f1": 0.5}, tags=("best",), size=9, parameters=8, license="mit", language=("en",),
    topics=("manners",), description="Short.",
)  # fmt: skip


def test_an_entry_is_read_back_from_its_card():
    data = card_data({"README.md": hub_card(b"# Polite\n", ENTRY)})
    assert entry_from_card(data, "acme/polite", "hf:") == ENTRY
    copy = entry_from_card(data, "other/copy", "https://h.org/")
    assert (copy.name, copy.reference) == ("other/copy", "https://h.org/other/copy@v2")


def test_the_writers_text_and_metadata_are_kept():
    card = b"---\ninference: false\ntags: [mine]\n---\n# Polite\n\nMy text.\n"
    written = hub_card(card, ENTRY)
    data = card_data({"README.md": written})
    assert b"# Polite\n\nMy text." in written
    assert (data["inference"], data["base_model"]) == (False, "acme/bert")
    assert (data["base_model_relation"], data["library_name"]) == ("adapter", "adapterhub")
    assert {"mine", "adapterhub", "lora", "norms"} <= set(data["tags"])
    (result,) = data["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "f1", "value": 0.5}]
    assert data["adapterhub"]["digest"] == ENTRY.digest
    assert hub_card(written, ENTRY) == written


VALID = {"version": "v1", "digest": "0" * 64, "methods": ["lora"]}


WRONG = (
    None, "text", {}, {"version": "v1", "digest": "0" * 64}, VALID | {"digest": "0"},
    *(VALID | {"version": version} for version in ("v1\x1b[2J", ["v1"], "../../x", "main")),
    *(VALID | {"size": size} for size in (-1, 2**70, "1e9")),
    *(VALID | {"parameters": number} for number in (True, -1)),
    *(VALID | {"metrics": metrics} for metrics in ({"f1": float("nan")}, {"f1": "high"}, [1])),
    VALID | {"digest": "../x"}, VALID | {"task": ["x"]}, VALID | {"methods": 3},
    VALID | {"backbone": "a b\x07"}, VALID | {"description": ["x"]}, VALID | {"tags": "best"},
)  # fmt: skip


def test_an_unreadable_card_gives_no_entry():
    assert entry_from_card({"adapterhub": VALID}, "a/b", "hf:") is not None
    assert entry_from_card(None, "a/b", "hf:") is None
    for section in WRONG:
        assert entry_from_card({"adapterhub": section}, "a/b", "hf:") is None, section
