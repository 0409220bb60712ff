"""Prompts and prefixes that test_differential.py does not compare with those of peft."""

from __future__ import annotations

import peft
import pytest
import torch
from safetensors.torch import load_file

import adapterhub as ah
from adapterhub.errors import SiteError
from tests.kit import tiny_models
from tests.kit.peers import compare_import, trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_after_an_encoder_layer_i_has_the_prefix_of_layer_2_i(tmp_path):
    config = peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2)
    layers = {"num_layers": 3, "num_decoder_layers": 3}
    adapter = compare_import(tmp_path, "t5", config, "seq2seq", atol=2e-5, **layers)
    held = load_file(tmp_path / "theirs" / "adapter_model.safetensors")["prompt_embeddings"]
    by_layer = held.view(2, 3, 2, -1)
    for layer, source in ((0, 0), (1, 2), (2, 1)):
        own = adapter.tensors()[f"decoder.{layer}.attn.kv.prefix.prefix"]
        assert torch.equal(own.transpose(0, 1), by_layer[:, source])


GENERATED = {
    **{a: (a, "seq2seq", peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=5))
       for a in ("t5", "bart")},
    "llama-adapter": ("llama", "causal-lm", peft.AdaptionPromptConfig(
        adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")),
}  # fmt: skip


@pytest.mark.parametrize("case", GENERATED)
def test_generated_tokens_are_those_of_peft(tmp_path, case):
    architecture, task, config = GENERATED[case]
    folder = trained(tmp_path / "theirs", architecture, config, task, std=2.0)
    theirs = peft.PeftModel.from_pretrained(tiny_models.model(architecture, task), folder)
    ours = tiny_models.model(architecture, task)
    padded = case == "llama-adapter"
    inputs = tiny_models.padded_batch("left") if padded else tiny_models.batch()
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True,
               "return_dict_in_generate": True, "pad_token_id": tiny_models.PAD}  # fmt: skip
    bare = ours.generate(**inputs, **options)
    ah.load(ours, folder)
    expected, found = (model.generate(**inputs, **options) for model in (theirs, ours))
    assert torch.equal(found.sequences, expected.sequences)
    assert not torch.equal(found.sequences, bare.sequences)
    pair = (torch.stack(each.logits) for each in (found, expected))
    torch.testing.assert_close(*pair, atol=2e-5, rtol=1e-5)


def test_a_prompt_of_cpt_is_a_prompt(tmp_path, monkeypatch):
    forward = peft.PeftModelForCausalLM.forward  # which takes labels out without a default
    monkeypatch.setattr(
        peft.PeftModelForCausalLM, "forward",
        lambda self, *args, **given: forward(self, *args, **{"labels": None} | given),
    )  # fmt: skip
    config = peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[5, 6, 7, 8, 9], opt_projection_epsilon=40.0,
        opt_projection_format_epsilon=40.0,
    )  # fmt: skip
    adapter = compare_import(tmp_path, "llama", config, "causal-lm", atol=2e-5, strip=5)
    assert [method.name for method in adapter.methods] == ["prompt"]


# With padding: peft puts prompts in front of it, and its heads do not find it.


LENGTH = 4


def outputs(model, side):
    """Return the logits of tokens that are not padding."""
    inputs = tiny_models.padded_batch(side)
    mask = inputs.get("attention_mask", torch.ones(3, 9)).bool()
    with torch.no_grad():
        return model.eval()(**inputs).logits[:, -9:][mask]


def prompt(padding):
    """Spell the method whose prompt skips padding, or counts it."""
    return {"prompt": {"length": LENGTH, "counts_padding": padding == "count"}}


def test_other_exports_name_the_difference(tmp_path):
    ours, theirs = (tiny_models.model("llama", "causal-lm") for _ in range(2))
    torch.manual_seed(0)
    adapter = ah.attach(ours, prompt("skip"))
    tiny_models.scramble(adapter)
    with pytest.warns(UserWarning, match="padding on the left"):
        adapter.export(tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft")
    for side, equal in ((None, True), ("right", True), ("left", False)):
        pair = [outputs(model, side) for model in (ours, theirs)]
        assert torch.allclose(*pair, atol=2e-5) == equal


def test_a_classifier_of_a_padded_row_equals_the_row_alone():
    """That is what a prompt does on both sides, and with counts_padding on none."""
    for padding in ("skip", "count"):
        model = tiny_models.model("llama")
        torch.manual_seed(0)
        tiny_models.scramble(ah.attach(model, prompt(padding)))
        for side, text in (("right", slice(0, 5)), ("left", slice(4, 9))):
            inputs = tiny_models.padded_batch(side)
            with torch.no_grad():
                together = model(**inputs).logits[2]
                alone = model(input_ids=inputs["input_ids"][2:, text]).logits[0]
            assert torch.allclose(together, alone, atol=1e-5) == (padding == "skip")


def test_prompts_that_treat_padding_differently_cannot_share_a_batch():
    """The head of a decoder finds padding for the whole batch."""
    model = tiny_models.model("gpt2")
    for padding in ("skip", "count"):
        ah.attach(model, prompt(padding), name=padding)
    for rows in (["skip", "count", "skip"], ["count", None, None]):
        with ah.route(model, rows), pytest.raises(SiteError, match="count padding"):
            model(**tiny_models.padded_batch("right"))
    ah.activate(model, "skip", "count")
    with pytest.raises(SiteError, match="count padding"):
        model(**tiny_models.padded_batch("right"))


def test_rows_without_padding_ids_may_differ():
    """A causal language model reads no ids: each row has its own kind of prompt."""
    model = tiny_models.model("llama", "causal-lm")
    for padding in ("skip", "count"):
        torch.manual_seed(0)
        adapter = ah.attach(model, prompt(padding), name=padding)
        tiny_models.scramble(adapter)
    rows = ["skip", "count", "skip"]
    with ah.route(model, rows), torch.no_grad():
        together = model(**tiny_models.padded_batch("left")).logits
    for number, name in enumerate(rows):
        ah.activate(model, name)
        with torch.no_grad():
            alone = model(**tiny_models.padded_batch("left")).logits[number]
        mask = tiny_models.padded_batch("left")["attention_mask"][number].bool()
        torch.testing.assert_close(together[number][mask], alone[mask], atol=1e-5, rtol=1e-4)


def test_peft_generates_with_other_positions_behind_a_prompt_and_left_padding(tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    folder = trained(tmp_path, "gpt2", config, "causal-lm")
    ours = tiny_models.model("gpt2", "causal-lm")
    ah.load(ours, folder)
    ids = tiny_models.batch(rows=1, length=6)["input_ids"]
    padded = torch.cat([torch.full((1, 4), tiny_models.PAD), ids], dim=1)

    def first_logits(model, input_ids):
        mask = (input_ids != tiny_models.PAD).long()
        generated = model.generate(
            input_ids=input_ids, attention_mask=mask, max_new_tokens=1, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return generated.logits[0]

    model = tiny_models.model("gpt2", "causal-lm")
    theirs = peft.PeftModel.from_pretrained(model, folder).eval()
    expected = first_logits(theirs, ids)
    torch.testing.assert_close(first_logits(ours, ids), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(first_logits(ours, padded), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(first_logits(theirs, padded), expected, atol=1e-2)
