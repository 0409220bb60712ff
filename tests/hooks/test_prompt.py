"""Virtual tokens in a stack: lengths, masks, positions, caches, and rows with different prompts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, Qwen2VLTextConfig

import adapterhub as ah
from adapterhub.anatomy import FAMILIES, Family, Stack
from tests.kit import tiny_models

# Encoders that compute as a decoder with is_decoder=True.
MASKED = ("bert", "roberta", "xlm-roberta", "camembert", "electra")


def attached(architecture, spec="prompt(length=3)", task="features"):
    model = tiny_models.model(architecture, task)
    torch.manual_seed(0)
    tiny_models.scramble(ah.attach(model, spec, name=spec))
    return model


def hidden(model, **inputs):
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "llama", "gpt2"])
def test_outputs_have_the_length_of_the_input(architecture):
    output = hidden(attached(architecture), **tiny_models.batch())
    assert output.last_hidden_state.shape == (3, 9, 32)
    assert {state.shape for state in output.hidden_states} == {(3, 9, 32)}


def test_the_decoder_attends_to_the_prompt_of_the_encoder():
    model = attached("t5", task="seq2seq")
    inputs = tiny_models.batch() | {"decoder_input_ids": tiny_models.batch()["input_ids"][:, :4]}
    seen = {}

    def record(module, args, kwargs):
        seen.update(kwargs)

    model.decoder.register_forward_pre_hook(record, with_kwargs=True)
    output = hidden(model, **inputs)
    assert seen["encoder_hidden_states"].shape[1] == 3 + 9
    assert output.encoder_last_hidden_state.shape[1] == 9


def test_input_embeddings_and_ids_give_equal_outputs():
    model = attached("bert")
    inputs = tiny_models.batch()
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    expected = hidden(model, **inputs).last_hidden_state
    mask = inputs["attention_mask"]
    output = hidden(model, inputs_embeds=embeddings, attention_mask=mask).last_hidden_state
    assert torch.equal(output, expected)


def test_a_padded_row_equals_the_row_alone():
    """RoBERTa counts positions from padding, so they shift with the prompt."""
    model = attached("roberta")
    ids = tiny_models.batch(2, 9)["input_ids"]
    ids[0, 6:] = tiny_models.PAD
    mask = ids.ne(tiny_models.PAD).long()
    together = hidden(model, input_ids=ids, attention_mask=mask).last_hidden_state
    alone = hidden(model, input_ids=ids[:1, :6], attention_mask=mask[:1, :6]).last_hidden_state
    torch.testing.assert_close(together[:1, :6], alone, atol=1e-5, rtol=1e-5)


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
    with ah.route(model, ["2", "5"]):
        routed = model.generate(input_ids=ids, **options).scores
    for row, name in enumerate(("2", "5")):
        ah.activate(model, name)
        alone = model.generate(input_ids=ids[row : row + 1], **options).scores
        for scores, expected in zip(routed, alone, strict=True):
            torch.testing.assert_close(scores[row], expected[0], atol=1e-5, rtol=1e-4)


def test_the_prompt_enters_a_cache_once():
    model = attached("llama", task="causal-lm")
    ids = tiny_models.batch(2, 6)["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits
        first = model(ids[:, :4], use_cache=True)
        assert first.past_key_values.get_seq_length() == 3 + 4
        second = model(ids[:, 4:], past_key_values=first.past_key_values)
    torch.testing.assert_close(
        torch.cat([first.logits, second.logits], 1), expected, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "t5"])
def test_prompts_of_different_lengths_run_in_one_batch(architecture):
    """Shorter prompts are padded; each row equals a run with its prompt alone."""
    task = "features" if architecture != "t5" else "classification"
    model = attached(architecture, "prompt(length=2)", task)
    tiny_models.scramble(ah.attach(model, "prompt(length=5)", name="long"), seed=3)
    inputs, rows = tiny_models.batch(3), ["long", "prompt(length=2)", None]

    def run():
        with torch.no_grad():
            return model(**inputs)[0]

    with ah.route(model, rows):
        together = run()
    for number, name in enumerate(rows):
        ah.activate(model, *([name] if name else []))
        torch.testing.assert_close(together[number], run()[number], atol=1e-5, rtol=1e-4)


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
