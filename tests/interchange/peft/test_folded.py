"""Updates of modules that are not sites compute here what they compute in peft."""

from __future__ import annotations

import peft
import pytest
import torch

import adapterhub as ah
from tests.kit import tiny_models
from tests.kit.peers import (
    compare_import,
    core,
    linear_names,
    lora_config,
    outputs,
)
from tests.kit.selection import long_table

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

LANGUAGE_MODELS = tiny_models.DECODERS + tiny_models.ENCODER_DECODERS
MODELS = {
    f"{architecture}-{'classification' if task == 'classification' else 'lm'}": (architecture, task)
    for architecture in tiny_models.ARCHITECTURES
    for task in (
        *(["classification"] if architecture not in tiny_models.WITHOUT_CLASSIFIER else []),
        *(["seq2seq"] if architecture in tiny_models.ENCODER_DECODERS else []),
        *(["causal-lm"] if architecture in tiny_models.DECODERS else []),
    )
    # peft refuses to adapt a module of its head that it also saves.
    if architecture != "distilbert"
}
VARIANTS = {
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "mica": {"init_lora_weights": "mica", "r": 2},
}
CASES = {(model, variant): None for model in MODELS for variant in VARIANTS}


def test_every_architecture_is_compared():
    assert {a for a, _ in MODELS.values()} == {*tiny_models.ARCHITECTURES} - {"distilbert"}
    assert len(CASES) >= 5 * 50


@long_table(
    ("name", "variant"),
    core(
        CASES,
        ("bert-classification", "pissa"),
        ("albert-classification", "olora"),  # layers that are used several times
        ("gpt2-lm", "pissa"),  # a tied output layer, whose embedding changes too
        ("gpt2-lm", "dora"),
        ("opt-lm", "olora"),  # projections around the layers
        ("llama-lm", "pissa"),
        ("xlnet-classification", "olora"),  # a rank above the size of the head
        ("bert-classification", "mica"),
    ),
    2,
)
def test_every_linear_layer(tmp_path, name, variant):
    architecture, task = MODELS[name]
    model = tiny_models.model(architecture, task)
    names = linear_names(model)
    if variant == "olora" and architecture in ("gpt2", "openai-gpt"):
        # peft decomposes a Conv1D as it is stored, so only square ones have factors that fit.
        names = [name for name in names if name.endswith("attn.c_proj")]
    saved = {"modules_to_save": []} if task == "classification" else {}
    config = lora_config(task, target_modules=names, **saved | VARIANTS[variant])
    compare_import(tmp_path, architecture, config, task, atol=3e-4, std=0.05)


def embeddings(model):
    return [n for n, m in model.named_modules() if m is model.get_input_embeddings()]


EMBEDDINGS = {
    "lora": {},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "tied": {"ensure_weight_tying": True},
}
EMBEDDING_CASES = {
    (a, tied, case): None for a in LANGUAGE_MODELS for tied in (True, False) for case in EMBEDDINGS
}


def embedding_config(architecture, tied, with_output, **options):
    """Return a task and a LoRA of one layer, the input embedding, and perhaps the output layer."""
    task = "seq2seq" if architecture in tiny_models.ENCODER_DECODERS else "causal-lm"
    model = tiny_models.model(architecture, task, tie_word_embeddings=tied)
    names = [*linear_names(model)[:1], *embeddings(model)]
    if with_output:
        names += [n for n, m in model.named_modules() if m is model.get_output_embeddings()]
    return task, lora_config(task, target_modules=names, **options)


@pytest.mark.parametrize(
    ("architecture", "tied", "case"),
    core(
        EMBEDDING_CASES,
        ("gpt2", True, "lora"),
        ("gemma3_text", True, "dora"),
        ("llama", True, "tied"),
    ),
)
@pytest.mark.parametrize("with_output", [False, True])
def test_embeddings_and_output_layers(tmp_path, architecture, tied, case, with_output):
    task, config = embedding_config(architecture, tied, with_output, **EMBEDDINGS[case])
    named_usually = any("embed_tokens" in name for name in config.target_modules)
    if case == "tied" and with_output and not named_usually:
        check_with_trained(tmp_path, architecture, config, task, tied)
        return
    options = {"tie_word_embeddings": tied}
    compare_import(tmp_path, architecture, config, task, atol=3e-4, std=0.05, **options)


def check_with_trained(tmp_path, architecture, config, task, tied):
    """Compare with the model that peft trained.

    It saves the tied update of the output layer, but loads it only if the embedding is called
    embed_tokens.
    """
    options = {"tie_word_embeddings": tied}
    torch.manual_seed(0)
    theirs = peft.get_peft_model(tiny_models.model(architecture, task, **options), config)
    with torch.no_grad():
        for _, parameter in sorted(theirs.named_parameters()):
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    theirs.save_pretrained(tmp_path)
    ours = tiny_models.model(architecture, task, **options)
    ah.load(ours, tmp_path)
    torch.testing.assert_close(outputs(ours, task), outputs(theirs, task), atol=3e-4, rtol=1e-5)
