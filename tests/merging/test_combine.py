"""`ah.combine` as a user calls it; the contract suite combines every method."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.state import get_state
from adapterhub.errors import AttachError, ConfigError, MergeError
from tests.kit import tiny_models


@pytest.fixture
def model():
    model = tiny_models.model("bert")
    for seed, (name, rank) in enumerate({"a": 2, "b": 3}.items()):
        spec = f"lora(rank={rank}, sites=['attn.q'])"
        tiny_models.scramble(ah.attach(model, spec, name=name), seed=seed)
    return model


def update(adapter, layer=0):
    tensors = adapter.tensors()
    a, b = (tensors[f"encoder.{layer}.attn.q.lora.{name}"] for name in "AB")
    return adapter.placed[0].module.scale * b @ a


def test_a_linear_combination_of_lora_is_exact_or_reports_what_is_lost(model):
    adapters = get_state(model).adapters.copy()
    combined = ah.combine(model, ["a", "b"], weights=[0.25, -1.0])
    expected = 0.25 * update(adapters["a"]) - update(adapters["b"])
    torch.testing.assert_close(update(combined), expected)
    assert combined.tensors()["encoder.0.attn.q.lora.A"].shape[0] == 2 + 3
    assert combined.active
    smaller = ah.combine(model, ["a", "b"], rank=1, name="smaller")
    assert smaller.tensors()["encoder.0.attn.q.lora.A"].shape[0] == 1
    assert 0 < smaller.metadata.training["combined"]["lost"] < 1


def test_what_cannot_be_combined_is_listed_and_nothing_changes(model):
    with pytest.raises(ConfigError) as error:
        ah.combine(model, ["a", "b"], weights=[1.0], density=2.0, rank=0)
    assert len(error.value.offenders) == 3
    with pytest.raises(ConfigError, match="did you mean 'linear'"):
        ah.combine(model, ["a", "b"], how="linar")
    ah.activate(model, "a")
    with pytest.raises(AttachError, match="'c'"):
        ah.combine(model, ["a", "c"])
    assert get_state(model).adapters["a"].active


def with_head(name, labels, seed):
    """Attach an adapter with a head for other labels."""
    other = tiny_models.model("bert", num_labels=len(labels))
    made = ah.attach(other, "lora(rank=2, sites=['attn.q'])", name=name)
    tiny_models.scramble(made, seed=seed)
    made.head.labels["id2label"] = dict(enumerate(labels))
    return made


@pytest.mark.parametrize("labels", [("x", "y"), ("LABEL_1", "LABEL_0", "LABEL_2"), tuple("wxyz")])
@pytest.mark.parametrize("order", [["a", "other"], ["other", "a"], ["a", "b", "other"]])
def test_different_heads_are_refused_unless_one_is_chosen(model, tmp_path, labels, order):
    with_head("other", labels, seed=7).save(tmp_path / "other")
    ah.load(model, tmp_path / "other", any_backbone=True)
    adapters = get_state(model).adapters
    with pytest.raises(MergeError, match="different heads") as caught:
        ah.combine(model, order)
    assert f"combine(..., head={order[0]!r})" in str(caught.value)
    assert "combined" not in adapters
    for number, head in enumerate(order):
        combined = ah.combine(model, order, head=head, name=f"head-{number}")
        assert combined.labels == adapters[head].labels
        own = {n: t for n, t in combined.tensors().items() if n.startswith("head.")}
        assert own
        assert all(torch.equal(t, adapters[head].tensors()[n]) for n, t in own.items())
        assert combined.metadata.training["combined"]["head"] == head
    with pytest.raises(AttachError, match="'c'"):
        ah.combine(model, order, head="c")


@pytest.mark.parametrize("kept", ["a", "b"])
def test_the_same_labels_or_the_only_head_need_no_choice(model, kept):
    adapters = get_state(model).adapters
    if kept == "b":
        adapters["a"].head = None
    combined = ah.combine(model, ["a", "b"])
    assert combined.labels == adapters[kept].labels
    head = adapters[kept].head.own["classifier"]
    assert torch.equal(combined.head.own["classifier"].weight, head.weight)
