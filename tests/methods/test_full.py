"""Full fine-tuning: every parameter of the backbone trains, lower layers more slowly."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.methods.full import Full
from tests.kit import tiny_models


def test_every_parameter_of_the_backbone_trains():
    model = tiny_models.model("bert")
    backbone = list(model.base_model.parameters())
    adapter = ah.attach(model, "full")
    assert adapter.count() == sum(p.numel() for p in backbone)
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)
    assert len(adapter.changed) == len(backbone)
    assert all(p.requires_grad for p in model.parameters())


def test_a_trained_parameter_takes_part_until_detached():
    model = tiny_models.model("bert")
    host = model.bert.pooler.dense
    weight = host.weight.detach().clone()
    adapter = ah.attach(model, "full")
    tiny_models.scramble(adapter, std=2.0)
    x, trained = torch.randn(2, 32), adapter.tensors()["backbone.pooler.dense.full.weight"]
    torch.testing.assert_close(host(x), x @ trained.T + host.bias)
    adapter.detach()
    assert torch.equal(host.weight, weight)


def test_the_learning_rate_decays_from_layer_to_layer():
    anatomy = ah.anatomy_of(tiny_models.model("bert"))
    rates = {anatomy.key(step.path): step.rate for step in Full(decay=2.0).plan(anatomy)}
    assert rates["backbone.pooler.dense.weight"] == rates["encoder.1.attn.q.weight"] == 1
    assert rates["encoder.0.attn.q.weight"] == 0.5
    assert {r for n, r in rates.items() if n.startswith("backbone.embeddings")} == {0.25}


def test_a_decay_of_zero_is_refused():
    with pytest.raises(ConfigError) as error:
        Full(decay=0)
    assert "decay" in str(error.value)
