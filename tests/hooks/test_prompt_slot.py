"""The slot of virtual tokens: which prompts are active, and how rows combine them."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import SiteError
from adapterhub.hooks.composition import AppliedModules, BatchPlan
from adapterhub.hooks.prompt import PromptSlot
from tests.kit import tiny_models


@pytest.fixture
def slot():
    """A slot on Llama with the prompts `short`, `long` and `counting`, none of them active."""
    model = tiny_models.language_model("llama")
    for name, options in {"short": "length=2", "long": "length=5"}.items():
        ah.attach(model, f"prompt({options})", name=name)
    ah.attach(model, "prompt(length=2, counts_padding=true)", name="counting")
    ah.activate(model)
    slot = model.model._modules["adapterhub"]
    assert isinstance(slot, PromptSlot)
    return slot


def key(slot, name):
    return next(key for key in slot.sites if key.startswith(name))


def test_active_prompts_follow_each_other(slot):
    keys = (key(slot, "short"), key(slot, "long"))
    slot.active = AppliedModules(keys)
    virtual = slot(3)
    expected = torch.cat([slot.placed(each)() for each in keys])
    assert torch.equal(virtual.tokens[0], expected)
    assert slot.record(virtual.length, 9).keys == frozenset(keys)


def test_rows_with_shorter_prompts_are_padded(slot):
    short, long = key(slot, "short"), key(slot, "long")
    slot.active = AppliedModules((short, long), BatchPlan([(long,), (short,), ()]))
    virtual = slot(3)
    assert virtual.tokens.shape[:2] == (3, 5)
    assert virtual.padding.tolist() == [[0], [3], [5]]
    assert torch.equal(virtual.tokens[1, 3:], slot.placed(short)())


def test_prompts_that_count_padding_are_not_mixed_with_others(slot):
    slot.active = AppliedModules((key(slot, "short"), key(slot, "counting")))
    assert slot.counts_padding()
    with pytest.raises(SiteError, match="count padding as text"):
        slot(1)
