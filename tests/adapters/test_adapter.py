"""The handle: tensors by name, groups of parameters, the manifest."""

from __future__ import annotations

import torch

import adapterhub as ah
from tests.kit import tiny_models


def test_tensors_are_named_by_site_method_and_parameter():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, ["lora(rank=2, sites=['attn.q'], layers='top 1')", "bitfit"])
    names = set(adapter.tensors())
    assert {"encoder.1.attn.q.lora.A", "encoder.1.attn.q.lora.B"} <= names
    assert "head.classifier.weight" in names
    assert any(".bitfit." in name for name in names)


def test_groups_partition_the_parameters():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, ["lora-plus", "norms"])
    grouped = [id(p) for group in adapter.groups() for _, p in group.named]
    assert sorted(grouped) == sorted(map(id, adapter.parameters()))
    assert len({group.rate for group in adapter.groups()}) > 1  # B learns faster than A


def test_the_saved_form_has_no_parameters_of_training_alone():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "prefix(length=3, reparametrize=true, middle=4)")
    assert any("trunk" in name for name in adapter.tensors())
    saved = adapter.saved_tensors()
    assert not any("trunk" in name for name in saved)
    assert saved["encoder.0.attn.kv.prefix.prefix"].shape == (2, 3, 32)
    assert adapter.manifest().methods[0]["prefix"]["reparametrize"] is False


def test_train_mode_leaves_frozen_dropout_off():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora(dropout=0.5)")
    adapter.train_mode()
    modes = {name: m.training for name, m in model.named_modules()}
    assert not modes["bert.embeddings.dropout"]
    assert modes["classifier"]
    module = adapter.placed[0].module
    assert module.training
    adapter.train_mode(dropout=True)
    assert model.bert.embeddings.dropout.training


def test_a_detached_adapter_still_has_its_tensors():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora")
    tiny_models.scramble(adapter)
    before = {name: tensor.clone() for name, tensor in adapter.tensors().items()}
    adapter.detach()
    assert all(torch.equal(t, before[n]) for n, t in adapter.tensors().items())
