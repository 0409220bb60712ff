"""The handle: tensors by name, groups of parameters, the manifest, and parts in place of others."""

from __future__ import annotations

import pytest
import torch
from transformers import LevitConfig, LevitForImageClassification

import adapterhub as ah
from tests.kit import tiny_models


def test_an_owned_parameter_replaces_the_original_everywhere():
    model = tiny_models.language_model("gpt2")
    tied = model.get_input_embeddings().weight
    adapter = ah.attach(model, "full")
    owned = next(c for c in adapter.changed if c.original is tied)
    assert model.get_input_embeddings().weight is model.lm_head.weight is owned.own
    owned.swap(on=False)
    assert model.get_input_embeddings().weight is model.lm_head.weight is tied
    owned.swap(on=True)
    assert model.lm_head.weight is owned.own


def test_the_model_has_the_labels_of_the_active_head():
    model = tiny_models.model("bert", id2label={0: "a", 1: "b", 2: "c"}, label2id={})
    adapter = ah.attach(model, "lora")
    adapter.head.labels["id2label"] = {0: "x", 1: "y", 2: "z"}
    ah.activate(model)
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    ah.activate(model, adapter.name)
    assert model.config.id2label == {0: "x", 1: "y", 2: "z"}


def test_a_head_for_the_model_is_in_its_dtype():
    model = tiny_models.model("bert").to(torch.bfloat16)
    head = ah.attach(model, "lora").head
    assert {p.dtype for m in head.own.values() for p in m.parameters()} == {torch.float32}
    lowered = head.lowered()
    assert {p.dtype for m in lowered.own.values() for p in m.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("method", ["full", "freeze", "unfreeze"])
def test_what_a_module_computed_of_its_parameters_is_computed_anew(method):
    """LeViT keeps its attention biases by position while it does not train."""
    sizes = {"image_size": 64, "hidden_sizes": [16, 16, 16], "num_attention_heads": [1, 1, 1],
             "depths": [1, 1, 1], "key_dim": [8, 8, 8]}  # fmt: skip
    model = LevitForImageClassification(LevitConfig(**sizes)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("attention_biases"):
            torch.nn.init.normal_(parameter)
    pixels = torch.randn(2, 3, 64, 64)
    bare = model(pixels).logits
    for _ in range(2):
        adapter = ah.attach(model, method, name="a")
        with torch.no_grad():
            for changed in adapter.changed:
                changed.own.add_(1.0 * changed.name.endswith("attention_biases"))
        with ah.disabled(model):
            assert torch.equal(model(pixels).logits, bare)
        assert not torch.equal(model(pixels).logits, bare)
        ah.detach(model)
        assert torch.equal(model(pixels).logits, bare)
