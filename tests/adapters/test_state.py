"""The state of a model: what is active, a pass, what is restored, and the identity behind it."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.adapters.state import (
    ModelStructure,
    activated,
    bare,
    find_state,
    get_state,
    identities_before,
)
from adapterhub.anatomy.build import anatomy_of
from adapterhub.errors import AttachError
from adapterhub.patch import Patch
from tests.kit import tiny_models


def two_adapters(model=None):
    model = model or tiny_models.model("bert")
    for seed, name in enumerate(("a", "b")):
        tiny_models.scramble(ah.attach(model, "lora(rank=2)", name=name), seed=seed)
    return model


def active(model):
    return [adapter.name for adapter in get_state(model).adapters.values() if adapter.active]


def test_what_was_active_is_restored_on_an_error():
    model, untouched = two_adapters(), tiny_models.model("bert")
    ah.activate(model, "a", "b")
    inside = []
    for context in (bare(model), activated(get_state(model), "b")):
        with contextlib.suppress(ZeroDivisionError), context:
            inside.append(active(model))
            raise ZeroDivisionError
        assert active(model) == ["a", "b"]
    assert inside == [[], ["b"]]
    with pytest.raises(AttachError, match="no adapter named 'c'"):
        get_state(model).activate(("b", "c"))
    assert active(model) == ["a", "b"]
    with pytest.raises(ZeroDivisionError), bare(untouched):
        raise ZeroDivisionError
    assert find_state(untouched) is None


def test_a_pass_ends_with_what_it_began_with():
    model = two_adapters(tiny_models.language_model("llama"))
    batch = tiny_models.batch()
    ah.activate(model, "a")
    expected = model(**batch).logits
    handle = model.get_submodule("model.layers.0").register_forward_hook(
        lambda *_: get_state(model)._make_active(get_state(model).activation.without(other))
    )
    other = get_state(model).adapters["a"]
    interrupted = model(**batch).logits
    handle.remove()
    assert not torch.equal(interrupted, expected), "a change by the pass itself applies at once"
    ah.activate(model, "a")
    assert torch.equal(model(**batch).logits, expected)


def test_labels_of_a_route_are_those_of_the_loss_only():
    model = two_adapters()
    before = dict(model.config.id2label)
    for adapter in get_state(model).adapters.values():
        adapter.head.own["classifier"] = torch.nn.Linear(
            adapter.head.own["classifier"].in_features, 5
        )
        adapter.head.labels["id2label"] = {i: f"c{i}" for i in range(5)}
    ah.activate(model)
    labels = torch.tensor([4, 0, 3])
    with ah.route(model, ["a", "b", "a"]):
        outputs = model(**tiny_models.batch(), labels=labels)
        assert model.config.id2label == before
    expected = torch.nn.functional.cross_entropy(outputs.logits, labels)
    torch.testing.assert_close(outputs.loss, expected)


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
    model.requires_grad_(False)
    # A pass of another thread may exchange tensors meanwhile.
    own = first._parameters["weight"] = nn.Parameter(torch.ones(2, 2))
    del model._modules["1"]
    structure.restore()
    assert first.weight is own
    assert first.bias.requires_grad
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


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("method", ["full", "norms", "mam", "dora"])
def test_adapters_change_nothing(architecture, method):
    model = tiny_models.usual_model(architecture)
    anatomy = anatomy_of(model)
    before = identities_before(anatomy, {}).identity(complete=True)
    tiny_models.scramble(ah.attach(model, method))
    state = get_state(model)
    assert state.identity() == before
    ah.activate(model)
    assert state.identity() == before


def test_tied_embeddings_that_an_adapter_unties():
    model = tiny_models.model("bart", "seq2seq")
    before = identities_before(anatomy_of(model), {}).identity(complete=True)
    tiny_models.scramble(ah.attach(model, "chosen(untied=true)"))
    assert get_state(model).identity() == before
