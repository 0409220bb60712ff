"""Virtual tokens and prefixes with every kind of mask and cache: right, or refused with an error.

The reference is the same adapter on whole texts, one at a time. Where the bare backbone does not
fulfil the same equation (it ignores such a mask, or raises), there is nothing to compare. Padding
in each architecture is in tests/methods/test_prefix.py.
"""

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


def generated(model, input_ids, **options):
    """Return the logits of each new token."""
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None} | options
    output = model.generate(input_ids, output_logits=True, return_dict_in_generate=True, **options)
    return torch.stack(output.logits, 1)


def in_two_calls(model, cache):
    inputs = padded()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    first = model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache, use_cache=True)
    second = model(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
    found = torch.cat([first.logits, second.logits], 1)
    return found[mask.bool()], model(**inputs).logits[mask.bool()]


def with_another_cache(model, first, then):
    """Compute a cache with one adapter active, or none, and continue with another."""
    ah.activate(model, *first)
    cache = model(texts()[:, :5], use_cache=True).past_key_values
    ah.activate(model, *then)
    return model(texts()[:, 5:], past_key_values=cache).logits, model(texts()).logits[:, 5:]


def left_padded(model, changed, **options):
    """Generate from texts with padding on the left, with changed options and without them."""
    return [generated(model, **padded(), **options, **more) for more in (changed, {})]


def whole(model, ids=None, **options):
    """Generate with options, and plainly from the whole texts."""
    ids = texts() if ids is None else ids
    return generated(model, ids, **options), generated(model, texts()[: len(ids)])


def padding_alone(model):
    inputs = padded()
    ids = inputs.pop("input_ids")
    return generated(model, ids, **inputs)[:1], generated(model, ids[:1, 3:])


def earlier_turn(model, length=5, **options):
    """Generate with a cache of the beginning; without options, the whole texts follow."""
    cache = model(texts()[:, :length], use_cache=True).past_key_values
    ids = texts()[:, length:] if options else texts()
    return whole(model, ids, past_key_values=cache, **options)


def packed(model, mask):
    """Two texts in one row."""
    parts = [texts()[:1, :5], texts()[1:, :6]]
    inputs = {"input_ids": torch.cat(parts, 1), "attention_mask": mask, "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.cat([torch.arange(5), torch.arange(6)])[None]
    return model(**inputs).logits, torch.cat([model(ids).logits for ids in parts], 1)


APART = torch.block_diag(torch.ones(5, 5).tril(), torch.ones(6, 6).tril()).bool()[None, None]
ADDED = torch.zeros(APART.shape).masked_fill(~APART, torch.finfo(torch.float32).min)


def mask_by_kind_of_attention(model):
    seen = torch.ones(8, 8).tril().bool()[None, None]
    masks = {"full_attention": seen, "sliding_attention": seen}
    found = model(texts(), attention_mask=masks, use_cache=False).logits
    return found, model(texts()).logits


def static(model, length):
    return StaticCache(config=model.config, max_cache_len=length)


KINDS = {
    "dynamic cache": lambda m: in_two_calls(m, None),
    "given cache": lambda m: in_two_calls(m, DynamicCache(config=m.config)),
    "static cache": lambda m: in_two_calls(m, static(m, 24)),
    "short static cache": lambda m: in_two_calls(m, static(m, 8)),
    "padding on the left": padding_alone,
    "generate without cache": lambda m: left_padded(m, {"use_cache": False}),
    "beams": lambda m: left_padded(m, {"use_cache": False}, num_beams=3),
    "generate with static cache": lambda m: whole(m, cache_implementation="static"),
    "chunks": lambda m: whole(m, prefill_chunk_size=3),
    "chunks of padding": lambda m: left_padded(m, {"prefill_chunk_size": 2}),
    "lookup": lambda m: whole(m, texts()[:1], prompt_lookup_num_tokens=2),
    "earlier turn": lambda m: earlier_turn(m, attention_mask=torch.ones_like(texts())),
    "earlier turn and whole text": lambda m: earlier_turn(m, 3),
    "pairs": lambda m: packed(m, APART),
    "added pairs": lambda m: packed(m, ADDED),
    "restarting positions": lambda m: packed(m, None),
    "mask by kind of attention": mask_by_kind_of_attention,
}
# With a prefix, the adapter of a cache is the caller's choice, as with other methods.
OTHER_ADAPTER = {
    "cache without the adapter": lambda m: with_another_cache(m, (), (NAME,)),
    "cache of the adapter without it": lambda m: with_another_cache(m, (NAME,), ()),
}
ENCODER_DECODER_KINDS = (
    "padding on the left", "generate without cache", "beams", "generate with static cache",
)  # fmt: skip
REFUSED = {
    "short static cache", *OTHER_ADAPTER, "generate with static cache", "chunks of padding",
    "earlier turn and whole text", "restarting positions", "mask by kind of attention",
}  # fmt: skip
# Attention itself hides tokens that are far away, whatever the mask.
WINDOWED = ("gpt_neo",)
# generate passes BLOOM neither positions nor a mask of ones: that tokens are missing does not show.
UNNOTICED = {("bloom", "earlier turn and whole text")}


def outcome(model, kind):
    """Return whether an equation holds: equal, other, refused, or raised (by transformers)."""
    try:
        with torch.no_grad():
            found, expected = (KINDS | OTHER_ADAPTER)[kind](model)
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
    skipped = {"padding on the left"} if method == METHODS[2] else set()
    skipped |= {kind for name, kind in UNNOTICED if name == architecture}
    others = OTHER_ADAPTER if "dynamic cache" in fulfilled and method == METHODS[0] else ()
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
    assert {k: found for k, found in outcomes.items() if found not in ("equal", "refused")} == {}
    windowed = architecture in (*WINDOWED, "mpt")
    allowed = REFUSED | ({"pairs", "added pairs"} if windowed else set())
    assert refused <= (allowed if method == METHODS[0] else set())
