"""Outputs of prefix, prompt and p-tuning equal those of `peft` with the same tensors."""

from __future__ import annotations

import copy

import pytest
import torch

import adapterhub as ah
from tests.kit import tiny_models

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def positions(length, rows=3, tokens=9):
    """Return positions after the prefix, as in peft, which keeps the prefix in the KV cache."""
    return torch.arange(length, length + tokens).expand(rows, -1)


@pytest.mark.parametrize(
    "architecture", ["gpt2", "llama", "qwen2", "gpt_neox", "phi3", "olmo2", "mixtral"]
)
def test_prefix_equals_peft(architecture):
    backbone = tiny_models.model(architecture, "causal-lm")
    ours = copy.deepcopy(backbone)
    adapter = ah.attach(ours, "prefix(length=5)")
    tiny_models.scramble(adapter, std=1.0)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    theirs = peft.get_peft_model(backbone, config).eval()
    table = torch.stack([p.module.prefix for p in adapter.placed])  # (layers, 2, length, d_kv)
    weight = theirs.prompt_encoder["default"].embedding.weight
    weight.data.copy_(table.permute(2, 0, 1, 3).reshape(weight.shape))
    inputs = tiny_models.batch()
    with torch.no_grad():
        expected = theirs(**inputs).logits
        logits = ours(**inputs, position_ids=positions(5)).logits
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen2"])
def test_a_reparametrized_prefix_equals_peft(architecture):
    backbone = tiny_models.model(architecture, "causal-lm")
    ours = copy.deepcopy(backbone)
    adapter = ah.attach(ours, "prefix(length=5, reparametrize=True, middle=7)")
    tiny_models.scramble(adapter)
    config = peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=5, prefix_projection=True, encoder_hidden_size=7
    )
    theirs = peft.get_peft_model(backbone, config).eval()
    encoder = theirs.prompt_encoder["default"]
    trunk = adapter.placed[0].module.trunk
    encoder.embedding.weight.data.copy_(trunk.prefix)
    encoder.transform[0].load_state_dict(trunk.inner.state_dict())
    outer = [p.module.outer for p in adapter.placed]
    encoder.transform[2].weight.data.copy_(torch.cat([o.weight for o in outer]))
    encoder.transform[2].bias.data.copy_(torch.cat([o.bias for o in outer]))
    inputs = tiny_models.batch()
    with torch.no_grad():
        expected = theirs(**inputs).logits
        logits = ours(**inputs, position_ids=positions(5)).logits
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


DECODERS = ("gpt2", "llama", "bloom", "gptj", "phi3")
TASKS = {"t5": "seq2seq", "bert": "features"} | dict.fromkeys(DECODERS, "causal-lm")
KINDS = {
    "seq2seq": "SEQ_2_SEQ_LM",
    "causal-lm": "CAUSAL_LM",
    "features": "FEATURE_EXTRACTION",
}


@pytest.mark.parametrize("architecture", TASKS)
def test_prompt_equals_peft(architecture):
    backbone = tiny_models.model(architecture, TASKS[architecture])
    ours = copy.deepcopy(backbone)
    adapter = ah.attach(ours, "prompt(length=5)")
    # peft trains a prompt for both stacks of an encoder-decoder by default, but uses the encoder's
    # only.
    config = peft.PromptTuningConfig(
        task_type=KINDS[TASKS[architecture]], num_virtual_tokens=5, num_transformer_submodules=1
    )
    theirs = peft.get_peft_model(backbone, config).eval()
    theirs.prompt_encoder["default"].embedding.weight.data.copy_(adapter.placed[0].module.prompt)
    assert_same_outputs(ours, theirs, TASKS[architecture])


@pytest.mark.parametrize("encoder", ["mlp", "lstm"])
@pytest.mark.parametrize("architecture", TASKS)
def test_p_tuning_equals_peft(architecture, encoder):
    backbone = tiny_models.model(architecture, TASKS[architecture])
    ours = copy.deepcopy(backbone)
    adapter = ah.attach(ours, f"p-tuning(length=5, middle=7, encoder='{encoder}')")
    tiny_models.scramble(adapter)
    config = peft.PromptEncoderConfig(
        task_type=KINDS[TASKS[architecture]],
        num_virtual_tokens=5,
        num_transformer_submodules=1,
        encoder_reparameterization_type=encoder.upper(),
        encoder_hidden_size=7,
        encoder_dropout=0.0,
    )
    theirs = peft.get_peft_model(backbone, config).eval()
    module, peft_encoder = adapter.placed[0].module, theirs.prompt_encoder["default"]
    peft_encoder.embedding.weight.data.copy_(module.prompt)
    peft_encoder.mlp_head.load_state_dict(module.head.state_dict())
    if encoder == "lstm":
        peft_encoder.lstm_head.load_state_dict(module.lstm.state_dict())
    assert_same_outputs(ours, theirs, TASKS[architecture])


def assert_same_outputs(ours, theirs, task):
    """Compare the outputs; peft returns those of the virtual tokens too, except for T5."""
    inputs = tiny_models.batch()
    if task == "seq2seq":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    with torch.no_grad():
        expected, output = theirs(**inputs), ours(**inputs)
    name = "last_hidden_state" if task == "features" else "logits"
    virtual = 0 if task == "seq2seq" else 5
    torch.testing.assert_close(output[name], expected[name][:, virtual:], atol=2e-5, rtol=1e-4)
