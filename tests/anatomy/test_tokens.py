"""The module that embeds tokens."""

from __future__ import annotations

import transformers
from torch import nn

from adapterhub.anatomy.backbone import token_table
from tests.kit import tiny_models


def test_the_table_of_a_model_of_text():
    model = tiny_models.model("bert")
    assert token_table(model) is model.bert.embeddings.word_embeddings


def test_a_model_that_cannot_name_its_table_has_none():
    """transformers raises NotImplementedError for models of sound."""
    config = transformers.Wav2Vec2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    assert token_table(transformers.Wav2Vec2Model(config)) is None
    assert token_table(nn.Linear(1, 1)) is None


def test_a_module_with_a_table_of_its_own():
    """FSMT's encoder is not a model of transformers."""
    module = nn.Module()
    module.embed_tokens = nn.Embedding(2, 2)
    assert token_table(module) is module.embed_tokens
