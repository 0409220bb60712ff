"""Prompts in the language model of a larger model, which counts positions and makes masks."""

from __future__ import annotations

import copy
import itertools
from functools import cache

import every_type
import pytest
import torch

import adapterhub as ah
from adapterhub.hooks.prompt import _AROUND, OUTER
from tests.kit import tiny_models
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import check_rows
from tests.kit.tiny_models import logits

# What the larger model does before it calls its language model.
MODELS = {
    "llava": "AutoModelForImageTextToText",  # nothing
    "fuyu": "AutoModelForCausalLM",  # it counts positions from the cache
    "exaone4_5": "AutoModelForImageTextToText",
    "qwen2_vl": "AutoModelForImageTextToText",
    "gemma3": "AutoModelForImageTextToText",  # it makes a mask for each kind of layer
    "gemma4": "AutoModelForImageTextToText",  # and what is added in each layer by token id
}
every_model = pytest.mark.parametrize("model_type", MODELS)


@cache
def bare(model_type):
    return every_type.build(model_type, MODELS.get(model_type, "AutoModelForCausalLM"), tiny=True)


def attached(model_type, length=3):
    model = copy.deepcopy(bare(model_type))
    tiny_models.scramble(ah.attach(model, f"prompt(length={length})", name="prompt"))
    return model


def ids(tokens=7):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(10, 60, (2, tokens), generator=generator)


def close(one, other):
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@long_table(("model_type", "masked"), list(itertools.product(MODELS, (True, False))), 3)
def test_tokens_behind_a_cache_equal_those_of_a_whole_pass(model_type, masked):
    model, text = attached(model_type), ids()
    mask = torch.ones_like(text) if masked else None
    whole = logits(model, input_ids=text, attention_mask=mask)
    start = None if mask is None else mask[:, :5]
    with torch.no_grad():
        cache = model(input_ids=text[:, :5], attention_mask=start, use_cache=True).past_key_values
    for end in (6, 7):
        now = None if mask is None else mask[:, :end]
        given = {"input_ids": text[:, end - 1 : end], "attention_mask": now}
        close(logits(model, **given, past_key_values=cache)[:, -1], whole[:, end - 1])


@pytest.mark.parametrize("model_type", [m for m in MODELS if m != "qwen2_vl"])
def test_a_row_with_padding_on_the_left_equals_the_row_alone(model_type):
    model, text = attached(model_type), ids()
    mask = torch.ones_like(text)
    mask[0, :3] = 0
    together = logits(model, input_ids=text, attention_mask=mask)
    close(together[:1, 3:], logits(model, input_ids=text[:1, 3:]))
    close(together[1:], logits(model, input_ids=text[1:]))


@every_model
def test_generated_tokens_are_those_without_a_cache_and_without_a_batch(model_type):
    model, text = attached(model_type), ids()
    mask = torch.ones_like(text)
    mask[0, :3] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    found = model.generate(input_ids=text, attention_mask=mask, **options)[:, 7:]
    alone = model.generate(input_ids=text[:1, 3:], use_cache=False, **options)[:, 4:]
    assert torch.equal(found[:1], alone)
    assert torch.equal(found[1:], model.generate(text[1:], use_cache=False, **options)[:, 7:])


@every_model
def test_prompts_of_different_lengths_run_in_one_batch(model_type):
    model, text = attached(model_type), ids()
    tiny_models.scramble(ah.attach(model, "prompt(length=2)", name="short"), seed=4)
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    check_rows(model, ["short", "prompt"], lambda: logits(model, **inputs))


def test_a_text_that_is_longer_than_the_window_with_its_prompt():
    """Gemma 3's sliding window then hides the prompt from the last tokens, in some layers."""
    model = attached("gemma3", length=4)
    language = model.model.language_model
    for part in (language, *language.layers):
        part.config.sliding_window = 6
        if getattr(getattr(part, "self_attn", None), "sliding_window", None):
            part.self_attn.sliding_window = 6
    language._modules["adapterhub"].window = 6
    text = ids(9)
    found = logits(model, input_ids=text, attention_mask=torch.ones_like(text))
    embeds = model.get_input_embeddings()(text)
    prompt = next(p for n, p in model.named_parameters() if "prompt" in n)
    ah.activate(model)
    embeds = torch.cat([prompt.expand(2, -1, -1), embeds], dim=1)
    with torch.no_grad():
        hidden = language(inputs_embeds=embeds).last_hidden_state
        by_hand = model.lm_head(hidden)[:, 4:]
    close(found, by_hand)


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma3n_text"])
def test_what_is_added_by_token_id_is_added_to_the_text_alone(model_type):
    """Without ids the text would lose it: a prompt that changes nothing shows that it does not."""
    model, text = attached(model_type), ids()
    stack = next(m for m in model.modules() if "adapterhub" in m._modules)
    seen = []
    hook = stack.project_per_layer_inputs

    def project(embeds, inputs=None):
        seen.append(inputs)
        return hook(embeds, inputs)

    stack.project_per_layer_inputs = project
    logits(model, input_ids=text)
    ah.activate(model)
    logits(model, input_ids=text)
    prompted, plain = seen
    assert plain.any()
    assert not prompted[:, :3].any()
    assert torch.equal(prompted[:, 3:], plain)


def test_nothing_is_kept_of_a_pass_that_fails():
    model, text = attached("gemma3"), ids()
    slot = model.model.language_model._modules["adapterhub"]
    whole = logits(model, input_ids=text)
    with pytest.raises(IndexError):
        logits(model, input_ids=text + 1000)
    assert slot.kept(OUTER) is None
    close(logits(model, input_ids=text), whole)
    copied = copy.deepcopy(model)
    close(logits(copied, input_ids=text), whole)
    ah.detach(model, "prompt")
    assert not any(_AROUND in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
