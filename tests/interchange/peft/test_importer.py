"""An adapter that peft trained computes here what it computes in peft, and our files keep it."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from safetensors.torch import load_file

import adapterhub as ah

peft = pytest.importorskip("peft")
from peft_reference import KINDS, core, outputs, trained  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def compare(tmp_path, architecture, config, task="classification", atol=5e-6, strip=0, **options):
    """Import, save in our format, load again: all compute what peft computes from its own files."""
    folder = trained(tmp_path / "theirs", architecture, config, task, **options)
    theirs = peft.PeftModel.from_pretrained(
        tiny_models.model(architecture, task, **options), folder
    )
    expected = outputs(theirs, task)[:, strip:] if strip else outputs(theirs, task)
    bare = outputs(tiny_models.model(architecture, task, **options), task)
    assert not torch.allclose(expected, bare, atol=1e-3)
    ours = tiny_models.model(architecture, task, **options)
    adapter = ah.load(ours, folder)
    torch.testing.assert_close(outputs(ours, task), expected, atol=atol, rtol=1e-5)
    adapter.save(tmp_path / "ours")
    again = tiny_models.model(architecture, task, **options)
    ah.load(again, tmp_path / "ours")
    assert torch.equal(outputs(again, task), outputs(ours, task))
    return adapter


def lora(task="classification", **options):
    return peft.LoraConfig(task_type=KINDS[task], **({"r": 4, "lora_alpha": 12} | options))


TARGETS = {
    "bert": ["query", "value", "output.dense"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "llama": r".*\.(q_proj|down_proj)",
    "qwen2": ["q_proj", "k_proj"],
    "qwen3": ["v_proj"],
    "t5": ["q", "v", "wo"],
    "bart": ["q_proj", "fc1", "out_proj"],
    "phi3": ["qkv_proj", "gate_up_proj"],
    "gpt_neox": ["query_key_value"],
    "albert": ["query", "ffn"],
}


@pytest.mark.parametrize("architecture", core(TARGETS, "bert", "gpt2", "t5", "phi3"))
def test_lora(tmp_path, architecture):
    config = lora(target_modules=TARGETS[architecture], fan_in_fan_out=architecture == "gpt2")
    # BART's head has a projection of the same name, which is no site: it is folded.
    if architecture == "bart":
        config.exclude_modules = {"classification_head.out_proj"}
    adapter = compare(tmp_path, architecture, config)
    assert [m.name for m in adapter.methods] == ["lora"]


def options(**more):
    return more


OPTIONS = {
    "rslora": options(use_rslora=True),
    "dora": options(use_dora=True),
    "bias-all": options(bias="all"),
    "bias-lora-only": options(bias="lora_only"),
    "ranks": options(rank_pattern={"value": 2, r"layer\.0\.attention\.self\.query": 6}),
    "alphas": options(alpha_pattern={"value": 5}, rank_pattern={"query": 3}, use_rslora=True),
    "layers": options(layers_to_transform=[1]),
    "layers-pattern": options(layers_to_transform=0, layers_pattern="layer"),
    "exclude": options(exclude_modules=r".*layer\.0.*"),
    "all-linear": options(target_modules="all-linear"),
    "all-linear-dora": options(target_modules="all-linear", use_dora=True),
    "more-saved": options(modules_to_save=["classifier", "pooler"]),
    "embeddings-saved": options(modules_to_save=["word_embeddings", "classifier"]),
    "embeddings": options(target_modules=["query", "word_embeddings"]),
    "gaussian": options(init_lora_weights="gaussian"),
    "pissa": options(init_lora_weights="pissa"),
    "olora": options(init_lora_weights="olora"),
    "pissa-rslora": options(init_lora_weights="pissa", use_rslora=True),
}


CORE = ("dora", "bias-all", "alphas", "layers", "all-linear", "embeddings", "pissa", "olora")


@pytest.mark.parametrize("case", core(OPTIONS, *CORE))
def test_options_of_lora(tmp_path, case):
    config = lora(**({"target_modules": ["query", "value"]} | OPTIONS[case]))
    compare(tmp_path, "bert", config, atol=1e-4 if "init_lora_weights" in OPTIONS[case] else 5e-6)


IA3 = {
    "bert": (["key", "value", "output.dense"], ["output.dense"]),
    "gpt2": (["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
    "llama": (["k_proj", "v_proj", "down_proj"], ["down_proj"]),
    "t5": (["k", "v", "wo"], ["wo"]),
    "phi3": (["qkv_proj", "down_proj"], ["down_proj"]),
}


@pytest.mark.parametrize("architecture", core(IA3, "bert", "gpt2"))
def test_ia3(tmp_path, architecture):
    targets, inputs = IA3[architecture]
    config = peft.IA3Config(
        task_type="SEQ_CLS",
        target_modules=targets,
        feedforward_modules=inputs,
        fan_in_fan_out=architecture == "gpt2",
    )
    compare(tmp_path, architecture, config)


NORMS = {
    "bert": ["LayerNorm"],
    "llama": ["input_layernorm", "post_attention_layernorm", "norm"],
    "gpt2": ["ln_1", "ln_f"],
    "t5": r".*layer_norm",
}


@pytest.mark.parametrize("architecture", core(NORMS, "llama"))
def test_norms(tmp_path, architecture):
    config = peft.LNTuningConfig(task_type="SEQ_CLS", target_modules=NORMS[architecture])
    compare(tmp_path, architecture, config)


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
    compare(tmp_path, architecture, config, task, atol=2e-5, strip=0 if task == "seq2seq" else 5)


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
    compare(tmp_path, architecture, config, task, atol=2e-5)


def test_a_prefix_behind_an_encoder_is_that_of_layer_2_i(tmp_path):
    config = peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2)
    layers = {"num_layers": 3, "num_decoder_layers": 3}
    adapter = compare(tmp_path, "t5", config, "seq2seq", atol=2e-5, **layers)
    held = load_file(tmp_path / "theirs" / "adapter_model.safetensors")["prompt_embeddings"]
    by_layer = held.view(2, 3, 2, -1)
    for layer, source in ((0, 0), (1, 2), (2, 1)):
        own = adapter.tensors()[f"decoder.{layer}.attn.kv.prefix.prefix"]
        assert torch.equal(own.transpose(0, 1), by_layer[:, source])


@pytest.mark.parametrize("architecture", core(["bert", "llama"], "bert"))
def test_prefix_of_a_classifier(tmp_path, architecture):
    config = peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=5)
    compare(tmp_path, architecture, config, atol=2e-5)


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
