"""The processor of a backbone, and its identity."""

from __future__ import annotations

import json

import pytest
import transformers
from PIL import Image

from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.load import load_backbone, load_processor
from adapterhub.backbones.processor import (
    frame_counts,
    heard_seconds,
    processor_identity,
    sampling_rate,
    sound_inputs,
    tokenizer_of,
)
from adapterhub.errors import ConfigError
from tests.kit import media, tiny_models
from tests.kit.data import word_tokenizer


def identity(processor):
    model = tiny_models.model("bert")
    Backbone.of(model).processor = processor
    return processor_identity(Backbone.of(model).processor)


def test_the_tokenizer_of_a_processor():
    tokenizer = word_tokenizer()
    assert tokenizer_of(tokenizer) is tokenizer
    assert tokenizer_of(media.image_processor()) is None


def test_the_identity_is_that_of_the_settings(tmp_path):
    usual = identity(media.image_processor())
    assert len(usual) == 64
    media.image_processor().save_pretrained(tmp_path)
    assert identity(transformers.ViTImageProcessorPil.from_pretrained(tmp_path)) == usual
    changes = {
        "size": {"height": 8, "width": 8}, "image_mean": [0.4] * 3, "resample": 0,
        "do_normalize": False,
    }  # fmt: skip
    changed = {identity(media.image_processor(**{name: v})) for name, v in changes.items()}
    assert len(changed | {usual}) == len(changes) + 1


def test_the_identity_has_no_names_of_classes_and_nothing_neutral(tmp_path):
    media.image_processor().save_pretrained(tmp_path)
    path = next(tmp_path.glob("*processor_config.json"))
    config = json.loads(path.read_text())
    config |= {"image_processor_type": "ViTImageProcessorFast", "processor_class": "X"}
    path.write_text(json.dumps(config | {"do_convert_rgb": None, "do_later": False}))
    other = transformers.ViTImageProcessorPil.from_pretrained(tmp_path)
    assert identity(other) == identity(media.image_processor())


def test_a_tokenizer_has_no_identity_here():
    assert identity(word_tokenizer()) is None
    assert processor_identity(None) is None
    assert Backbone.of(tiny_models.model("bert")).processor is None


def test_a_processor_is_loaded_with_its_backbone(backbones):
    model, processor = load_backbone(str(backbones("vit")), task="image-classification")
    alone = load_processor(str(backbones("vit")), "image-classification")
    assert (
        processor_identity(Backbone.of(model).processor) == identity(processor) == identity(alone)
    )
    assert "Pil" in type(processor).__name__
    pixels = processor(images=[Image.new("RGB", (40, 20))], return_tensors="pt")["pixel_values"]
    assert model(pixel_values=pixels).logits.shape == (1, 2)


def test_what_a_processor_hears():
    whisper = media.sound_extractor("whisper")
    assert heard_seconds(whisper) == 1.0
    assert heard_seconds(media.sound_extractor("audio-spectrogram-transformer")) == 0.64
    assert heard_seconds(media.sound_extractor("wav2vec2")) is None
    assert sampling_rate(whisper) == 16_000
    both = transformers.Wav2Vec2Processor(media.sound_extractor("wav2vec2"), word_tokenizer())
    assert sampling_rate(both) == 16_000


def test_sounds_are_padded_as_their_processor_pads():
    short, long = media.tone(300, 0.02), media.tone(300, 0.5)
    padded = sound_inputs(media.sound_extractor("wav2vec2"), [short, long])
    assert padded["input_values"].shape == (2, 8000)
    assert padded["attention_mask"].sum(1).tolist() == [1600, 8000], "at least a tenth of a second"
    assert sound_inputs(media.sound_extractor("wav2vec2"), [short])["input_values"].shape == (
        1,
        1600,
    )
    whisper = media.sound_extractor("whisper")
    assert sound_inputs(whisper, [short, long])["input_features"].shape == (2, 16, 100)
    spectrogram = media.sound_extractor("audio-spectrogram-transformer")
    assert sound_inputs(spectrogram, [short])["input_values"].shape == (1, 64, 16)


def test_the_frames_of_padding_are_not_counted(backbones):
    model, processor = load_backbone(str(backbones("speech-ctc")), task="speech-recognition")
    batch = sound_inputs(processor, [media.tone(300, 0.2), media.tone(300, 0.5)])
    counts = frame_counts(model, batch)
    assert counts == [
        model(**sound_inputs(processor, [media.tone(300, s)])).logits.shape[1] for s in (0.2, 0.5)
    ]
    assert counts[1] == model(**batch).logits.shape[1]
    assert frame_counts(model, {"input_values": batch["input_values"]}) is None
    assert frame_counts(tiny_models.model("bert"), batch) is None


def test_the_settings_of_a_feature_extractor_are_its_identity():
    usual = identity(media.sound_extractor("whisper"))
    assert len({usual, identity(media.sound_extractor("wav2vec2"))}) == 2
    other = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1, hop_length=80)
    assert identity(other) != usual
    assert identity(transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)) == usual


def test_new_tokens_need_a_tokenizer(backbones):
    with pytest.raises(ConfigError, match="reads no text: <new>"):
        load_processor(str(backbones("vit")), "image-classification", new_tokens=["<new>"])
