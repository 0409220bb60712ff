"""The metadata of a card: an entry is written to it and read back."""

from __future__ import annotations

import pytest
from hub_server import card_data

from adapterhub.registry.hub_card import entry_from_card, hub_card
from adapterhub.registry.store import Entry

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
    assert {"mine", "adapterhub", "lora", "norms"} <= set(data["tags"])
    assert hub_card(written, ENTRY) == written


FIELDS = {"version": "v1", "digest": "0" * 64, "methods": ["lora"], "fingerprint": "x-1"}


@pytest.mark.parametrize(
    "section",
    [
        None,
        "text",
        {},
        {key: value for key, value in FIELDS.items() if key != "methods"},
        *({**FIELDS, **change} for change in (
            {"methods": 3}, {"methods": "lora"}, {"tags": None}, {"metrics": {"f1": "high"}},
            {"metrics": [1]}, {"metrics": {"f1": float("nan")}}, {"version": "../../x"},
            {"version": "main"}, {"version": "v1\x1b[2J"}, {"digest": "../x"}, {"digest": 3},
            {"fingerprint": ""}, {"size": "3"}, {"size": -1}, {"size": 2**70}, {"parameters": True},
            {"task": ["x"]}, {"description": {}},
        )),
    ],
)  # fmt: skip
def test_an_unreadable_card_gives_no_entry(section):
    assert entry_from_card({"adapterhub": FIELDS}, "a/b", "hf:") is not None
    assert entry_from_card({"adapterhub": section}, "a/b", "hf:") is None
    assert entry_from_card(None, "a/b", "hf:") is None
