"""The modules of a backbone: base classes, paths, positions, tokens, and no adapters."""

from __future__ import annotations

import every_type
import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, BertConfig, PreTrainedConfig

from adapterhub.anatomy import anatomy_of, backbone
from adapterhub.anatomy.backbone import Backbone
from tests.kit import tiny_models


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("bert", "BertModel"),
        ("funnel", "FunnelModel"),  # two classes
        ("pop2piano", "Pop2PianoForConditionalGeneration"),  # a class of a task only
        ("encoder-decoder", "EncoderDecoderModel"),
    ],
)
def test_the_base_model_of_a_type(model_type, name):
    model = every_type.build(
        model_type, every_type.autos(model_type, every_type.ADAPTED)[0], tiny=True
    )
    with torch.device("meta"):
        assert type(backbone.new_base_model(model.config)).__name__ == name


def test_a_type_without_classes_has_no_base_model():
    class OtherConfig(PreTrainedConfig):
        model_type = "other"

    assert backbone.base_classes(OtherConfig()) == ()
    with pytest.raises(ValueError, match="no auto class of transformers has a OtherConfig"):
        backbone.new_base_model(OtherConfig())
    assert len(backbone.base_classes(BertConfig())) == 1


def test_a_base_model_with_a_module_for_its_layers_has_no_task_head():
    model = every_type.build("dinov3_vit", "AutoModel", tiny=True)
    assert model.base_model is not model
    anatomy = anatomy_of(model)
    assert anatomy.head() == {}
    assert any(path.startswith("embeddings.") for path in anatomy.parameters())
    assert isinstance(model.config, CONFIG_MAPPING["dinov3_vit"])


def test_the_vocabulary_of_a_model_that_was_never_on_disk():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
        image_size=8, patch_size=4,
    )  # fmt: skip
    text, pictures = tiny_models.model("bert", "features"), transformers.ViTModel(config)
    for model, size in ((text, tiny_models.VOCAB), (pictures, None)):
        assert Backbone.of(model).checkpoint_vocabulary_size() is None
        Backbone.of(model).remember_vocabulary_size()
        assert Backbone.of(model).checkpoint_vocabulary_size() == size
    # A table that is no matrix of its own is not used.
    text.set_input_embeddings(nn.Identity())
    assert Backbone.of(text).token_embedding is Backbone.of(pictures).token_embedding is None
