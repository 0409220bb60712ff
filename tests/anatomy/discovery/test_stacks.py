"""A discovered stack: its name, its root, and the sites of layers that differ."""

from __future__ import annotations

import every_type
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig

import adapterhub as ah
from adapterhub.anatomy.discovery.row import discovered_stack
from adapterhub.errors import SiteError
from tests.kit import tiny_models
from tests.kit.selection import long_table

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


# Vision and sound encoders whose stages have sizes of their own, and layers that change the size.
STAGES = (
    "convnext",
    "cvt",
    "focalnet",
    "fun_asr_nano_encoder",
    "hiera",
    "segformer",
    "swin",
    "swinv2",
)


def auto_model(model_type):
    return every_type.build(model_type, "AutoModel", tiny=True)


@long_table("model_type", STAGES, 3)
def test_each_layer_of_stages_is_found_by_its_own_size(model_type):
    model = auto_model(model_type)
    anatomy = ah.anatomy_of(model)
    roles = [site.role for site in anatomy.sites.values()]
    depth = anatomy.depth("encoder")
    assert [roles.count(role) for role in ("ffn", "ffn.up", "ffn.down")] == [depth] * 3
    attends = "attn.q" in roles
    assert roles.count("attn") == roles.count("attn.o") == (depth if attends else 0)
    sizes = {site.d_out for site in anatomy.sites.values() if site.role == "ffn"}
    assert len(sizes) > (model_type != "fun_asr_nano_encoder"), "stages of several sizes"
    for method in ("lora", "pfeiffer", "houlsby", "scaled-parallel"):
        adapter = ah.attach(model, method)
        assert {placed.site.layer for placed in adapter.placed} == set(range(depth))
        adapter.detach()


@pytest.mark.parametrize("model_type", ["moshi", "moonshine", "modernbert-decoder"])
def test_a_fused_projection_with_another_name_has_no_parts(model_type):
    """Which half is the gate is not known; networks have an input and an output all the same."""
    model = auto_model(model_type)
    decoder = [s for s in ah.anatomy_of(model).sites.values() if s.stack == "decoder"]
    roles = {site.role for site in decoder}
    assert {"ffn", "ffn.gate_up", "ffn.down"} <= roles
    assert not {"ffn.up", "ffn.gate"} & roles
    (width,) = {site.d_in for site in decoder if site.role == "ffn.gate_up"}
    assert {(s.d_in, s.d_out) for s in decoder if s.role == "ffn"} == {(width, width)}


def test_networks_stand_in_for_attention_only_where_there_is_none():
    """FNet has none; XLNet's is of parameters, which are no projections."""
    adapter = ah.attach(every_type.build("fnet", "AutoModel", tiny=True), "lora")
    assert {placed.site.role for placed in adapter.placed} == {"ffn.up", "ffn.down"}
    with pytest.raises(SiteError, match="no such site"):
        ah.attach(every_type.build("xlnet", "AutoModel", tiny=True), "lora")
