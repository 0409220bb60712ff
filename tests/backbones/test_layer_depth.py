"""The depth of parameters, counted in layers from the top."""

from __future__ import annotations

import pytest
from torch import nn

import adapterhub as ah
from adapterhub.errors import SiteError
from tests.kit import tiny_models


def test_every_depth_occurs_and_every_parameter_has_one(subtests):
    for architecture in tiny_models.MATRIX:
        with subtests.test(architecture=architecture):
            anatomy = ah.anatomy_of(tiny_models.usual_model(architecture))
            above = anatomy.layers_above()
            assert above.keys() == anatomy.parameters().keys()
            assert set(above.values()) == set(range(anatomy.layer_count() + 1))


def test_the_decoder_is_above_the_encoder():
    anatomy = ah.anatomy_of(tiny_models.usual_model("bart"))
    above = anatomy.layers_above()
    assert anatomy.layer_count() == 4
    depths = [
        above[f"model.{stack}.layers.{n}.fc1.weight"]
        for stack in ("encoder", "decoder")
        for n in (0, 1)
    ]
    assert depths == [3, 2, 1, 0]
    assert above["model.shared.weight"] == 4


def test_a_pooler_is_at_the_top():
    above = ah.anatomy_of(tiny_models.model("bert", "features")).layers_above()
    assert above["pooler.dense.weight"] == above["encoder.layer.1.output.dense.weight"] == 0


def test_packed_weights_are_refused():
    model = tiny_models.model("llama", "features")
    anatomy = ah.anatomy_of(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            del module.weight
    with pytest.raises(SiteError, match="cannot train whole layers") as error:
        anatomy.layers_above()
    assert error.value.offenders[0] == "layers.0.self_attn.q_proj"
    assert error.value.offenders[-1] == "and 11 more"
