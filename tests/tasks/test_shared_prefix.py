"""What prompts have in common is computed once, with the results of computing all of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common import shared_prefix
from adapterhub.tasks.common.language_models import generate, token_loss
from adapterhub.tasks.common.shared_prefix import PrefixStore, answer_scores, keeping_prefix
from tests.kit import tiny_models
from tests.kit.data import WORDS, word_tokenizer
from tests.kit.selection import long_table

_SIZE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.15,
    "head_dim": 8, "vocab_size": tiny_models.VOCAB, "pad_token_id": 1, "eos_token_id": 2,
    "bos_token_id": 3,
}  # fmt: skip
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
FAMILIES = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},  # learned positions
    "bloom": {"n_layer": 2, "n_head": 4},  # distances, counted from the mask
    "mistral": {"sliding_window": 8},
    "gemma3_text": _TWO_KINDS,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1],
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "num_experts": 0,
    },
}  # fmt: skip
WITHOUT = {  # no cache, states of another kind, and states that only one token at a time continues
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 4, "use_mambapy": False},
    "jamba": {
        "mamba_d_state": 4, "mamba_d_conv": 3, "mamba_dt_rank": 4, "num_experts": 2,
        "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False,
    },
}  # fmt: skip

_random = random.Random(0)
SHOTS = [[" ".join(_random.choices(WORDS, k=9)), label] for label in "0101"]
EXAMPLES = [Example(" ".join(_random.choices(WORDS, k=2 + i % 5)), None, "2") for i in range(12)]
TASK = parse_task(
    {
        "prompted": {
            "model": "causal-lm",
            "template": "{text} is {mask}",
            "words": {0: "very good", 1: "bad", 2: "a dull film"},
            "examples": SHOTS,
        }
    }
)
TOKENIZER = word_tokenizer("<s>")
SETTING = Setting(TOKENIZER, 64)


def counted_tokens(model):
    counts = [0]
    model.register_forward_pre_hook(
        lambda _, args, inputs: counts.__setitem__(0, counts[0] + inputs["input_ids"].numel()),
        with_kwargs=True,
    )
    return counts


def tiny(family):
    torch.manual_seed(0)
    options = _SIZE | {**FAMILIES, **WITHOUT}[family]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)).eval()


def computed(model):
    """Return scores of answers and of words, losses and texts, and the tokens of each."""
    answers = [*TASK.answer_ids(TOKENIZER).values()]
    prompts, labelled = (TASK.encode(EXAMPLES, SETTING, labelled=known) for known in (False, True))
    rows = [{k: v for k, v in row.items() if k != "position"} for row in prompts.rows]
    writes = parse_task("causal-lm(new_tokens=4, beams=2)")
    texts = replace(writes.encode(EXAMPLES, SETTING, labelled=False), rows=rows)
    short = replace(TASK, words={"0": "good", "1": "bad", "2": "dull"})
    counts = counted_tokens(model)
    found, tokens = [], []
    for compute in (
        lambda: answer_scores(model, prompts, answers, 64),
        lambda: [[*p.scores.values()] for p in short.predict(model, prompts, 64)],
        lambda: token_loss(model, labelled, 64, shifted=True)["loss"],
        lambda: generate(model, texts, 64, writes),
    ):
        counts[0] = 0
        found.append(compute())
        tokens.append(counts[0])
    return found, tokens


@long_table("family", [*FAMILIES, *WITHOUT], 3)
def test_results_are_those_of_all_tokens(family, monkeypatch):
    found, tokens = computed(tiny(family))
    monkeypatch.setattr(shared_prefix, "_tried_cache", lambda *_: None)
    expected, all_tokens = computed(tiny(family))
    for some, others in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(torch.tensor(some), torch.tensor(others), atol=1e-5, rtol=0)
    assert found[3] == expected[3]
    for some, others in zip(tokens, all_tokens, strict=True):
        assert family in WITHOUT or some < others / 3


@pytest.mark.parametrize("method", ["lora", "prefix(length=3)", "prompt(length=3)", "loreft", None])
def test_adapters_apply_to_all_tokens(method, monkeypatch):
    """Those that depend on the place of a token are computed as a whole, if they must be."""
    model = tiny("llama")
    if method:
        tiny_models.scramble(ah.attach(model, method))
    (scores, *_), _ = computed(model)
    monkeypatch.setattr(shared_prefix, "_tried_cache", lambda *_: None)
    (expected, *_), _ = computed(model)
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected), atol=1e-5, rtol=0)


def test_rows_without_the_prefix_are_computed_whole():
    model = tiny("llama")
    own = Example(SHOTS[0][0], None, "1")  # its own example is not in front of it
    alone = TASK.predict(model, TASK.encode([own], SETTING, labelled=False), 64)
    counts = counted_tokens(model)
    encoded = TASK.encode([own, *EXAMPLES], SETTING, labelled=False)
    together = TASK.predict(model, encoded, 64)
    assert together[0].scores == pytest.approx(alone[0].scores, abs=1e-5)
    assert counts[0] < sum(encoded.lengths) / 2


def test_a_store_keeps_the_prefix_between_calls():
    model, store = tiny("llama"), PrefixStore()
    counts, tokens = counted_tokens(model), []
    for example in EXAMPLES:
        data = TASK.encode([example], SETTING, labelled=False)
        (expected,) = TASK.predict(model, data, 1)
        counts[0] = 0
        with keeping_prefix(store):
            (kept,) = TASK.predict(model, data, 1)
        tokens.append(counts[0])
        assert kept.scores == pytest.approx(expected.scores, abs=1e-5)
    assert max(tokens[4:]) < 20 < min(tokens[:2])
