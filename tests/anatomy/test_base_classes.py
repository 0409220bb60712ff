"""Base models of types with one class, several, or none in AutoModel."""

from __future__ import annotations

import every_type
import pytest
import torch
from transformers import CONFIG_MAPPING, BertConfig, PreTrainedConfig

from adapterhub.anatomy import anatomy_of
from adapterhub.anatomy.backbone import base_classes, new_base_model


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
        assert type(new_base_model(model.config)).__name__ == name


def test_a_type_without_classes_has_no_base_model():
    class OtherConfig(PreTrainedConfig):
        model_type = "other"

    assert base_classes(OtherConfig()) == ()
    with pytest.raises(ValueError, match="no auto class of transformers has a OtherConfig"):
        new_base_model(OtherConfig())
    assert len(base_classes(BertConfig())) == 1


def test_a_base_model_with_a_module_for_its_layers_has_no_task_head():
    model = every_type.build("dinov3_vit", "AutoModel", tiny=True)
    assert model.base_model is not model
    anatomy = anatomy_of(model)
    assert anatomy.head() == {}
    assert any(path.startswith("embeddings.") for path in anatomy.parameters())
    assert isinstance(model.config, CONFIG_MAPPING["dinov3_vit"])
