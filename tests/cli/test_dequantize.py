"""Checkpoints in FP8 on the command line: decoded, trained on, merged into."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import adapterhub as ah
from tests.kit import own_models, tiny_models
from tests.kit.data import sentences, write_tsv
from tests.kit.session import succeeded


@pytest.fixture
def checkpoint(tmp_path):
    return own_models.save_checkpoint(tiny_models.model("llama", "causal-lm"), tmp_path / "coded")


@pytest.mark.parametrize("words", [(), ("--quantize", "dequantize")])
def test_train_predict_and_merge(words, adapterhub, checkpoint, tmp_path):
    data = write_tsv(tmp_path / "a.tsv", sentences(24))
    run, merged = tmp_path / "run", tmp_path / "merged"
    line = ("train", "--backbone", checkpoint, "--task", "causal-lm", "--method", "dora", "--train")
    line += (data, "--text", "text", "--label", "label", "--steps", "4", "--output", run, *words)
    succeeded(adapterhub(*line))
    succeeded(adapterhub("predict", run, "a good film"))
    out = succeeded(adapterhub("merge", run, "--output", merged))
    assert "fp32" in out.splitlines()[0]
    plain = AutoModelForCausalLM.from_pretrained(merged)
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    model, _ = ah.load_backbone(str(checkpoint), task="causal-lm", dtype="fp32")
    ah.load(model, run / "adapter")
    inputs = tiny_models.batch()
    torch.testing.assert_close(plain(**inputs).logits, model(**inputs).logits, atol=1e-3, rtol=1e-3)
