"""A stand-in has the modules of its model, and random weights that take almost no memory."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel

from adapterhub.backbones.meta_model import stand_in
from tests.kit import tiny_models


def test_a_stand_in_takes_almost_no_memory():
    size = {"hidden_size": 1024, "intermediate_size": 8192, "vocab_size": 100_000}
    with torch.device("meta"):
        model = BertModel(BertConfig(num_hidden_layers=2, num_attention_heads=8, **size))
    made = stand_in(model)
    parameters = list(made.parameters())
    assert sum(p.numel() for p in parameters) > 140_000_000
    assert sum(p.untyped_storage().nbytes() for p in parameters) < 2_000_000
    assert torch.linalg.matrix_rank(made.encoder.layer[0].attention.self.query.weight) == 1024


@pytest.mark.parametrize("architecture", tiny_models.MATRIX)
def test_a_stand_in_computes(architecture):
    model = tiny_models.usual_model(architecture)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    made, again = stand_in(model), stand_in(model.to("meta"))
    assert {name: parameter.shape for name, parameter in made.named_parameters()} == shapes
    buffers = dict(tiny_models.usual_model(architecture).named_buffers())
    for name, buffer in made.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], equal_nan=True)
    inputs = tiny_models.batch()
    inputs |= tiny_models.decoder_inputs(made, inputs)
    with torch.no_grad():
        logits, repeated = made(**inputs).logits, again(**inputs).logits
    assert torch.equal(logits, repeated)
    assert logits.isfinite().all()
    assert logits.std() > 0.01
