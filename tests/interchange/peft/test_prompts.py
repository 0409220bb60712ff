"""Prompts and prefixes compute the same here and in peft."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import adapterhub as ah
from adapterhub.errors import MismatchError
from tests.kit import tiny_models

peft = pytest.importorskip("peft")
from tests.kit.peers import KINDS, compare_export, compare_import, core, same_bits, trained  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


PROMPTS = {
    "gpt2": "causal-lm",
    "llama": "causal-lm",
    "qwen3": "causal-lm",
    "t5": "seq2seq",
    "bart": "seq2seq",
    "bert": "features",
}


@pytest.mark.parametrize("kind", core(["prompt", "mlp", "lstm"], "prompt"))
@pytest.mark.parametrize("architecture", core(PROMPTS, "gpt2", "t5"))
def test_prompts(tmp_path, architecture, kind):
    task = PROMPTS[architecture]
    common = {"task_type": KINDS[task], "num_virtual_tokens": 5}
    config = peft.PromptTuningConfig(**common)
    if kind != "prompt":
        config = peft.PromptEncoderConfig(
            **common, encoder_reparameterization_type=kind.upper(), encoder_hidden_size=7
        )
    compare_import(
        tmp_path, architecture, config, task, atol=2e-5, strip=0 if task == "seq2seq" else 5
    )


PREFIXES = dict.fromkeys(("gpt2", "llama", "qwen3", "phi3", "gpt_neox"), "causal-lm")


PREFIXES |= dict.fromkeys(("t5", "mt5", "umt5", "bart", "mbart", "pegasus"), "seq2seq")


@pytest.mark.parametrize("projection", core([False, True], True))
@pytest.mark.parametrize("architecture", core(PREFIXES, "gpt2", "qwen3", "umt5", "bart"))
def test_prefix(tmp_path, architecture, projection):
    task = PREFIXES[architecture]
    config = peft.PrefixTuningConfig(
        task_type=KINDS[task], num_virtual_tokens=5, prefix_projection=projection
    )
    if projection:
        config.encoder_hidden_size = 7
    compare_import(tmp_path, architecture, config, task, atol=2e-5)


def test_after_an_encoder_layer_i_has_the_prefix_of_layer_2_i(tmp_path):
    config = peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2)
    layers = {"num_layers": 3, "num_decoder_layers": 3}
    adapter = compare_import(tmp_path, "t5", config, "seq2seq", atol=2e-5, **layers)
    held = load_file(tmp_path / "theirs" / "adapter_model.safetensors")["prompt_embeddings"]
    by_layer = held.view(2, 3, 2, -1)
    for layer, source in ((0, 0), (1, 2), (2, 1)):
        own = adapter.tensors()[f"decoder.{layer}.attn.kv.prefix.prefix"]
        assert torch.equal(own.transpose(0, 1), by_layer[:, source])


@pytest.mark.parametrize("architecture", core(["bert", "llama"], "bert"))
def test_prefix_of_a_classifier(tmp_path, architecture):
    config = peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=5)
    compare_import(tmp_path, architecture, config, atol=2e-5)


@pytest.mark.parametrize(
    "architecture", core(["gpt2", "llama", "qwen3", "t5", "bart"], "t5", "bart")
)
def test_a_prefix_generates_the_same_tokens(tmp_path, architecture):
    task = PREFIXES[architecture]
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


EXPORTED_PROMPTS = {"gpt2": "causal-lm", "llama": "causal-lm", "t5": "seq2seq", "bert": "features"}


@pytest.mark.parametrize("spec", ["prompt(length=5)", "p-tuning(length=5)", "cpt(length=5)"])
@pytest.mark.parametrize("architecture", core(EXPORTED_PROMPTS, "t5"))
def test_exported_prompts(tmp_path, architecture, spec):
    task = EXPORTED_PROMPTS[architecture]
    strip = 0 if task == "seq2seq" else 5
    same_bits(*compare_export(tmp_path / "out", architecture, spec, task, atol=2e-5, strip=strip))


@pytest.mark.parametrize("network", core(["false", "true"], "true"))
@pytest.mark.parametrize("architecture", core(["gpt2", "llama", "qwen3"], "llama"))
def test_exported_prefixes(tmp_path, architecture, network):
    spec = f"prefix(length=5, positions=true, reparametrize={network}, sites=['attn.kv'])"
    same_bits(*compare_export(tmp_path / "out", architecture, spec, "causal-lm", atol=2e-5))


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_a_prefix_after_an_encoder_is_exported_if_peft_has_a_place_for_each(tmp_path, architecture):
    """With an odd number of layers, 2 i modulo it is another layer for each i."""
    layers = {"num_layers": 3, "num_decoder_layers": 3}
    if architecture == "bart":
        layers = {"encoder_layers": 3, "decoder_layers": 3}
    spec = "prefix(length=3, positions=true, sites=['decoder.attn.kv'])"
    same_bits(*compare_export(tmp_path / "out", architecture, spec, "seq2seq", atol=2e-5, **layers))


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_a_prefix_after_an_encoder_is_not_exported(tmp_path, architecture):
    """peft's layout for two caches cannot give each layer its own prefix."""
    spec = "prefix(length=3, positions=true, sites=['decoder.attn.kv'])"
    adapter = ah.attach(tiny_models.model(architecture, "seq2seq"), spec)
    with pytest.raises(MismatchError, match="that of layer 2 i"):
        adapter.export(tmp_path / "out")
