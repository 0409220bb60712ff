"""`adapterhub suggest`."""

import json

import numpy as np
import pytest

import adapterhub as ah
from adapterhub.bench import suggest
from tests.kit.data import sentences, write_tsv
from tests.kit.session import succeeded


@pytest.fixture
def words(backbone, tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    rows = [(f"{text} {n}", label) for n, (text, label) in enumerate(sentences(60))]
    source = write_tsv(tmp_path / "mine.tsv", rows)
    return "--backbone", backbone, "--train", source


@pytest.fixture
def published(words, backbone, tmp_path):
    for name, method in (("first", "lora(rank=2)"), ("second", "pfeiffer")):
        model, _ = ah.load_backbone(str(backbone), task="classification", labels=["a", "b"])
        ah.attach(model, method, name=name).save(tmp_path / name)
        ah.publish(tmp_path / name)
    return ["first@v1", "second@v1"]


def test_the_adapters_of_the_registry_are_ranked(adapterhub, words, published):
    out = succeeded(adapterhub("suggest", *words))
    for name in (*published, "bare backbone", "bag of words"):
        assert name in out
    assert "A bag of words was not shown to be worse than the features of" in " ".join(out.split())
    assert "No difference" in out  # untrained adapters change no feature
    assert "train --from" not in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_named_adapters_are_compared_and_printed_as_json(adapterhub, words, published, tmp_path):
    out = succeeded(adapterhub("suggest", tmp_path / "first", *words, "--json", "--rows", "40"))
    found = json.loads(out)
    assert (found["score"], found["best"]) == ("accuracy", None)
    assert [each["adapter"] for each in found["adapters"]] == [str(tmp_path / "first")]
    assert found["adapters"][0]["verdict"] == "tied"
    assert found["bag_of_words"]["value"] >= 0.9
    assert 0 <= found["bare"]["low"] <= found["bare"]["value"] <= found["bare"]["high"] <= 1


def test_a_better_one_is_suggested_with_the_command(adapterhub, words, published, monkeypatch):
    def helped(model, encoded, names):
        labels = [[float(e.label == encoded.examples[0].label)] for e in encoded.examples]
        found = np.random.default_rng(0).normal(size=(len(labels), 6))
        return {n: found + 9 * np.array(labels) * (n == "candidate-1") for n in names}

    monkeypatch.setattr(suggest, "features_of", helped)
    out = succeeded(adapterhub("suggest", *words))
    assert "Start from second@v1" in " ".join(out.split())
    assert "adapterhub train --from second@v1" in out


def test_texts_have_room_behind_the_virtual_tokens_of_every_adapter(
    adapterhub, words, published, backbone, tmp_path
):
    """Texts of 64 tokens, all of the positions, were longer than what a prompt leaves of them."""
    rows = [(f"{text} {'good ' * 80}{n}", label) for n, (text, label) in enumerate(sentences(60))]
    file = write_tsv(tmp_path / "long.tsv", rows)
    for name, length in (("prompted", 20), ("crowded", 63)):
        model, _ = ah.load_backbone(str(backbone), task="classification", labels=["a", "b"])
        ah.attach(model, f"prompt(length={length})", name=name).save(tmp_path / name)
    named = [tmp_path / name for name in ("first", "prompted", "crowded")]
    with pytest.warns(UserWarning, match="cut to 44 tokens"):
        code, out, err = adapterhub("suggest", *named, *words[:3], file)
    assert code == 0, err
    assert "prompted" in out
    assert "crowded: virtual tokens leave" in " ".join(err.split())


def test_an_empty_registry_has_nothing_to_compare(adapterhub, words):
    succeeded(adapterhub("suggest", *words), "No adapter to compare")
