"""Kinds of task model."""

from __future__ import annotations

import pytest
import transformers

import adapterhub as ah
from adapterhub.backbones import task_models
from adapterhub.errors import ConfigError
from tests.kit import tiny_models

READS = {
    "AutoTokenizer": "bert", "AutoImageProcessor": "vit", "AutoFeatureExtractor": "wav2vec2",
    "AutoProcessor": "speech-ctc", task_models.PICTURES_WITH_TEXT: "vlm-llava",
}  # fmt: skip


OTHER_BACKBONES = ("seq2seq", "causal-lm", "text-to-image")


@pytest.mark.parametrize("task", [t for t in task_models.TASK_MODELS if t not in OTHER_BACKBONES])
def test_a_loaded_model_has_the_kind_it_was_loaded_as(task, backbones):
    backbone = backbones(READS[task_models.TASK_MODELS[task].processor])
    labels = ["a", "b"] if task_models.TASK_MODELS[task].classes else []
    model, _ = ah.load_backbone(str(backbone), task=task, labels=labels)
    # Some kinds have one class; the number of outputs decides, or whether there is a pooler.
    assert task_models.task_kind(model) == task
    assert type(model) in task_models.task_model(task).classes_for(model.config)


def test_an_architecture_has_one_of_two_classes(backbones):
    kinds = {
        "speech-ctc": ("AutoModelForCTC", "Wav2Vec2ForCTC"),
        "speech-whisper": ("AutoModelForSpeechSeq2Seq", "WhisperForConditionalGeneration"),
    }
    row = task_models.task_model("speech-recognition")
    for name, (auto, class_name) in kinds.items():
        model, _ = ah.load_backbone(str(backbones(name)), task="speech-recognition")
        assert type(model).__name__ == class_name
        assert row.auto_name(type(model.config)) == auto
        assert task_models.task_kind(model) == "speech-recognition"
        if auto == "AutoModelForCTC":  # a mean without infinities
            assert (model.config.ctc_loss_reduction, model.config.ctc_zero_infinity) == (
                "mean", True)  # fmt: skip
        assert type(ah.load_backbone(str(backbones(name)))[0]).__name__ != class_name
    assert row.autos == ("AutoModelForCTC", "AutoModelForSpeechSeq2Seq")
    assert row.auto_name(type(tiny_models.model("bert").config)) == "AutoModelForCTC"


def test_the_configuration_of_the_text_is_all_of_it_or_a_part(backbones):
    llama = tiny_models.model("llama")
    assert task_models.text_config(llama) is llama.config
    llava, _ = ah.load_backbone(str(backbones("vlm-llava")), task="image-text-to-text")
    assert task_models.text_config(llava) is llava.config.text_config


def test_language_models_have_a_kind_and_a_class_of_no_kind_has_none():
    for architecture, task in (("llama", "causal-lm"), ("t5", "seq2seq")):
        assert task_models.task_kind(tiny_models.language_model(architecture)) == task
    config = tiny_models.model("bert").config
    assert task_models.task_kind(transformers.BertForNextSentencePrediction(config)) is None


def test_embeddings_have_no_pooler(backbone):
    """It is not read, so that nothing of it may train; classes without the option stay."""
    model, _ = ah.load_backbone(str(backbone), task="embedding")
    assert model.pooler is None
    assert ah.load_backbone(str(backbone))[0].pooler is not None
    assert task_models.task_model("embedding").init_options(tiny_models.model("llama").config) == {}


def test_label_options():
    options = task_models.label_options("tagging", ["O", "B"])
    assert options["id2label"] == {0: "O", 1: "B"}
    assert options["label2id"] == {"O": 0, "B": 1}
    assert task_models.label_options("question-answering", [])["id2label"] == {0: "start", 1: "end"}
    assert task_models.label_options("regression", []) == {
        "num_labels": 1,
        "problem_type": "regression",
    }
    assert task_models.label_options("causal-lm", ["ignored"]) == {}


def test_without_labels_a_head_has_those_of_the_checkpoint(backbone):
    """An adapter that is loaded has its own: nobody needs to make labels up for it."""
    model, _ = ah.load_backbone(str(backbone), task="classification")
    assert list(model.config.id2label.values()) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert model.config.problem_type == "single_label_classification"
    assert "num_labels" not in task_models.label_options("tagging", [])


@pytest.mark.parametrize("labels", [["a"], ["a", "a"]])
def test_classes_must_be_two_or_more_and_different(labels):
    with pytest.raises(ConfigError, match="two or more different labels") as error:
        task_models.label_options("classification", labels)
    assert 'task="classification"' in error.value.hint
