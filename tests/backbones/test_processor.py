"""Processors and tokenizers of backbones: identity, pictures, sounds, added tokens."""

import importlib.util
import json

import pytest
import transformers
from PIL import Image
from tokenizers import normalizers

from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones import processor as processors
from adapterhub.backbones.load import load_backbone, load_processor
from adapterhub.backbones.processor import PictureTextProcessor, sound_inputs
from adapterhub.errors import BackboneError, ConfigError
from tests.kit import media, tiny_models
from tests.kit.data import word_tokenizer


def identity(processor):
    model = tiny_models.model("bert")
    Backbone.of(model).processor = processor
    return processors.processor_identity(Backbone.of(model).processor)


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
    sounds = (media.sound_extractor("whisper"), media.sound_extractor("wav2vec2"))
    options = ({}, {"hop_length": 80})
    sounds += tuple(
        transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1, **each)
        for each in options
    )
    of_whisper, of_wav2vec2, equal, other = map(identity, sounds)
    assert of_whisper == equal
    assert len({of_whisper, of_wav2vec2, other}) == 3


def test_the_identity_has_no_names_of_classes_and_nothing_neutral(tmp_path):
    media.image_processor().save_pretrained(tmp_path)
    path = next(tmp_path.glob("*processor_config.json"))
    config = json.loads(path.read_text())
    config |= {"image_processor_type": "ViTImageProcessorFast", "processor_class": "X"}
    path.write_text(json.dumps(config | {"do_convert_rgb": None, "do_later": False}))
    other = transformers.ViTImageProcessorPil.from_pretrained(tmp_path)
    assert identity(other) == identity(media.image_processor())
    tokenizer = word_tokenizer()
    assert (
        processors.tokenizer_of(tokenizer),
        processors.tokenizer_of(media.image_processor()),
    ) == (tokenizer, None)
    assert identity(tokenizer) is processors.processor_identity(None) is None
    assert Backbone.of(tiny_models.model("bert")).processor is None


@pytest.mark.parametrize(
    ("name", "task"), [("vit", "image-classification"), ("vlm-llava", "image-text-to-text")]
)
def test_a_processor_is_loaded_with_its_backbone(name, task, backbones):
    """Of pictures with text, the identity is that of the image processor."""
    model, processor = load_backbone(str(backbones(name)), task=task)
    alone = load_processor(str(backbones(name)), task)
    found = processors.processor_identity(Backbone.of(model).processor)
    assert found is not None
    assert found == identity(processor) == identity(alone)
    if name == "vit":
        assert "Pil" in type(processor).__name__
        pictures = [Image.new("RGB", (40, 20))]
        pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
        assert model(pixel_values=pixels).logits.shape == (1, 2)
    else:
        processor.image_processor.image_mean = [0.1, 0.2, 0.3]
        assert identity(processor) != found


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
    counts = processors.frame_counts(model, batch)
    assert counts == [
        model(**sound_inputs(processor, [media.tone(300, s)])).logits.shape[1] for s in (0.2, 0.5)
    ]
    assert counts[1] == model(**batch).logits.shape[1]
    assert processors.frame_counts(model, {"input_values": batch["input_values"]}) is None
    assert processors.frame_counts(tiny_models.model("bert"), batch) is None


def test_new_tokens_need_a_tokenizer(backbones):
    with pytest.raises(ConfigError, match="reads no text: <new>"):
        load_processor(str(backbones("vit")), "image-classification", new_tokens=["<new>"])


TASK = "image-text-to-text"


@pytest.mark.parametrize("name", sorted(media.SAVED))
def test_a_processor_of_each_layout_loads(name, backbones):
    folder = backbones(f"vlm-{name}")
    processor = PictureTextProcessor.from_pretrained(folder)
    assert type(processor.image_processor).__name__.endswith("Pil")
    placeholder = processors.image_placeholder(processor)
    made = processors.picture_inputs(
        processor, [[Image.new("RGB", (16, 16))]], [f"{placeholder}what?"]
    )
    assert made["input_ids"].shape[1] > 4
    assert "pixel_values" in made
    assert processors.learns_suffix(processor) == (name == "paligemma")


def test_what_is_saved_is_loaded_again(backbones, tmp_path):
    first = PictureTextProcessor.from_pretrained(backbones("vlm-qwen2_vl"))
    first.save_pretrained(tmp_path)
    again = PictureTextProcessor.from_pretrained(tmp_path)
    assert type(again).__mro__[1] is transformers.Qwen2VLProcessor
    assert again.chat_template == first.chat_template
    assert again.image_processor.to_dict() == first.image_processor.to_dict()


def test_the_class_is_named_by_old_files_or_by_the_type_of_model(backbones, tmp_path):
    folder = tmp_path / "old"
    for source in backbones("vlm-llava").iterdir():
        folder.mkdir(exist_ok=True)
        (folder / source.name).write_bytes(source.read_bytes())
    joined = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(joined["image_processor"]))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer.pop("processor_class", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    processor = PictureTextProcessor.from_pretrained(folder)
    assert isinstance(processor, transformers.LlavaProcessor)


def test_a_backbone_of_text_has_no_such_model(backbones):
    with pytest.raises(BackboneError, match="no model for image-text-to-text"):
        load_backbone(str(backbones("bert")), task=TASK)
    with pytest.raises(BackboneError, match="no processor for images with text"):
        PictureTextProcessor.from_pretrained(backbones("bert"))


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="is installed")
def test_a_class_that_needs_torchvision_is_told(tmp_path):
    (tmp_path / "processor_config.json").write_text('{"processor_class": "PixtralProcessor"}')
    transformers.LlavaConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="PixtralProcessor of transformers needs torchvision"):
        PictureTextProcessor.from_pretrained(tmp_path)


def snapshot(tokenizer=None):
    tokenizer = tokenizer or word_tokenizer()
    return processors.TokenizerSnapshot(tokenizer, len(tokenizer))


def test_the_identity_of_a_tokenizer_depends_on_its_encoding():
    lower = word_tokenizer()
    lower.backend_tokenizer.normalizer = normalizers.Replace("d", "the ")
    assert snapshot(lower).identity() != snapshot().identity(), "with an equal vocabulary"


def test_the_default_of_several_chat_templates_is_used():
    value = snapshot()
    value.tokenizer.chat_template = {"default": "a", "tools": "b"}
    assert value.chat_template() == "a"
    value.tokenizer.chat_template = None
    assert value.chat_template() is None


def test_long_tokens_of_a_python_tokenizer_are_removed():
    tokenizer = transformers.ByT5Tokenizer()
    before = json.dumps(tokenizer.tokens_trie.data)
    tokenizer.add_tokens([long := "x" * 5000, long + "y"])
    processors.remove_added_tokens(tokenizer, [long + "y"])
    assert long in tokenizer.get_vocab()
    processors.remove_added_tokens(tokenizer, [long])
    assert json.dumps(tokenizer.tokens_trie.data) == before
