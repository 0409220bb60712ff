"""Adapter names: any name that files accept works everywhere, and adapters are never confused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adapterhub as ah
from adapterhub.errors import AttachError
from adapterhub.files.schema import name_problems
from tests.kit import tiny_models
from tests.kit.tiny_models import logits

NAMES = [
    "lora", "mlp", "default", "head", "attn.q", "bert/encoder", "classifier", "adapterhub",
    "weight", "active", "hf:someone/polite@v2", "naïve 名前 🙂", "x" * 200, "../up", "a.b", "a/b",
    "a b", "forward", "None", "0", "",
]  # fmt: skip


ANY_NAME = st.one_of(st.sampled_from(NAMES), st.text(min_size=1, max_size=30))


@settings(max_examples=60 if tiny_models.FULL_MATRIX else 8, deadline=None)
@given(names=st.lists(ANY_NAME, min_size=2, max_size=3, unique=True))
def test_a_name_works_everywhere_or_is_refused(names, tmp_path_factory):
    """A name that files accept works everywhere; any other name is refused before training."""
    model = tiny_models.model("bert")
    keys = list(model.state_dict())
    for name in [n for n in names if name_problems(n)]:
        with pytest.raises(AttachError, match="invalid adapter name"):
            ah.attach(model, "lora", name=name)
        names.remove(name)
    each, adapters = {}, []
    for seed, name in enumerate(names):
        adapter = ah.attach(model, ("lora", "pfeiffer", "prefix(length=2)")[seed], name=name)
        tiny_models.scramble(adapter, seed=seed)
        each[name] = logits(model)
        adapters.append(adapter)
    for name, expected in each.items():
        ah.activate(model, name)
        assert torch.equal(logits(model), expected)
    if not names:
        return
    rows = (names * 3)[:3]
    with ah.route(model, rows):
        routed = logits(model)
    torch.testing.assert_close(routed, torch.stack([each[n][i] for i, n in enumerate(rows)]))
    folder = tmp_path_factory.mktemp("names") / "adapter"
    adapters[0].save(folder)
    ah.detach(model, names[0])
    assert ah.load(model, folder).name == names[0]
    assert torch.equal(logits(model), each[names[0]])
    ah.detach(model)
    assert list(model.state_dict()) == keys


def test_similar_names_stay_distinct():
    names = ["a.b", "a/b", "a_b", "a b", "a-b"]
    model = tiny_models.model("bert")
    each = []
    for seed, name in enumerate(names):
        tiny_models.scramble(ah.attach(model, "lora", name=name), seed=seed)
        each.append(logits(model))
    with ah.route(model, ["a_b", "a/b", "a.b"]):
        routed = logits(model)
    torch.testing.assert_close(routed, torch.stack([each[2][0], each[1][1], each[0][2]]))
    assert len({tuple(e.flatten().tolist()) for e in each}) == len(names)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = tiny_models.model("gpt2")
    folder = tmp_path_factory.mktemp("names")
    adapter = ah.attach(model, "lora(rank=1)")
    tiny_models.scramble(adapter)
    adapter.save(folder / "first")
    adapter.detach()
    return model, folder


@settings(max_examples=25, deadline=None)
@given(st.text(min_size=1, max_size=30) | st.from_regex(r"[a-z]{1,8}[./][a-z.]{1,8}"))
def test_any_name_survives_a_round_trip(saved, name):
    """Any valid name survives loading, saving and loading again."""
    model, folder = saved
    try:
        adapter = ah.load(model, folder / "first", name=name)
    except AttachError:
        assert not name.isalnum()
        return
    try:
        expected = logits(model)
        adapter.save(folder / "again", overwrite=True)
    finally:
        adapter.detach()
    again = ah.load(model, folder / "again")
    assert again.name == name
    assert torch.equal(logits(model), expected)
    again.detach()
    assert not any("adapterhub" in key for key in model.state_dict())


@pytest.mark.parametrize(
    "name", ["lora", "mlp", "a.b/c", "größe", "adapterhub", "training", "default-0"]
)
def test_names_that_resemble_modules_work(tmp_path, name):
    model = tiny_models.model("gpt2")
    first, second = ah.attach(model, "lora", name="x"), ah.attach(model, "mam", name=name)
    tiny_models.scramble(second)
    expected = logits(model)
    second.save(tmp_path / "adapter")
    second.detach()
    again = ah.load(model, tmp_path / "adapter")
    assert again.name == name
    assert torch.equal(logits(model), expected)
    first.detach()
    assert torch.equal(logits(model), expected)


def test_duplicate_and_unknown_names_are_refused():
    model = tiny_models.model("bert")
    ah.attach(model, "lora", name="polite")
    with pytest.raises(AttachError, match="already attached"):
        ah.attach(model, "lora", name="polite")
    with pytest.raises(AttachError, match="did you mean 'polite'"):
        ah.activate(model, "polit")
    with pytest.raises(AttachError, match="'polite'"):
        ah.detach(model, "rude")
    ah.detach(model)
    with pytest.raises(AttachError, match="no adapter"):
        ah.detach(model)


def test_an_unknown_name_lists_the_attached_adapters():
    """An unknown name raises; the bare backbone never answers in its place."""
    model = tiny_models.model("bert")
    ah.attach(model, "lora", name="polite")
    with pytest.raises(AttachError, match="polite"):
        ah.activate(model, "polit")
