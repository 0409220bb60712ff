"""A discovered stack: its name, its root, and the sites of layers that differ."""

from __future__ import annotations

import every_type
import pytest
import tiny_models
import torch
import transformers
from torch import nn
from transformers import AutoConfig

import adapterhub as ah
from adapterhub.anatomy.discovery.stacks import discovered_stack

_PLAIN = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "num_key_value_heads": 2, "initializer_range": 0.15,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "options", "stack"),
    [
        # In none of transformers' lists of language models, or in the other one.
        ("qwen3_vl_text", _PLAIN | {"head_dim": 8}, "decoder"),
        ("granite_docling_text", _PLAIN, "decoder"),
        ("bert-generation", _PLAIN, "encoder"),
        ("bert-generation", _PLAIN | {"is_decoder": True}, "decoder"),
        ("roberta-prelayernorm", _PLAIN, "encoder"),
        ("roberta-prelayernorm", _PLAIN | {"is_decoder": True}, "decoder"),
    ],
)
def test_a_stack_with_causal_attention_is_a_decoder(model_type, options, stack):
    tokens = {"vocab_size": tiny_models.VOCAB, "pad_token_id": 1, "bos_token_id": 3}
    config = AutoConfig.for_model(model_type, **options, **tokens, eos_token_id=2)
    model = transformers.AutoModel.from_config(config).eval()
    assert [found.name for found in ah.anatomy_of(model).family.stacks] == [stack]
    ids = tiny_models.batch()["input_ids"]
    changed = ids.clone()
    changed[:, 5:] = 7
    with torch.no_grad():
        first, second = (model(input_ids=i).last_hidden_state[:, :5] for i in (ids, changed))
    assert torch.allclose(first, second, atol=1e-5) == (stack == "decoder")


def test_a_stack_inside_a_model_has_its_root():
    model = every_type.build("bart", "AutoModel")
    layers = list(model.decoder.layers)
    stack = discovered_stack(model, "decoder.layers", layers, alone=False)
    assert (stack.name, stack.root, stack.own) == ("decoder", "decoder", {})
    assert stack.sites["cross.q"] == "encoder_attn.q_proj"


def test_layers_with_other_paths_for_a_role_are_kept_apart():
    model = every_type.build("bert", "AutoModel")
    layers = list(model.encoder.layer)
    layers[1].intermediate.dense = nn.Identity()
    stack = discovered_stack(model, "encoder.layer", layers, alone=True)
    assert stack.sites["ffn.up"] == "intermediate.dense"
    assert {n: "ffn.up" in sites for n, sites in stack.own.items()} == {1: False}
