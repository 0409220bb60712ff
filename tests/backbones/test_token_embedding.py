"""The token embedding, and the vocabulary size of the checkpoint."""

from __future__ import annotations

import torch
import transformers
from torch import nn

import adapterhub as ah
from adapterhub.anatomy.backbone import Backbone
from tests.kit import tiny_models


def test_the_table_has_one_row_per_token():
    for architecture in tiny_models.MATRIX:
        table = Backbone.of(tiny_models.usual_model(architecture)).token_embedding
        assert table is not None
        assert table.shape[0] == tiny_models.VOCAB, architecture


def test_a_model_without_tokens_has_no_table():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
        image_size=8, patch_size=4,
    )  # fmt: skip
    model = transformers.ViTModel(config)
    assert Backbone.of(model).token_embedding is None
    Backbone.of(model).remember_vocabulary_size()
    assert Backbone.of(model).checkpoint_vocabulary_size() is None


def test_resizing_does_not_change_the_size_of_the_checkpoint(backbone):
    loaded, _ = ah.load_backbone(str(backbone))
    by_transformers = transformers.AutoModel.from_pretrained(backbone)
    for model in (loaded, by_transformers):
        size = Backbone.of(model).token_embedding.shape[0]
        model.resize_token_embeddings(size + 3)
        assert Backbone.of(model).token_embedding.shape[0] == size + 3
        assert Backbone.of(model).checkpoint_vocabulary_size() == size


def test_a_model_that_was_never_on_disk_has_no_checkpoint():
    model = tiny_models.model("bert", "features")
    assert Backbone.of(model).checkpoint_vocabulary_size() is None
    Backbone.of(model).remember_vocabulary_size()
    assert Backbone.of(model).checkpoint_vocabulary_size() == tiny_models.VOCAB
    # A table that is no matrix of its own is not used.
    model.set_input_embeddings(nn.Identity())
    assert Backbone.of(model).token_embedding is None
    assert torch.is_tensor(next(model.parameters()))


def test_the_modules_with_a_row_for_each_token():
    model = tiny_models.model("t5", "seq2seq", tie_word_embeddings=True)
    paths = {module: path for path, module in model.named_modules()}
    found = {f"{paths[module]}.{name}" for module, name in Backbone.of(model).token_tables()}
    stacks = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    assert found == stacks | {"shared.weight", "lm_head.weight"}
    assert len(Backbone.of(tiny_models.model("bert")).token_tables()) == 1
