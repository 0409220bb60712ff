"""Linear probe: only the task head trains."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import AttachError, ConfigError
from tests.kit import tiny_models
from tests.kit.data import train


def test_only_the_head_trains():
    model = tiny_models.model("bert")
    backbone = {n: p.detach().clone() for n, p in model.base_model.named_parameters()}
    adapter = ah.attach(model, "head")
    assert not adapter.placed
    assert not adapter.changed
    start = {name: tensor.detach().clone() for name, tensor in adapter.tensors().items()}
    assert set(start) == {"head.classifier.weight", "head.classifier.bias"}
    train(adapter, steps=2)
    assert all(torch.equal(p, backbone[n]) for n, p in model.base_model.named_parameters())
    assert not any(torch.equal(t, start[n]) for n, t in adapter.tensors().items())


def test_the_count_is_zero_without_the_head():
    adapter = ah.attach(tiny_models.model("bert"), "head")
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy) == 0


def test_a_model_without_a_head_is_refused():
    with pytest.raises(AttachError):
        ah.attach(tiny_models.model("bert", "features"), "head")


def test_it_has_no_options():
    with pytest.raises(ConfigError) as error:
        ah.attach(tiny_models.model("bert"), "head(size=3)")
    assert "size" in str(error.value)
