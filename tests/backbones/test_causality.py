"""Causal language models do not read ahead; those that do are refused."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from fixtures import word_tokenizer
from transformers import AutoModelForCausalLM

import adapterhub as ah
from adapterhub.backbones.causality import reads_ahead
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.errors import BackboneError

CONFIGS = {a: tiny_models.usual_model(a).config for a in tiny_models.MATRIX}
CAUSAL = [a for a in CONFIGS if TASK_MODELS["causal-lm"].classes_for(CONFIGS[a])]
DECODERS = (*tiny_models.DECODERS, *tiny_models.ENCODER_DECODERS)
ENCODERS = ["bert", "roberta", "electra", "xlnet"]


def test_the_architectures_are_covered():
    assert len(CAUSAL) > (25 if tiny_models.FULL_MATRIX else 5)
    assert any(a in DECODERS for a in CAUSAL)


@pytest.mark.parametrize("architecture", sorted({*CAUSAL, *ENCODERS}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_decoders_do_not_read_ahead(architecture, dtype):
    model = tiny_models.model(architecture, "causal-lm").to(dtype)
    assert reads_ahead(model) == (architecture not in DECODERS)


def test_an_encoder_that_is_configured_as_a_decoder_does_not_read_ahead():
    assert not reads_ahead(tiny_models.model("bert", "causal-lm", is_decoder=True))


@pytest.mark.parametrize("architecture", ENCODERS)
def test_a_backbone_that_reads_ahead_is_refused(architecture, tmp_path):
    tiny_models.model(architecture, "causal-lm").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        BackboneError, match="attends to the tokens that it should predict"
    ) as error:
        ah.load_backbone(str(tmp_path), task="causal-lm")
    assert "--task masked-lm" in error.value.hint


KINDS = [("gpt2", "masked-lm"), ("llama", "seq2seq"), ("bert", "seq2seq"), ("t5", "masked-lm"),
         ("t5", "causal-lm"), ("xglm", "classification")]  # fmt: skip


@pytest.mark.parametrize(("architecture", "task"), KINDS)
def test_a_kind_that_an_architecture_lacks_is_refused(architecture, task, tmp_path):
    tiny_models.usual_model(architecture).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(BackboneError, match=f"which has no model for {task}") as error:
        ah.load_backbone(str(tmp_path), task=task, labels=["a", "b"])
    assert error.value.expected.startswith("one of features")
    assert len(str(error.value)) < 500


def test_the_model_is_left_as_it_was():
    model = tiny_models.model("gpt2", "causal-lm").train()
    assert isinstance(model, AutoModelForCausalLM._model_mapping[type(model.config)])
    reads_ahead(model)
    assert all(module.training for module in model.modules())
