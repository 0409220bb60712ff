"""Inputs that prompts refuse: each error names what was given and what to pass instead."""

import copy

import every_type
import pytest
import torch
from transformers import DynamicCache, StaticCache

import adapterhub as ah
from adapterhub.errors import SiteError
from adapterhub.hooks.prompt_checks import CachedPrompt, cached_prompt
from tests.kit import tiny_models


def attached(architecture="llama", task="causal-lm", length=4):
    model = tiny_models.model(architecture, task)
    ah.attach(model, f"prompt(length={length})", name="prompt")
    return model.eval()


def ids(tokens=6):
    return tiny_models.batch(2, tokens)["input_ids"]


def refusal(model, **inputs):
    with torch.no_grad(), pytest.raises(SiteError) as error:
        model(**inputs)
    assert error.value.expected
    assert error.value.hint
    return str(error.value)


AGAIN = torch.tensor([[0, 1, 2, 0, 1, 2]])
ENDS = torch.tensor([0, 3, 6], dtype=torch.int32)
OTHER_FORM = "cannot be extended to a prompt"
REFUSED = [
    ("qwen2", "features", {"attention_mask": {"full": torch.ones(2, 6, 6)}}, [OTHER_FORM]),
    ("qwen2", "features", {"attention_mask": torch.ones(2, 6, 6)}, [OTHER_FORM]),
    ("qwen2", "features", {"attention_mask": torch.ones(2, 1, 6, 6).long()}, [OTHER_FORM]),
    ("bert", "features", {"attention_mask": torch.ones(2, 1, 6, 6)}, ["(2, 1, 6, 6)"]),
    ("llama", "causal-lm", {"attention_mask": torch.ones(2, 1, 6, 20).bool()},
     ["covers 20 tokens, the text has 6"]),
    ("llama", "causal-lm", {"input_ids": ids()[:1], "cu_seq_lens_q": ENDS}, ["cu_seq_lens_q"]),
    ("llama", "causal-lm", {"input_ids": ids()[:1], "seq_idx": ENDS}, ["seq_idx"]),
    ("llama", "causal-lm", {"position_ids": AGAIN}, ["several texts", "4-D"]),
    ("xlnet", "features", {"perm_mask": torch.zeros(2, 6, 6)}, ["perm_mask"]),  # as in generate
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "task", "inputs", "texts"), REFUSED)
def test_masks_and_positions_of_other_forms_are_refused(architecture, task, inputs, texts):
    message = refusal(attached(architecture, task), **{"input_ids": ids()} | inputs)
    assert [text for text in texts if text not in message] == []


def test_a_mask_says_that_a_row_is_one_text():
    """transformers reads positions only without one."""
    model, mask = attached(), torch.ones_like(ids())
    with torch.no_grad():
        again, usual = (
            model(ids(), attention_mask=mask, **positions).logits
            for positions in ({"position_ids": AGAIN}, {})
        )
    torch.testing.assert_close(again[:, :3], usual[:, :3])
    assert not torch.allclose(again[:, 3:], usual[:, 3:], atol=1e-3)


def test_caches_of_other_prompts():
    model = attached()
    ah.attach(model, "prompt(length=4)", name="other")
    with torch.no_grad():
        ah.activate(model, "prompt")
        cache = model(ids(), use_cache=True).past_key_values
        held = cached_prompt(cache)
        assert (held.length, held.tokens, len(held.keys)) == (4, 0, 1)
        assert cached_prompt(copy.deepcopy(cache)) == held
        model(ids(2), past_key_values=copy.deepcopy(cache))
    for names in (["other"], ["prompt", "other"], []):
        ah.activate(model, *names)
        message = refusal(model, input_ids=ids(2), past_key_values=cache)
        assert "the cache has 10 tokens" in message
    ah.activate(model)
    with torch.no_grad():
        bare = model(ids(), use_cache=True).past_key_values
    assert cached_prompt(bare) == CachedPrompt()
    ah.activate(model, "prompt")
    assert "no prompt" in refusal(model, input_ids=ids(2), past_key_values=bare)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_mamba"])
def test_states_of_other_prompts(model_type):
    """States have the prompt that came first; tokens that follow them enter as they are."""
    model = every_type.build(model_type, "AutoModelForCausalLM", tiny=True)
    for name in ("prompt", "other"):
        tiny_models.scramble(ah.attach(model, "prompt(length=4)", name=name), seed=len(name))
    ah.activate(model, "prompt")
    with torch.no_grad():
        whole = model(ids()).logits
        states = model(ids()[:, :-1], use_cache=True).cache_params
        last = model(ids()[:, -1:], cache_params=copy.deepcopy(states)).logits
        torch.testing.assert_close(last[:, -1], whole[:, -1], atol=1e-4, rtol=1e-4)
        own = DynamicCache(config=model.config)
        model(ids()[:, :-1], cache_params=own, use_cache=True)
        assert cached_prompt(own) == cached_prompt(states)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    cached, not_cached = (model.generate(ids(), use_cache=c, **options) for c in (True, False))
    assert torch.equal(cached, not_cached)
    for names in (["other"], ["prompt", "other"], []):
        ah.activate(model, *names)
        message = refusal(model, input_ids=ids(1), cache_params=states)
        assert "behind a prompt of 4 virtual tokens" in message


def test_a_cache_of_the_caller_needs_room_for_the_prompt():
    model = attached()
    short, enough = (StaticCache(config=model.config, max_cache_len=room) for room in (9, 10))
    assert "max_cache_len=10" in refusal(model, input_ids=ids(), past_key_values=short)
    model(ids(), past_key_values=enough)
    cache = DynamicCache(config=model.config)
    model(ids(), past_key_values=cache)
    assert cache.get_seq_length() == 4 + 6
    assert cached_prompt(cache).length == 4
    windows = attached("mistral")
    short = StaticCache(config=windows.config, max_cache_len=9)
    assert "too short" in refusal(windows, input_ids=ids(), past_key_values=short)


def test_tokens_that_are_missing_behind_a_cache_and_padding_around_its_prompt():
    model = attached()
    with torch.no_grad():
        cache = model(ids(), use_cache=True).past_key_values
    later = {"input_ids": ids(1), "past_key_values": cache}
    assert "position" in refusal(model, **later, position_ids=torch.tensor([[8]]))
    ones = torch.ones(2, 9, dtype=torch.long)
    assert "covers 9 tokens, the text has 7" in refusal(model, **later, attention_mask=ones)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        cache = model(ids()[:, :2], attention_mask=mask[:, :2], use_cache=True).past_key_values
    message = refusal(model, input_ids=ids()[:, 2:], attention_mask=mask, past_key_values=cache)
    assert "more padding follows" in message
    model = attached("xlnet", "features")  # memories
    with torch.no_grad():
        mems = model(ids(), use_mems=True).mems
    assert "mems" in refusal(model, input_ids=ids(), mems=mems)


def test_a_prefix_passes_all_of_these():
    """It adds no tokens, only positions."""
    model = tiny_models.model("qwen2", "features")
    ah.attach(model, "prefix(length=4, positions=true)")
    whole = torch.ones(6, 6).tril().bool()[None, None]
    inputs = [
        {"attention_mask": {"full_attention": whole}},
        {"attention_mask": whole},
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
    ]
    with torch.no_grad():
        first, second, _ = (model(ids(), use_cache=False, **i).last_hidden_state for i in inputs)
    assert torch.equal(first, second)
