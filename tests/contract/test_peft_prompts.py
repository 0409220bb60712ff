"""Prefix and prompt tuning compute what `peft` computes, on the same backbone with the same
tensors."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch

import adapterhub as ah

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def positions(length, rows=3, tokens=9):
    """peft keeps the prefix in the KV cache, so that tokens count their positions behind it."""
    return torch.arange(length, length + tokens).expand(rows, -1)


@pytest.mark.parametrize(
    "architecture", ["gpt2", "llama", "qwen2", "gpt_neox", "phi3", "olmo2", "mixtral"]
)
def test_prefix(architecture):
    backbone = tiny.model(architecture, "causal-lm")
    ours = copy.deepcopy(backbone)
    adapter = ah.attach(ours, "prefix(length=5)")
    tiny.scramble(adapter, std=1.0)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    theirs = peft.get_peft_model(backbone, config).eval()
    table = torch.stack([p.module.prefix for p in adapter.placed])  # (layers, 2, length, d_kv)
    weight = theirs.prompt_encoder["default"].embedding.weight
    weight.data.copy_(table.permute(2, 0, 1, 3).reshape(weight.shape))
    inputs = tiny.batch()
    with torch.no_grad():
        expected = theirs(**inputs).logits
        found = ours(**inputs, position_ids=positions(5)).logits
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "architecture", ["gpt2", "llama", "bert", "t5", "opt", "bloom", "gptj", "phi3", "xglm"]
)
def test_prompt(architecture):
    task = {"t5": "seq2seq", "bert": "features"}.get(architecture, "causal-lm")
    kind = {"seq2seq": "SEQ_2_SEQ_LM", "causal-lm": "CAUSAL_LM"}.get(task, "FEATURE_EXTRACTION")
    backbone = tiny.model(architecture, task)
    ours = copy.deepcopy(backbone)
    adapter = ah.attach(ours, "prompt(length=5)")
    # peft asks for the prompt of both stacks of an encoder-decoder, but puts it into the encoder
    # alone.
    config = peft.PromptTuningConfig(
        task_type=kind, num_virtual_tokens=5, num_transformer_submodules=1
    )
    theirs = peft.get_peft_model(backbone, config).eval()
    theirs.prompt_encoder["default"].embedding.weight.data.copy_(adapter.placed[0].module.prompt)
    inputs = tiny.batch()
    if task == "seq2seq":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    with torch.no_grad():
        expected, found = theirs(**inputs), ours(**inputs)
    name = "last_hidden_state" if task == "features" else "logits"
    strip = 0 if task == "seq2seq" else 5
    torch.testing.assert_close(found[name], expected[name][:, strip:], atol=2e-5, rtol=1e-4)
