"""Prompts and prefixes compute the same here and in peft."""

from __future__ import annotations

import peft
import pytest
import torch
from safetensors.torch import load_file

import adapterhub as ah
from tests.kit import tiny_models
from tests.kit.peers import KINDS, compare_import, core, trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_after_an_encoder_layer_i_has_the_prefix_of_layer_2_i(tmp_path):
    config = peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2)
    layers = {"num_layers": 3, "num_decoder_layers": 3}
    adapter = compare_import(tmp_path, "t5", config, "seq2seq", atol=2e-5, **layers)
    held = load_file(tmp_path / "theirs" / "adapter_model.safetensors")["prompt_embeddings"]
    by_layer = held.view(2, 3, 2, -1)
    for layer, source in ((0, 0), (1, 2), (2, 1)):
        own = adapter.tensors()[f"decoder.{layer}.attn.kv.prefix.prefix"]
        assert torch.equal(own.transpose(0, 1), by_layer[:, source])


@pytest.mark.parametrize(
    "architecture", core(["gpt2", "llama", "qwen3", "t5", "bart"], "t5", "bart")
)
def test_a_prefix_generates_the_same_tokens(tmp_path, architecture):
    task = "seq2seq" if architecture in ("t5", "bart") else "causal-lm"
    config = peft.PrefixTuningConfig(task_type=KINDS[task], num_virtual_tokens=5)
    folder = trained(tmp_path / "theirs", architecture, config, task, std=2.0)
    theirs = peft.PeftModel.from_pretrained(tiny_models.model(architecture, task), folder)
    ours = tiny_models.model(architecture, task)
    inputs = tiny_models.batch()
    bare = ours.generate(**inputs, max_new_tokens=6, do_sample=False)
    ah.load(ours, folder)
    found = ours.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(found, theirs.generate(**inputs, max_new_tokens=6, do_sample=False))
    assert not torch.equal(found, bare)


@pytest.mark.parametrize("architecture", core(["gpt2", "llama", "qwen3"], "llama"))
def test_a_prompt_of_cpt_is_a_prompt(tmp_path, monkeypatch, architecture):
    forward = peft.PeftModelForCausalLM.forward  # which takes labels out without a default
    monkeypatch.setattr(
        peft.PeftModelForCausalLM, "forward",
        lambda self, *args, **given: forward(self, *args, **{"labels": None} | given),
    )  # fmt: skip
    config = peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[5, 6, 7, 8, 9], opt_projection_epsilon=40.0,
        opt_projection_format_epsilon=40.0,
    )  # fmt: skip
    adapter = compare_import(tmp_path, architecture, config, "causal-lm", atol=2e-5, strip=5)
    assert [method.name for method in adapter.methods] == ["prompt"]


def test_padding_and_generation_of_a_llama_adapter(tmp_path):
    config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")
    folder = trained(tmp_path / "theirs", "llama", config, "causal-lm", std=1.0)
    theirs = peft.PeftModel.from_pretrained(tiny_models.language_model("llama"), folder)
    ours = tiny_models.language_model("llama")
    ah.load(ours, folder)
    batch = tiny_models.padded_batch("left")
    options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True,
               "return_dict_in_generate": True, "pad_token_id": tiny_models.PAD}  # fmt: skip
    expected, found = (model.generate(**batch, **options) for model in (theirs, ours))
    assert torch.equal(found.sequences, expected.sequences)
    pair = (torch.stack(each.logits) for each in (found, expected))
    torch.testing.assert_close(*pair, atol=2e-5, rtol=1e-5)
