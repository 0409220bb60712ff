"""The metadata of a card: an entry is written to it and read back."""

from __future__ import annotations

import pytest

from adapterhub.registry.hub_writer import entry_from_card, hub_card
from adapterhub.registry.store import Entry
from tests.kit.fake_hub import card_data

ENTRY = Entry(
    reference="hf:acme/polite@v2", name="acme/polite", version="v2", digest="0" * 64,
    backbone="acme/bert", fingerprint=f"bf16-{'1' * 64}", methods=("lora", "norms"), task="tagging",
    metrics={"f1": 0.5}, tags=("best",), size=9, parameters=8, license="mit", language=("en",),
    topics=("manners",), description="Short.",
)  # fmt: skip


VALID = {"version": "v1", "digest": "0" * 64, "methods": ["lora"]}


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
        {"version": "v1", "digest": "0" * 64},
        {"version": "v1", "digest": "0", "methods": ["lora"]},
        VALID | {"version": "v1\x1b[2J"},
        VALID | {"version": ["v1"]},
        VALID | {"version": "../../x"},
        VALID | {"version": "main"},
        VALID | {"digest": "../x"},
        VALID | {"size": -1},
        VALID | {"size": 2**70},
        VALID | {"parameters": True},
        VALID | {"task": ["x"]},
        VALID | {"metrics": {"f1": float("nan")}},
        VALID | {"methods": 3},
        VALID | {"metrics": {"f1": "high"}},
        VALID | {"metrics": [1]},
        VALID | {"size": "1e9"},
        VALID | {"parameters": -1},
        VALID | {"backbone": "a b\x07"},
        VALID | {"description": ["x"]},
        VALID | {"tags": "best"},
    ],
)  # fmt: skip
def test_an_unreadable_card_gives_no_entry(section):
    assert entry_from_card({"adapterhub": VALID}, "a/b", "hf:") is not None
    assert entry_from_card({"adapterhub": section}, "a/b", "hf:") is None
    assert entry_from_card(None, "a/b", "hf:") is None
