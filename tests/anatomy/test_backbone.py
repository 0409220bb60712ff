"""The modules of a backbone: base classes, paths, positions, tokens, and no adapters."""

from __future__ import annotations

import every_type
import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, BertConfig, PreTrainedConfig

import adapterhub as ah
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


def test_modules_are_those_without_adapters():
    for architecture in ("bert", "albert", "t5"):
        model = tiny_models.usual_model(architecture)
        before = list(model.named_modules())
        assert backbone.own_modules(model) == before
        assert backbone.own_modules(model, every_use=True) == list(
            model.named_modules(remove_duplicate=False)
        )
        for name in "ab":
            ah.attach(model, "lora", name=name)
        assert [path for path, _ in backbone.own_modules(model)] == [path for path, _ in before]


def test_slots_are_listed_without_what_they_hold():
    model = tiny_models.usual_model("bert")
    assert not list(backbone.slots_in(model))
    ah.attach(model, "lora", name="a")
    slots = list(backbone.slots_in(model))
    assert len(slots) == 4
    ah.attach(model, "lora", name="b")
    assert list(backbone.slots_in(model)) == slots


def test_the_modules_of_positions():
    """Those that take positions, and tables that count them from the padding."""
    roots = {
        name: tiny_models.usual_model(name).base_model
        for name in ("bert", "llama", "gpt2", "bart", "t5", "m2m_100", "roberta")
    }
    for name in ("bert", "llama", "gpt2"):
        assert backbone.position_module(roots[name]) is roots[name]
    encoder = roots["bart"].encoder
    assert backbone.position_module(encoder) is encoder.embed_positions
    assert backbone.position_module(roots["t5"].encoder) is None
    assert backbone.position_module(nn.Linear(1, 1)) is None
    encoder = roots["m2m_100"].encoder
    assert backbone.padding_table(encoder) is encoder.embed_positions
    for name in ("bart", "roberta", "llama"):
        assert not any(map(backbone.padding_table, roots[name].modules()))


def test_the_table_of_tokens():
    model = tiny_models.model("bert")
    assert backbone.token_table(model) is model.bert.embeddings.word_embeddings
    # transformers raises NotImplementedError for models of sound.
    config = transformers.Wav2Vec2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    assert backbone.token_table(transformers.Wav2Vec2Model(config)) is None
    assert backbone.token_table(nn.Linear(1, 1)) is None
    module = nn.Module()  # FSMT's encoder is not a model of transformers
    module.embed_tokens = nn.Embedding(2, 2)
    assert backbone.token_table(module) is module.embed_tokens


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


def test_the_modules_with_a_row_for_each_token():
    model = tiny_models.model("t5", "seq2seq", tie_word_embeddings=True)
    paths = {module: path for path, module in model.named_modules()}
    found = {f"{paths[module]}.{name}" for module, name in Backbone.of(model).token_tables()}
    stacks = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    assert found == stacks | {"shared.weight", "lm_head.weight"}
    assert len(Backbone.of(tiny_models.model("bert")).token_tables()) == 1
