"""The names of a model's tensors are those in the files that it writes."""

from __future__ import annotations

import every_type
import pytest
import torch
import transformers
from safetensors.torch import load_file

from adapterhub.backbones.checkpoint import (
    HEAD_PART,
    form_of,
    in_checkpoint_form,
    named_tensors,
)
from adapterhub.errors import BackboneError
from tests.kit import tiny_models
from tests.kit.selection import long_table


@long_table("architecture", tiny_models.ARCHITECTURES, 4)
def test_the_files_have_these_names_and_values(architecture, tmp_path):
    model = tiny_models.usual_model(architecture)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    form = form_of(model.config)
    names = form.names(stored)
    found = {
        name: tensor
        for layer in in_checkpoint_form(named_tensors(model), form)
        for name, tensor in layer
    }
    assert names.keys() == stored.keys(), "each is of the base model or of a head"
    assert form.embedding in names.values()
    for name, new in names.items():
        assert torch.equal(found[new], stored[name]), name
    assert sum(not new.startswith(HEAD_PART) for new in names.values()) > 10


def test_fused_experts_are_split():
    model = tiny_models.model("mixtral", "features")
    (fused,) = {tensor.ndim for n, tensor in named_tensors(model).items() if "experts.down" in n}
    layers = list(in_checkpoint_form(named_tensors(model), form_of(model.config)))
    experts = [(n, t) for layer in layers for n, t in layer if ".experts." in n]
    assert fused == 3
    assert len(experts) == 2 * 4 * 3
    assert all(tensor.ndim == 2 for _, tensor in experts)
    assert len(layers) > 2


def test_the_prefix_is_the_one_of_most_names():
    form = form_of(tiny_models.model("llama", "features").config)
    names = form.names(
        ["model.norm.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight",
         "model.layers.0.self_attn.rotary_emb.inv_freq", "score.norm.weight",
         "model.layers.1.mlp.up_proj.qweight"]
    )  # fmt: skip
    assert names == {
        "model.norm.weight": "norm.weight",
        "model.layers.0.input_layernorm.weight": "layers.0.input_layernorm.weight",
        "lm_head.weight": "head.lm_head.weight",
        "score.norm.weight": "head.score.norm.weight",
        "model.layers.1.mlp.up_proj.qweight": "layers.1.mlp.up_proj.qweight",
    }


def test_a_configuration_without_a_model_is_refused():
    with pytest.raises(BackboneError, match="cannot build"):
        form_of(transformers.BertConfig(hidden_size=30, num_attention_heads=4))


@pytest.mark.parametrize("model_type", ["cosmos3_omni", "emu3", "qianfan_ocr"])
def test_the_base_model_has_its_own_names_whatever_a_task_model_writes(model_type):
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    model = every_type.build(model_type, auto, tiny=True)
    form = form_of(model.config)
    assert form.prefix_in_memory(named_tensors(model)) == "model."
    assert form.prefix_in_memory(named_tensors(model.base_model)) == ""
    layers = in_checkpoint_form(named_tensors(model), form)
    names = {name for layer in layers for name, _ in layer}
    assert form.embedding in names
    assert sum(not name.startswith(HEAD_PART) for name in names) > 10
