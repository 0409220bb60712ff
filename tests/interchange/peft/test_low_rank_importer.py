"""LoRA and its variants compute here what they compute in peft."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.errors import MismatchError
from tests.kit import tiny_models

peft = pytest.importorskip("peft")
from tests.kit.peers import compare_import, core, edit, lora_config  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


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
    config = lora_config(
        target_modules=TARGETS[architecture], fan_in_fan_out=architecture == "gpt2"
    )
    # BART's head has a projection of the same name, which is not a site: its update is folded.
    if architecture == "bart":
        config.exclude_modules = {"classification_head.out_proj"}
    adapter = compare_import(tmp_path, architecture, config)
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
    config = lora_config(**({"target_modules": ["query", "value"]} | OPTIONS[case]))
    compare_import(
        tmp_path, "bert", config, atol=1e-4 if "init_lora_weights" in OPTIONS[case] else 5e-6
    )


@pytest.mark.parametrize("init", ["corda", "lora_ga", "loftq", "new"])
def test_an_initialization_that_changes_the_backbone_is_refused(checkpoint, init):
    edit(checkpoint, init_lora_weights=init)
    with pytest.raises(MismatchError, match=init):
        ah.load(tiny_models.model("bert"), checkpoint)
