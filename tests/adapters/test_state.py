"""The state of a model: errors leave what was active, and detaching restores the model."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.state import activated, bare, find_state, get_state, require_attached
from adapterhub.errors import AttachError
from tests.kit import tiny_models


def two_adapters():
    model = tiny_models.model("bert")
    for seed, name in enumerate(("a", "b")):
        tiny_models.scramble(ah.attach(model, "lora(rank=2)", name=name), seed=seed)
    return model


def active(model):
    return [adapter.name for adapter in get_state(model).adapters.values() if adapter.active]


def test_bare_restores_what_was_active_on_an_error():
    model = two_adapters()
    ah.activate(model, "a", "b")
    inside = []

    def fail():
        with bare(model) as state:
            inside.append((active(model), state.compositions))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == [([], ((),))]
    assert active(model) == ["a", "b"]


def test_bare_leaves_no_trace_on_a_model_without_adapters():
    model = tiny_models.model("bert")
    with pytest.raises(ZeroDivisionError), bare(model):
        raise ZeroDivisionError
    assert find_state(model) is None


def test_activated_restores_what_was_active():
    model = two_adapters()
    ah.activate(model, ah.Average(["a", "b"]))
    before = model(**tiny_models.batch()).logits
    with activated(get_state(model), "b"):
        assert active(model) == ["b"]
    assert torch.equal(model(**tiny_models.batch()).logits, before)


def test_a_failed_activation_leaves_what_was_active():
    model = two_adapters()
    ah.activate(model, "a")
    with pytest.raises(AttachError, match="no adapter named 'c'"):
        get_state(model).activate(("b", "c"))
    assert active(model) == ["a"]


def test_the_last_detach_restores_what_trains():
    model = tiny_models.model("bert")
    flags = [n for n, p in model.named_parameters() if n.endswith("bias")]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in flags)
    ah.attach(model, "ia3")
    assert not any(p.requires_grad for n, p in model.named_parameters() if n in flags[:3])
    ah.detach(model)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == flags
    assert find_state(model) is None


def test_missing_names_are_listed_with_the_nearest():
    model = two_adapters()
    with pytest.raises(AttachError) as error:
        require_attached(get_state(model), ["a", "aa", "x"])
    assert error.value.problem == (
        "no adapter named 'aa'; did you mean 'a'?, 'x' is attached to this model"
    )
    assert error.value.expected == "one of 'a', 'b'"
