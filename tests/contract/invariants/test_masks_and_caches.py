"""Virtual tokens and prefixes with every kind of mask and cache: right, or refused with an error.

The reference is the same adapter on whole texts, one at a time. Where the bare backbone does not
fulfil the same equation (it ignores such a mask, or raises), there is nothing to compare.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import DynamicCache, StaticCache

import adapterhub as ah
from adapterhub.errors import AdapterhubError
from tests.kit import tiny_models

METHODS = ("prompt(length=4)", "prefix(length=4)", "prefix(length=4, positions=true)")
NAME, NEW = "adapter", 5
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")


def texts():
    """Return two texts of eight tokens."""
    return torch.randint(5, 60, (2, 8), generator=torch.Generator().manual_seed(5))


def padded():
    """Return two texts, of which the first has three tokens of padding on the left."""
    ids = texts()
    ids[0, :3] = tiny_models.PAD
    return {"input_ids": ids, "attention_mask": ids.ne(tiny_models.PAD).long()}


def generated(model, ids, **options):
    """Return the logits of each new token."""
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None} | options
    output = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    return torch.stack(output.logits, 1)


def in_two_calls(model, cache):
    inputs = padded()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    first = model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache, use_cache=True)
    second = model(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
    found = torch.cat([first.logits, second.logits], 1)
    return found[mask.bool()], model(**inputs).logits[mask.bool()]


def dynamic_cache(model):
    return in_two_calls(model, None)


def given_cache(model):
    return in_two_calls(model, DynamicCache(config=model.config))


def static_cache(model):
    return in_two_calls(model, StaticCache(config=model.config, max_cache_len=24))


def short_static_cache(model):
    return in_two_calls(model, StaticCache(config=model.config, max_cache_len=8))


def cache_without_the_adapter(model):
    ah.activate(model)
    cache = model(texts()[:, :5], use_cache=True).past_key_values
    ah.activate(model, NAME)
    return model(texts()[:, 5:], past_key_values=cache).logits, model(texts()).logits[:, 5:]


def cache_of_the_adapter_without_it(model):
    cache = model(texts()[:, :5], use_cache=True).past_key_values
    ah.activate(model)
    return model(texts()[:, 5:], past_key_values=cache).logits, model(texts()).logits[:, 5:]


def padding_on_the_left(model):
    inputs = padded()
    ids = inputs.pop("input_ids")
    return generated(model, ids, **inputs)[:1], generated(model, ids[:1, 3:])


def generate_without_cache(model):
    inputs = padded()
    ids = inputs.pop("input_ids")
    return generated(model, ids, **inputs), generated(model, ids, **inputs, use_cache=False)


def beams(model):
    options = {"attention_mask": padded()["attention_mask"], "num_beams": 3}
    ids = padded()["input_ids"]
    return generated(model, ids, **options), generated(model, ids, **options, use_cache=False)


def generate_with_static_cache(model):
    found = generated(model, texts(), cache_implementation="static")
    return found, generated(model, texts())


def chunks(model):
    return generated(model, texts(), prefill_chunk_size=3), generated(model, texts())


def chunks_of_padding(model):
    ids, mask = padded()["input_ids"], padded()["attention_mask"]
    found = generated(model, ids, attention_mask=mask, prefill_chunk_size=2)
    return found, generated(model, ids, attention_mask=mask)


def lookup(model):
    found = generated(model, texts()[:1], prompt_lookup_num_tokens=2)
    return found, generated(model, texts()[:1])


def earlier_turn(model):
    cache = model(texts()[:, :5], use_cache=True).past_key_values
    ones = torch.ones_like(texts())
    found = generated(model, texts()[:, 5:], past_key_values=cache, attention_mask=ones)
    return found, generated(model, texts())


def earlier_turn_and_whole_text(model):
    cache = model(texts()[:, :3], use_cache=True).past_key_values
    return generated(model, texts(), past_key_values=cache), generated(model, texts())


def packed(model, mask):
    """Two texts in one row."""
    parts = [texts()[:1, :5], texts()[1:, :6]]
    inputs = {"input_ids": torch.cat(parts, 1), "attention_mask": mask, "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.cat([torch.arange(5), torch.arange(6)])[None]
    return model(**inputs).logits, torch.cat([model(ids).logits for ids in parts], 1)


def apart():
    return torch.block_diag(torch.ones(5, 5).tril(), torch.ones(6, 6).tril()).bool()[None, None]


def pairs(model):
    return packed(model, apart())


def added_pairs(model):
    hidden = ~apart()
    least = torch.finfo(torch.float32).min
    return packed(model, torch.zeros(hidden.shape).masked_fill(hidden, least))


def restarting_positions(model):
    return packed(model, None)


def mask_by_kind_of_attention(model):
    whole = torch.ones(8, 8).tril().bool()[None, None]
    masks = {"full_attention": whole, "sliding_attention": whole}
    found = model(texts(), attention_mask=masks, use_cache=False).logits
    return found, model(texts()).logits


KINDS = (
    dynamic_cache, given_cache, static_cache, short_static_cache,
    padding_on_the_left, generate_without_cache, beams,
    generate_with_static_cache, chunks, chunks_of_padding, lookup, earlier_turn,
    earlier_turn_and_whole_text, pairs, added_pairs, restarting_positions,
    mask_by_kind_of_attention,
)  # fmt: skip
# With a prefix, the adapter of a cache is the caller's choice, as with other methods.
OTHER_ADAPTER = (cache_without_the_adapter, cache_of_the_adapter_without_it)
ENCODER_DECODER_KINDS = (
    padding_on_the_left, generate_without_cache, beams, generate_with_static_cache,
)  # fmt: skip
REFUSED = {
    short_static_cache, *OTHER_ADAPTER, generate_with_static_cache, chunks_of_padding,
    earlier_turn_and_whole_text, restarting_positions, mask_by_kind_of_attention,
}  # fmt: skip
# Attention itself hides tokens that are far away, whatever the mask.
WINDOWED = ("gpt_neo",)
# generate passes BLOOM neither positions nor a mask of ones: that tokens are missing does not show.
UNNOTICED = {("bloom", earlier_turn_and_whole_text)}


def outcome(model, kind):
    """Return whether an equation holds: equal, other, refused, or raised (by transformers)."""
    try:
        with torch.no_grad():
            found, expected = kind(model)
    except AdapterhubError:
        return "refused"
    except Exception as error:
        return f"raised {error!r}"
    near = found.shape == expected.shape and torch.allclose(
        found.float(), expected.float(), atol=1e-4, rtol=1e-4
    )
    return "equal" if near else "other"


def attached(architecture, method):
    model = tiny_models.language_model(architecture)
    torch.manual_seed(0)
    tiny_models.scramble(ah.attach(model, method, name=NAME), std=0.5)
    return model


def kinds_of(architecture, method):
    """Return the kinds to test: those whose equation holds for the bare backbone."""
    kinds = ENCODER_DECODER_KINDS if architecture in tiny_models.ENCODER_DECODERS else KINDS
    bare = tiny_models.language_model
    fulfilled = [kind for kind in kinds if outcome(bare(architecture), kind) == "equal"]
    # In peft, padding is between the prefix and the text, and counts in relative positions.
    skipped = {padding_on_the_left} if method == METHODS[2] else set()
    skipped |= {kind for name, kind in UNNOTICED if name == architecture}
    others = OTHER_ADAPTER if dynamic_cache in fulfilled and method == METHODS[0] else ()
    return [kind for kind in (*fulfilled, *others) if kind not in skipped]


CELLS = [("llama", METHODS[0]), ("llama", METHODS[1]), ("t5", METHODS[0])]
if tiny_models.FULL_MATRIX:
    CELLS = [(a, m) for a in tiny_models.GENERATORS for m in METHODS]


@pytest.mark.parametrize(("architecture", "method"), CELLS)
def test_every_kind_is_right_or_refused(architecture, method):
    try:
        attached(architecture, method)
    except AdapterhubError:
        pytest.skip(f"{method} does not fit {architecture}")
    kinds = kinds_of(architecture, method)
    assert len(kinds) >= 3
    outcomes = {kind: outcome(attached(architecture, method), kind) for kind in kinds}
    refused = {kind for kind, found in outcomes.items() if found == "refused"}
    wrong = {
        k.__name__: found for k, found in outcomes.items() if found not in ("equal", "refused")
    }
    assert not wrong
    allowed = REFUSED | ({pairs, added_pairs} if architecture in (*WINDOWED, "mpt") else set())
    assert refused <= (allowed if method == METHODS[0] else set())
