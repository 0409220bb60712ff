"""What adapters cannot be attached to; tests/adapters/test_attach.py attaches to each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.adapters.state import (
    AdaptedModel,
    check_model,
    refuse_shared,
    require_model,
)
from adapterhub.anatomy.backbone import Backbone
from adapterhub.errors import AttachError
from tests.kit import tiny_models


@pytest.mark.parametrize("thing", [nn.ReLU, "bert-base-uncased", None])
def test_what_is_no_model_is_refused(thing):
    for check in (require_model, check_model):
        with pytest.raises(AttachError, match="is not a model of transformers"):
            check(thing if check is require_model else Backbone.of(thing))


def test_the_model_inside_a_wrapper_is_named():
    with pytest.raises(AttachError) as error:
        require_model(nn.Sequential(nn.ReLU(), tiny_models.model("bert")))
    assert "model.1; attach first" in error.value.hint


def test_a_compiled_model_is_refused():
    with pytest.raises(AttachError, match="the model is compiled"):
        check_model(Backbone.of(torch.compile(tiny_models.model("bert"), backend="eager")))


def test_a_shared_part_is_refused_and_a_copy_is_not():
    model, other = tiny_models.model("bert"), tiny_models.model("bert")
    adapted = [AdaptedModel(Backbone.of(other), ["a"], list(other.parameters()))]
    refuse_shared(Backbone.of(model), adapted)
    refuse_shared(Backbone.of(other), adapted)
    model.bert.pooler = other.bert.pooler
    with pytest.raises(AttachError) as error:
        refuse_shared(Backbone.of(model), adapted)
    assert error.value.offenders == ("'a'",)


def test_an_adapter_without_parameters_is_refused():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora")
    adapter.check_usable()
    adapter.placed, adapter.head = [], None
    with pytest.raises(AttachError, match="nothing would train"):
        adapter.check_usable()
