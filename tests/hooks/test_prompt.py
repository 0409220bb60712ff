"""Virtual tokens in a stack: places, masks, positions, caches, and rows with different prompts."""

import copy
from dataclasses import replace
from functools import cache

import every_type
import pytest
import torch
from transformers import AutoModel, Qwen2VLTextConfig

import adapterhub as ah
from adapterhub.anatomy import FAMILIES, Family, Stack
from adapterhub.errors import SiteError
from adapterhub.hooks import prompt
from adapterhub.hooks.composition import AppliedModules, BatchPlan
from adapterhub.hooks.prompt import VirtualTokenBatch
from tests.kit import tiny_models
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import check_rows
from tests.kit.tiny_models import logits


def batch(length=2, padding=None, skips=True):
    padding = None if padding is None else torch.tensor(padding)[:, None]
    return VirtualTokenBatch(torch.zeros(1, length, 3), padding, skips)


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_over_pairs(additive):
    """Text sees the prompt, the prompt sees itself, and padding of a prompt is seen by itself."""
    mask = torch.eye(2, dtype=torch.bool)[None, None]
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    virtual = replace(batch(padding=[1, 0]), tokens=torch.zeros(2, 2, 3))
    widened = virtual.widen_pairs(mask, entering=True)
    assert widened.dtype == mask.dtype
    assert widened.shape == (2, 1, 4, 4)
    seen = widened == 0 if additive else widened
    assert seen[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]]
    assert seen[1, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    later = virtual.widen_pairs(mask, entering=False)
    assert torch.equal(later, widened[:, :, 2:])


@pytest.mark.parametrize("past", [0, 2])
def test_a_mask_over_pairs_in_a_sliding_window(past):
    """As if the virtual tokens were the first of a longer text."""
    length, tokens, window = 2, 5, 4
    whole = torch.ones(length + tokens, length + tokens).tril().triu(1 - window).bool()
    mask = whole[length + past :, length:][None, None]
    virtual = VirtualTokenBatch(torch.zeros(1, length, 3), None)
    assert torch.equal(virtual.widen_pairs(mask, False, window)[0, 0], whole[length + past :])
    if not past:
        assert torch.equal(virtual.widen_pairs(mask, True, window)[0, 0], whole)


LENGTH = 3


def extended(architecture, **inputs):
    """Put a prompt in front of the inputs of a stack, and return them."""
    model = tiny_models.model(architecture, "features")
    ah.attach(model, f"prompt(length={LENGTH})")
    root = next(m for m in model.modules() if "adapterhub" in m._modules)
    added = prompt.PromptedInputs(inputs, root._modules["adapterhub"]).extend(root)
    return inputs, added


def test_embeddings_mask_types_and_positions_are_longer_by_the_prompt():
    batch = tiny_models.batch(2, 6)
    inputs, added = extended("bert", **batch, token_type_ids=torch.ones_like(batch["input_ids"]))
    assert "input_ids" not in inputs
    assert inputs["inputs_embeds"].shape[:2] == (2, LENGTH + 6)
    assert inputs["attention_mask"].shape == (2, LENGTH + 6)
    assert inputs["token_type_ids"][0].tolist() == [0] * LENGTH + [1] * 6
    assert (added.length, added.tokens) == (LENGTH, 6)
    inputs, _ = extended("llama", **batch, position_ids=torch.arange(6)[None].expand(2, -1))
    assert inputs["position_ids"].tolist() == [list(range(LENGTH + 6))] * 2
    # Positions that count from padding are written out.
    inputs, _ = extended("roberta", **tiny_models.padded_batch("right"))
    first = tiny_models.PAD + 1
    assert inputs["position_ids"][0].tolist() == list(range(first, first + LENGTH + 9))
    assert inputs["position_ids"][1, -2:].tolist() == [tiny_models.PAD] * 2


def test_prompts_of_a_stack_follow_each_other_and_rows_with_shorter_ones_are_padded():
    model = tiny_models.language_model("llama")
    specs = {"short": "length=2", "long": "length=5", "counting": "length=2, counts_padding=true"}
    for name, options in specs.items():
        ah.attach(model, f"prompt({options})", name=name)
    ah.activate(model)
    slot = model.model._modules["adapterhub"]
    short, long, counting = slot.sites
    slot.active = AppliedModules((short, long))
    virtual = slot(3)
    expected = torch.cat([slot.placed(each)() for each in (short, long)])
    assert torch.equal(virtual.tokens[0], expected)
    assert slot.record(virtual.length, 9).keys == {short, long}
    slot.active = AppliedModules((short, long), BatchPlan([(long,), (short,), ()]))
    virtual = slot(3)
    assert virtual.tokens.shape[:2] == (3, 5)
    assert virtual.padding.tolist() == [[0], [3], [5]]
    assert torch.equal(virtual.tokens[1, 3:], slot.placed(short)())
    assert not virtual.tokens[2].any()
    slot.active = AppliedModules((short, long), BatchPlan([(long,), (long,)]))
    assert slot(2).padding is None
    slot.active = AppliedModules((short, counting))
    assert slot.counts_padding()
    with pytest.raises(SiteError, match="count padding as text"):
        slot(1)


# Encoders that compute as a decoder with is_decoder=True.
MASKED = ("bert", "roberta", "xlm-roberta", "camembert", "electra")


def hidden(model, **inputs):
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True)


def test_input_embeddings_and_ids_give_equal_outputs():
    model = tiny_models.model("bert", "features")
    ah.attach(model, "prompt(length=3)")
    inputs = tiny_models.batch()
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    expected = hidden(model, **inputs).last_hidden_state
    mask = inputs["attention_mask"]
    output = hidden(model, inputs_embeds=embeddings, attention_mask=mask).last_hidden_state
    assert torch.equal(output, expected)


@pytest.mark.parametrize("architecture", [a for a in MASKED if a in tiny_models.MATRIX])
def test_an_encoder_that_is_a_decoder_generates_with_prompts_of_different_lengths(architecture):
    model = tiny_models.model(architecture, "causal-lm", is_decoder=True)
    for seed, length in enumerate((2, 5)):
        adapter = ah.attach(model, f"prompt(length={length})", name=str(length))
        tiny_models.scramble(adapter, seed=seed, std=0.6)
    ids = tiny_models.batch(2, 6)["input_ids"]
    options = {
        "max_new_tokens": 4, "do_sample": False, "output_scores": True, "eos_token_id": None,
        "return_dict_in_generate": True, "pad_token_id": tiny_models.PAD,
    }  # fmt: skip
    check_rows(
        model, ["2", "5"], lambda: torch.stack(model.generate(input_ids=ids, **options).scores, 1)
    )


@pytest.mark.parametrize("axes", [3, 4])
def test_positions_of_several_axes(axes, monkeypatch):
    """M-RoPE has time, height and width; in front of these may be the positions in the text."""
    stack = Stack("decoder", "layers", {})
    row = Family(("qwen2_vl_text",), stacks=(stack,), below=("embed_tokens",))
    monkeypatch.setitem(FAMILIES, "qwen2_vl_text", row)
    sizes = tiny_models.SIZES["llama"] | {"vocab_size": tiny_models.VOCAB, "pad_token_id": 1}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    torch.manual_seed(0)
    model = AutoModel.from_config(Qwen2VLTextConfig(**sizes, rope_parameters=rope)).eval()
    tiny_models.scramble(ah.attach(model, "prompt(length=3)"))
    ids = tiny_models.batch(2, 9)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def run(ids, mask, axes):
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        positions = positions.expand(axes, -1, -1) if axes else positions
        return hidden(model, input_ids=ids, attention_mask=mask, position_ids=positions)[0]

    together = run(ids, mask, axes)
    torch.testing.assert_close(together, run(ids, mask, 0))
    alone = run(ids[:1, 3:], mask[:1, 3:], axes)
    torch.testing.assert_close(together[:1, 3:], alone, atol=1e-5, rtol=1e-4)


# In the language model of a larger model, which counts positions and makes masks.

# What the larger model does before it calls its language model.
MODELS = {
    "llava": "AutoModelForImageTextToText",  # nothing
    "fuyu": "AutoModelForCausalLM",  # it counts positions from the cache
    "exaone4_5": "AutoModelForImageTextToText",
    "qwen2_vl": "AutoModelForImageTextToText",
    "gemma3": "AutoModelForImageTextToText",  # it makes a mask for each kind of layer
    "gemma4": "AutoModelForImageTextToText",  # and what is added in each layer by token id
}
every_model = long_table("model_type", MODELS, 2)


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


@long_table("model_type", MODELS, 3)
def test_without_a_mask_tokens_behind_a_cache_equal_those_of_a_whole_pass(model_type):
    model, text = attached(model_type), ids()
    whole = logits(model, input_ids=text)
    with torch.no_grad():
        cache = model(input_ids=text[:, :5], use_cache=True).past_key_values
    for end in (6, 7):
        given = {"input_ids": text[:, end - 1 : end], "past_key_values": cache}
        close(logits(model, **given)[:, -1], whole[:, end - 1])


@long_table("model_type", [m for m in MODELS if m != "qwen2_vl"], 2)
def test_a_row_with_padding_on_the_left_equals_the_row_alone(model_type):
    """Without positions, which `generate` counts from the mask."""
    model, text = attached(model_type), ids()
    mask = torch.ones_like(text)
    mask[0, :3] = 0
    together = logits(model, input_ids=text, attention_mask=mask)
    close(together[:1, 3:], logits(model, input_ids=text[:1, 3:]))
    close(together[1:], logits(model, input_ids=text[1:]))


@every_model
def test_generated_tokens_are_those_without_a_cache_and_without_a_batch(model_type):
    """The first row has padding on the left."""
    model, text = attached(model_type), ids()
    mask = torch.ones_like(text)
    mask[0, :3] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1, "eos_token_id": None,
               "output_logits": True, "return_dict_in_generate": True}  # fmt: skip
    found = torch.stack(model.generate(input_ids=text, attention_mask=mask, **options).logits)
    for row, first in ((0, 3), (1, 0)):
        alone = model.generate(text[row : row + 1, first:], use_cache=False, **options).logits
        close(found[:, row], torch.stack(alone)[:, 0])


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
    virtual = next(p for n, p in model.named_parameters() if "prompt" in n)
    ah.activate(model)
    embeds = torch.cat([virtual.expand(2, -1, -1), embeds], dim=1)
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
    assert slot.kept(prompt.OUTER) is None
    close(logits(model, input_ids=text), whole)
    copied = copy.deepcopy(model)
    close(logits(copied, input_ids=text), whole)
    ah.detach(model, "prompt")
    assert not any(prompt._AROUND in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
