"""Digests of a model's tensors are remembered, and computed again after any change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.adapters.state import new_state
from adapterhub.backbones import fingerprint
from tests.kit import tiny_models


@pytest.fixture
def read(monkeypatch):
    """List whether each reading of a model in memory was a sample."""
    readings = []
    original = fingerprint.LoadedBackbone._digests

    def counted(self, *, sampled):
        readings.append(sampled)
        return original(self, sampled=sampled)

    monkeypatch.setattr(fingerprint.LoadedBackbone, "_digests", counted)
    return readings


def weight(model):
    return model.bert.encoder.layer[0].output.dense.weight


def _in_place(model):
    with torch.no_grad():
        weight(model)[1, 2] += 1


def _through_data(model):
    weight(model).data[1, 2] += 1


def _through_numpy(model):
    weight(model).detach().numpy()[1, 2] += 1


def _other_data(model):
    weight(model).data = weight(model).detach() * 2


def _other_parameter(model):
    model.bert.encoder.layer[0].output.dense.weight = nn.Parameter(weight(model).detach() * 2)


def _rows_moved(model):
    weight(model).data.copy_(weight(model).detach().roll(1, 0).clone())


def _columns_moved(model):
    weight(model).data.copy_(weight(model).detach().roll(1, 1).clone())


CHANGES = [_in_place, _through_data, _through_numpy, _other_data, _other_parameter, _rows_moved,
           _columns_moved]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_has_another_identity(change, read):
    model = tiny_models.usual_model("bert")
    before = new_state(model).identity()
    assert len(read) == 2
    assert new_state(model).identity() == before
    assert len(read) == 2, "read once"
    change(model)
    after = new_state(model).identity()
    assert after.parts["body"] != before.parts["body"]
    assert len(read) == 4


def test_a_second_load_reads_no_values(read, tmp_path):
    model = tiny_models.usual_model("bert")
    ah.attach(model, "lora", name="a").save(tmp_path / "a")
    ah.load(model, tmp_path / "a", name="b")
    count = len(read)
    ah.load(model, tmp_path / "a", name="c")
    assert len(read) == count
    weight(model).data.mul_(2)
    with pytest.raises(ah.AdapterhubError, match="different backbone"):
        ah.load(model, tmp_path / "a", name="d")


def test_large_models_and_other_tensors_are_read_each_time(read, monkeypatch):
    model = tiny_models.usual_model("bert")
    monkeypatch.setattr(fingerprint, "SMALL", 0)
    for _ in range(2):
        new_state(model).identity()
    assert read == [True, True]
