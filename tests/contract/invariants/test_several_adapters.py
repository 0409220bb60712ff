"""Several adapters on one backbone: names, activity and trainability are separate things."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import example

import adapterhub as ah
from adapterhub.errors import AttachError, SiteError
from adapterhub.methods import METHODS

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["attach", "activate", "detach", "none"]), st.integers(0, 2)),
    max_size=12,
)


def logits(model):
    with torch.no_grad():
        return model(**tiny_models.batch()).logits


@settings(max_examples=25, deadline=None)
@given(actions=ACTIONS, methods=st.lists(st.sampled_from(sorted(METHODS)), min_size=3, max_size=3))
def test_no_sequence_of_actions_touches_another_adapter(actions, methods):
    """requires_grad, values and outputs of each adapter survive whatever is done to the others."""
    model = tiny_models.model("bert")
    bare = logits(model)
    live: dict[int, ah.Adapter] = {}
    expected: dict[int, torch.Tensor] = {}
    for action, number in actions:
        if action == "attach" and number not in live:
            live[number] = ah.attach(model, example(methods[number]), name=str(number))
            tiny_models.scramble(live[number], seed=number)
            expected[number] = logits(model)
        elif action == "activate" and number in live:
            ah.activate(model, str(number))
            assert torch.equal(logits(model), expected[number])
        elif action == "detach" and number in live:
            live.pop(number).detach()
        elif action == "none" and live:
            ah.activate(model)
            assert torch.equal(logits(model), bare)
        for adapter in live.values():
            assert all(p.requires_grad for p in adapter.parameters())
        active = {id(p) for a in live.values() if a.active for p in a.parameters()}
        own = {id(p) for a in live.values() for p in a.parameters()}
        trainable = {id(p) for p in model.parameters() if p.requires_grad}
        assert not live or active <= trainable <= own
    for number, adapter in live.items():
        ah.activate(model, str(number))
        assert torch.equal(logits(model), expected[number])
        adapter.detach()
    assert torch.equal(logits(model), bare)


def test_two_active_adapters_stack():
    model = tiny_models.model("bert", "features")
    hidden = lambda: model(**tiny_models.batch()).last_hidden_state.detach()  # noqa: E731
    for name in "ab":
        tiny_models.scramble(ah.attach(model, "lora(sites=['attn.q'])", name=name), seed=ord(name))
    alone = hidden()
    ah.activate(model, "a", "b")
    both = hidden()
    assert not torch.allclose(both, alone)
    query = model.encoder.layer[0].attention.self.query
    x = torch.randn(1, 2, 32)
    parts = [m for _, m in query.adapterhub.named_children()]
    y = torch.nn.functional.linear(x, query.weight, query.bias)
    expected = y + sum(2.0 * x @ m.A.T @ m.B.T for m in parts)
    torch.testing.assert_close(query(x), expected)


def test_heads_of_different_sizes():
    model = tiny_models.model("bert", num_labels=2)
    ah.attach(model, "lora", name="two")
    labels = {"id2label": {i: c for i, c in enumerate("abcde")}}
    five = ah.attach(tiny_models.model("bert", num_labels=5, **labels), "lora", name="five")
    assert five.labels == tuple("abcde")
    assert logits(model).shape[-1] == 2


def test_names():
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


def test_a_failed_attach_leaves_nothing():
    model = tiny_models.model("bert")
    keys, flags = list(model.state_dict()), [p.requires_grad for p in model.parameters()]
    with pytest.raises(SiteError, match=r"cross\.q"):
        ah.attach(model, {"lora": {"sites": ["cross.q"]}})
    assert list(model.state_dict()) == keys
    assert [p.requires_grad for p in model.parameters()] == flags
    with pytest.raises(AttachError, match="nothing would train"):
        ah.attach(tiny_models.model("bert", "features"), "head")
    with pytest.raises(AttachError, match="two methods of one kind"):
        ah.attach(model, ["lora", "lora(rank=2)"])


def test_an_attention_that_prefixes_cannot_enter_is_refused():
    model = tiny_models.model("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    keys = list(model.state_dict())
    with pytest.raises(SiteError, match="flash_attention_2") as error:
        ah.attach(model, "prefix")
    assert "sdpa" in error.value.hint
    assert list(model.state_dict()) == keys
    assert not hasattr(model, "_adapterhub")


def test_two_adapters_that_change_one_parameter_cannot_both_be_active():
    model = tiny_models.model("bert")
    ah.attach(model, "full", name="a")
    ah.attach(model, "freeze", name="b")
    with pytest.raises(AttachError, match="both train"):
        ah.activate(model, "a", "b")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_compiled_model_is_refused():
    with pytest.raises(AttachError, match=r"torch\.compile"):
        ah.attach(torch.compile(tiny_models.model("bert")), "lora")
    model = tiny_models.model("bert")
    model.compile()
    with pytest.raises(AttachError, match=r"torch\.compile"):
        ah.attach(model, "lora")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_copy_of_the_model_is_independent(method):
    """Deep copies and pickles carry their own adapter."""
    model = tiny_models.model("bart")
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    expected = logits(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied), expected)
        ah.detach(copied)
        assert not torch.equal(logits(copied), expected)
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_wrapper_does_not_hide_the_model(method):
    model = tiny_models.model("qwen2")
    kind, signature = type(model), inspect.signature(model.forward)
    adapter = ah.attach(model, example(method))
    assert type(model) is kind
    assert inspect.signature(model.forward) == signature
    if adapter.placed:
        assert "adapterhub" in repr(model)


TRAIN_BACKBONE = {name for name, method in METHODS.items() if method.trains_backbone}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_says_whether_it_trains_the_backbone(method):
    adapter = ah.attach(tiny_models.model("bert"), example(method))
    assert bool(adapter.changed) == (method in TRAIN_BACKBONE)


@pytest.mark.parametrize("method", sorted(METHODS.keys() - TRAIN_BACKBONE))
def test_a_frozen_backbone_computes_the_same_in_training(method):
    """Its dropout is off in train_mode, and on only when asked for."""
    model = tiny_models.model("roberta", classifier_dropout=0.0)
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    expected = logits(model)
    adapter.train_mode()
    assert torch.equal(logits(model), expected)
    adapter.train_mode(dropout=True)
    assert not torch.equal(logits(model), expected)
