"""Reversible layers are found by the autograd function that computes them."""

from __future__ import annotations

import pytest
from transformers import AutoModel, ReformerConfig

import adapterhub as ah
from adapterhub.anatomy.projections import reversible_stack
from adapterhub.errors import SiteError
from tests.kit import tiny_models

TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "attention_head_size": 8,
    "feed_forward_size": 24,
    "axial_pos_embds": False,
    "local_attn_chunk_length": 3,
    "lsh_attn_chunk_length": 3,
}


@pytest.mark.parametrize("kinds", [["local", "local"], ["lsh", "local", "lsh"]])
def test_reformer_computes_its_layers_in_a_function(kinds: list[str]) -> None:
    model = AutoModel.from_config(ReformerConfig(**TINY, attn_layers=kinds))
    assert reversible_stack(model, "encoder.layers.0") is model.encoder


def test_its_layers_return_two_streams_which_are_not_mixed() -> None:
    model = AutoModel.from_config(ReformerConfig(**TINY, attn_layers=["local", "lsh"]))
    with pytest.raises(SiteError, match="scalar-mix does not fit a reformer backbone"):
        ah.attach(model, "scalar-mix")


def test_layers_of_other_architectures_are_ordinary() -> None:
    for architecture in tiny_models.ARCHITECTURES:
        model = tiny_models.model(architecture, "features")
        layers = [paths[0] for paths in ah.anatomy_of(model).layers.values()]
        assert layers, architecture
        assert not any(reversible_stack(model, layer) for layer in layers), architecture
