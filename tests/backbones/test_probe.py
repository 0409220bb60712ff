"""The probe: a small batch, and a model's outputs on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.probe import ROWS, TOKENS, picture_batch, probe, probe_batch
from adapterhub.backbones.processor import sound_inputs
from tests.kit import media, tiny_models


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "t5"])
def test_the_batch_has_ordinary_tokens_and_eos_at_the_end(architecture):
    model = tiny_models.usual_model(architecture)
    batch = probe_batch(model)
    ids = batch["input_ids"]
    special = {v for k, v in vars(model.config).items() if k.endswith("token_id")}
    assert ids.shape == batch["attention_mask"].shape == (ROWS, TOKENS)
    assert not set(ids[:, :-1].flatten().tolist()) & special
    assert (ids[:, -1] == tiny_models.EOS).all()
    assert ("decoder_input_ids" in batch) == (architecture == "t5")


def test_a_seed_determines_the_batch():
    model = tiny_models.usual_model("bert")
    first = probe_batch(model, seed=1)["input_ids"]
    assert torch.equal(first, probe_batch(model, seed=1)["input_ids"])
    assert not torch.equal(first, probe_batch(model, seed=2)["input_ids"])
    assert probe_batch(model, rows=2, tokens=5)["input_ids"].shape == (2, 5)


def test_the_modes_of_modules_return_even_after_an_error():
    model = tiny_models.usual_model("bert").train()
    dropout = next(m for m in model.modules() if isinstance(m, nn.Dropout)).eval()
    outputs = probe(model)
    assert outputs.keys() == {"logits"}
    assert torch.equal(outputs["logits"], probe(model)["logits"]), "computed in evaluation mode"
    assert model.training
    assert not dropout.training
    model.classifier = None
    with pytest.raises(TypeError):
        probe(model)
    assert model.training


def test_a_model_without_logits_returns_its_other_outputs_in_fp32():
    outputs = probe(tiny_models.model("bert", "features").to(torch.bfloat16))
    assert "last_hidden_state" in outputs
    assert {t.dtype for t in outputs.values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["wav2vec2", "whisper", "audio-spectrogram-transformer"])
def test_a_model_of_sound_gets_noise_as_its_processor_hears_it(kind, backbones):
    folder = str(backbones(kind))
    model, processor = load_backbone(folder, task="audio-classification", labels=["a", "b"])
    batch = probe_batch(model, rows=3)
    assert model.main_input_name in batch
    half = np.random.default_rng(0).normal(0, 0.1, (3, 8000)).astype(np.float32)
    expected = sound_inputs(processor, list(half))
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in batch)
    assert probe(model)["logits"].shape == (4, 2)


def test_a_model_of_sound_without_a_processor_gets_raw_noise():
    config = media.sound_config("wav2vec2")
    model = transformers.Wav2Vec2ForSequenceClassification(config).eval()
    assert probe_batch(model)["input_values"].shape == (4, 8000)


def test_a_model_of_pictures_gets_pixels_of_its_size():
    model = transformers.ViTForImageClassification(media.vit_config(image_size=8)).eval()
    batch = probe_batch(model, rows=3)
    assert batch.keys() == {"pixel_values"}
    assert batch["pixel_values"].shape == (3, 3, 8, 8)
    assert probe(model)["logits"].shape == (4, 2)


def test_a_model_of_pictures_with_text_is_probed_with_both(backbones):
    model, _ = load_backbone(str(backbones("vlm-qwen2_vl")), task="image-text-to-text")
    batch = picture_batch(model)
    assert len(batch["input_ids"]) == len(batch["image_grid_thw"]) == ROWS
    assert torch.equal(batch["pixel_values"], picture_batch(model)["pixel_values"])
    before = probe(model)["logits"]
    with torch.no_grad():
        model.model.visual.blocks[0].mlp.fc1.weight += 0.1
    assert not torch.equal(probe(model)["logits"], before)
    assert picture_batch(tiny_models.usual_model("bert")) == {}
