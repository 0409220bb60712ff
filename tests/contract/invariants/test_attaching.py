"""Attaching: the model keeps its class, signature and copies; a refused attach changes nothing."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import AttachError, SiteError
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.matrix import example, one_of_each_signature
from tests.kit.selection import long_table
from tests.kit.tiny_models import logits


def test_a_failed_attach_leaves_nothing_behind():
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


def test_an_unsupported_attention_implementation_is_refused():
    model = tiny_models.model("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    keys = list(model.state_dict())
    with pytest.raises(SiteError, match="flash_attention_2") as error:
        ah.attach(model, "prefix")
    assert "sdpa" in error.value.hint
    assert list(model.state_dict()) == keys
    assert not hasattr(model, "_adapterhub")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_compiled_model_is_refused():
    with pytest.raises(AttachError, match=r"torch\.compile"):
        ah.attach(torch.compile(tiny_models.model("bert")), "lora")
    model = tiny_models.model("bert")
    model.compile()
    with pytest.raises(AttachError, match=r"torch\.compile"):
        ah.attach(model, "lora")


@long_table("method", one_of_each_signature(), 4)
def test_a_copy_of_the_model_is_independent(method):
    """Deep copies and pickles have their own copy of the adapter."""
    model = tiny_models.model("bart")
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    expected = logits(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied), expected)
        ah.detach(copied)
        assert not torch.equal(logits(copied), expected)
        assert torch.equal(logits(model), expected)


def test_a_printed_model_shows_its_adapters():
    model = tiny_models.model("bert")
    ah.attach(model, "lora")
    assert "adapterhub" in repr(model)


FROZEN = [name for name in one_of_each_signature() if not METHODS[name].trains_backbone]


@pytest.mark.parametrize("method", FROZEN)
def test_a_frozen_backbone_has_no_dropout_in_training(method):
    """`train_mode` keeps the backbone's dropout off unless `dropout=True`."""
    model = tiny_models.model("roberta", classifier_dropout=0.0)
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    expected = logits(model)
    adapter.train_mode()
    assert torch.equal(logits(model), expected)
    adapter.train_mode(dropout=True)
    assert not torch.equal(logits(model), expected)
