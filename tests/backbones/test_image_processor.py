"""Processors of pictures with text: without torchvision, and as they were saved."""

from __future__ import annotations

import importlib.util
import json

import pytest
import transformers
from PIL import Image

from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.load import load_backbone, load_processor
from adapterhub.backbones.processor import (
    PictureTextProcessor,
    for_pictures,
    image_placeholder,
    learns_suffix,
    picture_inputs,
    processor_identity,
)
from adapterhub.errors import BackboneError, ConfigError
from tests.kit import media

TASK = "image-text-to-text"


@pytest.mark.parametrize("name", sorted(media.SAVED))
def test_a_processor_of_each_layout_loads(name, backbones):
    folder = backbones(f"vlm-{name}")
    processor = PictureTextProcessor.from_pretrained(folder)
    assert type(processor.image_processor).__name__.endswith("Pil")
    placeholder = image_placeholder(processor)
    made = picture_inputs(processor, [[Image.new("RGB", (16, 16))]], [f"{placeholder}what?"])
    assert made["input_ids"].shape[1] > 4
    assert "pixel_values" in made
    assert learns_suffix(processor) == (name == "paligemma")


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


def test_the_identity_is_that_of_the_image_processor(backbones):
    model, processor = load_backbone(str(backbones("vlm-llava")), task=TASK)
    identity = processor_identity(Backbone.of(model).processor)
    assert identity is not None
    alone = load_processor(str(backbones("vlm-llava")), TASK)
    assert alone.image_processor.to_dict() == processor.image_processor.to_dict()
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    Backbone.of(model).processor = processor
    assert processor_identity(Backbone.of(model).processor) != identity


def test_a_backbone_of_text_has_no_such_model(backbones):
    with pytest.raises(BackboneError, match="no model for image-text-to-text"):
        load_backbone(str(backbones("bert")), task=TASK)
    with pytest.raises(BackboneError, match="no processor for images with text"):
        PictureTextProcessor.from_pretrained(backbones("bert"))


def test_a_tokenizer_has_no_placeholder():
    words = media.picture_tokenizer({"image_token": "<image>"})
    assert image_placeholder(words) is None
    assert image_placeholder(None) is None


def test_parts_for_videos_are_left_out():
    own = for_pictures(transformers.Qwen2VLProcessor)
    assert own.get_attributes() == ["image_processor", "tokenizer"]
    assert own.video_processor is None
    assert "video_processor" in transformers.Qwen2VLProcessor.get_attributes()


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="is installed")
def test_a_class_that_needs_torchvision_is_told(tmp_path):
    (tmp_path / "processor_config.json").write_text('{"processor_class": "PixtralProcessor"}')
    transformers.LlavaConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="PixtralProcessor of transformers needs torchvision"):
        PictureTextProcessor.from_pretrained(tmp_path)
