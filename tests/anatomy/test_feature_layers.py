"""Layers of an encoder of pictures behind those that a language model reads."""

from __future__ import annotations

import pytest
import torch
import transformers

import adapterhub as ah
from adapterhub.anatomy.build import anatomy_of
from adapterhub.anatomy.sites import dropped_modules
from tests.kit import media


def llava(read, layers=3):
    words = 40
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            **{**media.VISION, "num_hidden_layers": layers}, projection_dim=32
        ),
        text_config=transformers.LlamaConfig(**media.TEXT, vocab_size=words),
        image_token_index=5,
        vision_feature_layer=read,
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def test_what_gets_no_gradient_is_dropped(subtests):
    for read, first in [(-2, 2), (-3, 1), (1, 1), ([-3, -2], 2), (-1, None), ([0, 3], None)]:
        with subtests.test(read=read):
            model = llava(read)
            dropped = dropped_modules(anatomy_of(model))
            tower = "model.vision_tower"
            expected = [f"{tower}.encoder.layers.{i}" for i in range(first, 3)] if first else []
            assert list(dropped[: len(expected)]) == expected
            ids = torch.tensor([[7, *[5] * 16, 8]])
            pixels = torch.randn(1, 3, 16, 16)
            model(input_ids=ids, pixel_values=pixels, labels=ids).loss.backward()
            without = {n for n, p in model.named_parameters() if p.grad is None}
            inside = {
                n
                for n, _ in model.named_parameters()
                if n.startswith(tuple(f"{d}." for d in dropped))
            }
            assert inside <= without
            if first:
                assert without - inside == set()


@pytest.mark.parametrize("method", ["lora", "pfeiffer", "ia3", "prefix", "full", "norms", "bitfit"])
def test_methods_train_only_what_is_read(method):
    model = llava(-2)
    adapter = ah.attach(model, method, name="one")
    dropped = tuple(f"{path}." for path in dropped_modules(anatomy_of(model)))
    assert not any(f"{p.site.host}.".startswith(dropped) for p in adapter.placed)
    ids, pixels = torch.tensor([[7, *[5] * 16, 8]]), torch.randn(1, 3, 16, 16)
    model(input_ids=ids, pixel_values=pixels, labels=ids).loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert [n for n, p in trained.items() if p.grad is None] == []


def test_other_models_read_all():
    assert dropped_modules(anatomy_of(transformers.BertModel(transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        vocab_size=20)))) == ()  # fmt: skip
