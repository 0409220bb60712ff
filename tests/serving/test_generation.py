"""Texts that an engine writes: equal to `generate` alone, whatever else is written with them."""

from __future__ import annotations

import pytest
from written import PROMPTS, SEQ2SEQ, tokens_alone, write_writers, written_alone

from adapterhub.backbones.load import load_backbone
from adapterhub.serving import Engine, GenerationOptions

GREEDY = GenerationOptions(max_tokens=10, temperature=0)


@pytest.fixture(scope="session")
def writers(backbones, tmp_path_factory):
    """Write an adapter of each method on a tiny Llama."""
    return write_writers(backbones("llama"), tmp_path_factory.mktemp("writers"))


@pytest.fixture
def engine(backbones, writers):
    with Engine(str(backbones("llama"))) as engine:
        yield engine


def ids_of(text):
    return [token.id for token in text.tokens]


def test_greedy_texts_of_eight_methods_are_those_of_generate(engine, writers):
    asked = [(folder, prompt) for prompt in PROMPTS for folder in writers]
    running = [engine.generate(folder, prompt, GREEDY) for folder, prompt in asked]
    for (folder, prompt), generation in zip(asked, running, strict=True):
        assert ids_of(generation.result(60)) == written_alone(folder, prompt, 10), folder
    assert 10 <= engine.counts["steps"] < 30  # packed: far fewer than texts times tokens


def test_the_backbone_without_an_adapter_writes_too(engine, backbones):
    model, tokenizer = load_backbone(str(backbones("llama")), task="causal-lm")
    running = [engine.generate(None, prompt, GREEDY) for prompt in PROMPTS]
    for prompt, generation in zip(PROMPTS, running, strict=True):
        assert ids_of(generation.result(60)) == tokens_alone(model, tokenizer, prompt, 10)


def test_an_encoder_decoder_writes(backbones, tmp_path):
    folders = write_writers(
        backbones("t5"), tmp_path, ("lora(rank=2)", "prefix(length=3)"), SEQ2SEQ
    )
    with Engine(str(backbones("t5"))) as engine:
        asked = [(folder, prompt) for prompt in PROMPTS for folder in folders]
        running = [engine.generate(folder, prompt, GREEDY) for folder, prompt in asked]
        for (folder, prompt), generation in zip(asked, running, strict=True):
            assert ids_of(generation.result(60)) == written_alone(folder, prompt, 10)
