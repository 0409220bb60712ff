"""A slot: the site modules of one host, the active ones in order, and its removal."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.anatomy.backbone import CHILD
from adapterhub.hooks.composition import AppliedModules, BatchPlan
from adapterhub.hooks.slot import Mark, Slot, drop_slot
from tests.kit import tiny_models


class Affine(nn.Module):
    """y -> a y + b."""

    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = a, b

    def forward(self, y):
        return self.a * y + self.b


@pytest.fixture
def slot():
    """A slot with the inactive modules `twice` and `next`."""
    site = ah.anatomy_of(tiny_models.model("bert")).sites["encoder.0.attn.q"]
    slot = Slot()
    slot.add("twice", site, Affine(2, 0))
    slot.add("next", site, Affine(1, 1))
    return slot


def run(slot, y):
    return slot.run(lambda key, y: slot.placed(key)(y), torch.tensor(y)).tolist()


def test_added_modules_are_inactive(slot):
    assert run(slot, [3.0]) == [3.0]


def test_active_modules_run_in_the_order_of_activation(slot):
    slot.active = AppliedModules(("twice", "next"))
    assert run(slot, [3.0]) == [7.0]
    slot.active = AppliedModules(("next", "twice"))
    assert run(slot, [3.0]) == [8.0]


def test_a_plan_overrides_the_active_modules(slot):
    plan = BatchPlan([("next",), (), ("twice", "next")])
    slot.active = AppliedModules(("twice", "next"), plan)
    assert run(slot, [[3.0], [3.0], [3.0]]) == [[4.0], [3.0], [7.0]]


def test_a_removed_module_is_gone(slot):
    slot.remove("twice")
    assert set(slot.sites) == {"next"}
    assert dict(slot.named_children()).keys() == {"next"}


def test_the_last_mark_restores_the_module():
    module = nn.Linear(2, 2)
    attributes = set(vars(module))
    first, second = Mark(module, "_marks", "a"), Mark(module, "_marks", "b")
    assert module._marks == ["a", "b"]
    first.remove()
    assert module._marks == ["b"]
    second.remove()
    assert set(vars(module)) == attributes


def test_dropping_a_slot_restores_the_host():
    model = tiny_models.model("bert")
    host = "bert.encoder.layer.0.output.dense"
    keys = list(model.state_dict())
    adapter = ah.attach(model, "houlsby(layers=0)")
    assert isinstance(model.get_submodule(host)._modules[CHILD], Slot)
    copied = copy.deepcopy(model)
    drop_slot(copied, host)
    assert CHILD not in copied.get_submodule(host)._modules
    assert not copied.get_submodule(host)._forward_hooks
    adapter.detach()
    assert list(model.state_dict()) == keys
