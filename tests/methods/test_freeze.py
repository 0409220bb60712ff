"""Partial fine-tuning: only the top layers train."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.methods.freeze import Freeze
from tests.kit import tiny_models
from tests.kit.tiny_adapters import trained_names


def test_the_top_layers_and_the_pooler_train():
    names = trained_names("bert", "freeze(top=1)")
    assert all(n.startswith(("encoder.1.", "backbone.pooler.")) for n in names)
    assert {n.split(".")[0] for n in names} == {"encoder", "backbone"}
    both = trained_names("bert", "freeze(top=2)")
    assert any(name.startswith("encoder.0.") for name in both - names)
    assert not any("embeddings" in name for name in both)


def test_the_layers_of_an_encoder_decoder_count_from_the_decoder():
    names = trained_names("t5", "freeze(top=3)")
    layers = {tuple(name.split(".")[:2]) for name in names if name.startswith(("enc", "dec"))}
    assert layers >= {("decoder", "0"), ("decoder", "1"), ("encoder", "1")}
    assert ("encoder", "0") not in layers


def test_the_count_is_that_of_the_trained_layers():
    model = tiny_models.model("bert")
    modules = (model.bert.encoder.layer[1], model.bert.pooler)
    expected = sum(p.numel() for module in modules for p in module.parameters())
    adapter = ah.attach(model, "freeze(top=1)")
    assert adapter.count() == expected == adapter.methods[0].count(adapter.anatomy)


def test_the_learning_rate_decays_from_layer_to_layer():
    anatomy = ah.anatomy_of(tiny_models.model("bert"))
    steps = Freeze(top=2, decay=4.0).plan(anatomy)
    rates = {anatomy.key(step.path).split(".")[1]: step.rate for step in steps}
    assert (rates["1"], rates["0"]) == (1, 0.25)


@pytest.mark.parametrize("top", [0, 3])
def test_an_impossible_number_of_layers_is_refused(top):
    with pytest.raises(ConfigError) as error:
        ah.attach(tiny_models.model("bert"), f"freeze(top={top})")
    assert str(top) in error.value.problem
