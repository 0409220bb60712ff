"""The structure of a model: what is restored, and what is left alone."""

from __future__ import annotations

import copy

import torch
from torch import nn

from adapterhub.adapters.state import ModelStructure
from adapterhub.patch import Patch


class Notes:
    """Attributes of every kind."""

    def __init__(self) -> None:
        self.value, self.names, self.numbers, self.marks = 1, ["a"], {"a": 1}, {"x"}


def model_and_structure():
    model, notes = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Notes()
    return model, notes, ModelStructure(model, [notes], model.parameters())


def described(model):
    return {
        name: (type(module), list(module._modules), [*module._forward_hooks.values()])
        for name, module in model.named_modules()
    }


def test_modules_hooks_and_attributes_are_restored():
    model, _, structure = model_and_structure()
    first, before, keys = model[0], described(model), {m: list(vars(m)) for m in model.modules()}
    first.register_forward_hook(print, with_kwargs=True, always_call=True)
    first.register_forward_pre_hook(print, prepend=True)
    first.add_module("child", nn.Identity())
    first.mark = [first]
    del model._modules["1"]
    structure.restore()
    assert described(model) == before
    assert {m: list(vars(m)) for m in model.modules()} == keys
    assert not first._forward_hooks_with_kwargs
    assert not first._forward_hooks_always_called
    assert list(model._modules) == ["0", "1"]


def test_a_removed_hook_is_itself_again():
    model = nn.Linear(2, 2)
    calls, patch = [], Patch()
    for n in (2, 1):
        patch.hook(model.register_forward_hook, lambda *_, n=n: calls.append(n), prepend=True)
    structure = ModelStructure(model, [patch], [])
    patch.undoing.pop()()
    structure.restore()
    model(torch.zeros(1, 2))
    assert calls == [1, 2], "in order"
    patch.undoing[-1]()
    model(torch.zeros(1, 2))
    assert calls == [1, 2, 2]


def test_containers_keep_their_identity():
    _, notes, structure = model_and_structure()
    containers, expected = (notes.names, notes.numbers, notes.marks), copy.deepcopy(vars(notes))
    notes.value, notes.other = 2, 3
    notes.names.append("b")
    notes.numbers.update(a=2, b=1)
    notes.marks = {"y"}
    structure.restore()
    assert vars(notes) == expected
    assert (notes.names, notes.numbers, notes.marks) == containers
    assert all(a is b for a, b in zip((notes.names, notes.numbers), containers, strict=False))


def test_what_trains_is_restored():
    model, _, structure = model_and_structure()
    model.requires_grad_(False)
    structure.restore()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_tensors_are_left_alone():
    """A pass of another thread may exchange them meanwhile."""
    model, _, structure = model_and_structure()
    own = model[0]._parameters["weight"] = nn.Parameter(torch.ones(2, 2))
    structure.restore()
    assert model[0].weight is own
