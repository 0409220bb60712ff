"""Changes are undone in reverse, exactly, and with what they changed."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import BertConfig

from adapterhub.patch import Patch


def described(model):
    return {
        name: (list(vars(m)), {k: v for k, v in vars(m).items() if not isinstance(v, dict)})
        for name, m in model.named_modules()
    }


def changed(model, patch):
    """Make a change of each kind; some twice."""
    patch.put(model._parameters, "weight", nn.Parameter(torch.zeros(2, 2)))
    patch.set(model, "in_features", 3)
    patch.set(model, "mark", "a")
    patch.set(model, "mark", "b")
    patch.set(model.weight, "requires_grad", False)
    patch.override(model, "forward", torch.relu)
    patch.override(model, "forward", torch.sin)
    patch.hook(model.register_forward_hook, print)


def test_everything_is_as_before():
    model, patch = nn.Linear(2, 2), Patch()
    before, weight = described(model), model.weight
    changed(model, patch)
    assert described(model) != before
    assert (model.mark, model.in_features, model.forward) == ("b", 3, torch.sin)
    patch.undo()
    assert described(model) == before
    assert model.weight is weight
    assert weight.requires_grad
    assert list(model._parameters) == ["weight", "bias"]
    assert not model._forward_hooks
    assert patch.undoing == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copied_model_has_its_own_patch(copied):
    model = nn.Linear(2, 2)
    model.patch = Patch()
    before = described(model)
    changed(model, model.patch)
    other = copied(model)
    other.patch.undo()
    assert other.patch is not model.patch
    assert not hasattr(other, "mark")
    assert not other._forward_hooks
    assert torch.equal(other.weight, model.patch.undoing[0].args[2])
    assert model.mark == "b"
    model.patch.undo()
    assert described(model).keys() == before.keys()


def test_an_attribute_of_another_name_or_place():
    config = BertConfig(num_hidden_layers=2)
    before = config.to_dict()
    with Patch() as patch:
        patch.set(config, "num_labels", 5)
        patch.set(config, "id2label", {0: "a"})
        assert config.num_labels == 1
    assert config.to_dict() == before


def test_what_another_library_has_put_there_since_stays():
    model, patch = nn.Linear(2, 2), Patch()
    patch.override(model, "forward", torch.relu)
    model.forward = torch.sin
    patch.undo()
    assert model.forward is torch.sin


def test_a_patch_is_part_of_another_and_is_undone_at_the_end_of_a_block():
    log = []
    with Patch() as outer:
        inner = Patch()
        outer.push(inner.undo)
        inner.push(lambda: log.append("inner"))
        outer.push(lambda: log.append("last"))
    assert log == ["last", "inner"]
    assert inner.undoing == []


def test_undoing_that_failed_goes_on():
    log, patch = [], Patch()

    def fails_once():
        log.append("tried")
        if len(log) == 1:
            raise MemoryError

    patch.push(lambda: log.append("first"))
    patch.push(fails_once)
    with pytest.raises(MemoryError):
        patch.undo()
    patch.undo()
    assert log == ["tried", "tried", "first"]
