"""LoRA, prefix and prompt tuning compute what `peft` computes, on the same backbone with the same
tensors."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch

import adapterhub as ah

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

LORA = {
    "bert": (["attn.q", "attn.v"], ["query", "value"]),
    "roberta": (["attn.k", "ffn.up"], ["key", "intermediate.dense"]),
    "distilbert": (["attn.q", "attn.v"], ["q_lin", "v_lin"]),
    "gpt2": (["attn.qkv"], ["c_attn"]),
    "llama": (["attn.q", "attn.v", "ffn.down"], ["q_proj", "v_proj", "down_proj"]),
    "albert": (["attn.q", "ffn.up"], ["query", "ffn"]),
    "deberta-v2": (["attn.q", "attn.v"], ["query_proj", "value_proj"]),
    "modernbert": (["attn.qkv", "ffn.gate_up"], ["Wqkv", "Wi"]),
    "gpt_neox": (["attn.qkv", "ffn.up"], ["query_key_value", "dense_h_to_4h"]),
    "phi3": (["attn.qkv", "ffn.gate_up"], ["qkv_proj", "gate_up_proj"]),
    "mixtral": (["attn.q", "attn.v"], ["q_proj", "v_proj"]),
    "t5": (["attn.q", "attn.v", "cross.q", "cross.v"], ["q", "v"]),
    "bart": (["attn.o", "cross.k"], [r".*(self_attn\.out_proj|encoder_attn\.k_proj)"]),
}


def modules_with(model, attribute):
    return [(name, m) for name, m in model.named_modules() if hasattr(m, attribute)]


@pytest.mark.parametrize("architecture", LORA)
def test_lora(architecture):
    sites, targets = LORA[architecture]
    backbone = tiny.model(architecture)
    ours = copy.deepcopy(backbone)
    adapter = ah.attach(ours, {"lora": {"rank": 4, "alpha": 12, "sites": sites}})
    tiny.scramble(adapter)
    targets = targets[0] if targets[0].startswith(".") else targets
    config = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules=targets, fan_in_fan_out=architecture == "gpt2"
    )
    theirs = peft.get_peft_model(backbone, config).eval()
    hosts = {p.site.host: p.module for p in adapter.placed}
    layers = modules_with(theirs, "lora_A")
    assert len(layers) == len(hosts) > 0
    for name, layer in layers:
        own = hosts[name.removeprefix("base_model.model.")]
        layer.lora_A["default"].weight.data.copy_(own.A)
        layer.lora_B["default"].weight.data.copy_(own.B)
    for name, module in adapter.head.own.items():
        theirs.base_model.model.get_submodule(name).load_state_dict(module.state_dict())
    with torch.no_grad():
        expected = theirs(**tiny.batch()).logits
        torch.testing.assert_close(ours(**tiny.batch()).logits, expected, atol=1e-6, rtol=1e-5)


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
