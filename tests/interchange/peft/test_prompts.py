"""Prompts and prefixes compute the same here and in peft, whatever the padding."""

from __future__ import annotations

import peft
import pytest
import torch
from safetensors.torch import load_file

import adapterhub as ah
from adapterhub.errors import AdapterhubError, SiteError
from tests.kit import tiny_models
from tests.kit.peers import KINDS, compare_import, core, trained

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


def virtual(task):
    return peft.PrefixTuningConfig(task_type=KINDS[task], num_virtual_tokens=5)


ADAPTER = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")


GENERATED = {
    **{a: (a, "causal-lm", virtual("causal-lm")) for a in ("gpt2", "llama", "qwen3")},
    **{a: (a, "seq2seq", virtual("seq2seq")) for a in ("t5", "bart")},
    "llama-adapter": ("llama", "causal-lm", ADAPTER),
}


@pytest.mark.parametrize("case", core(GENERATED, "t5", "bart", "llama-adapter"))
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


@pytest.mark.parametrize("architecture", core(["gpt2", "llama", "qwen3"], "llama"))
def test_a_prompt_of_cpt_is_a_prompt(tmp_path, monkeypatch, architecture):
    forward = peft.PeftModelForCausalLM.forward  # which takes labels out without a default
    monkeypatch.setattr(
        peft.PeftModelForCausalLM, "forward",
        lambda self, *args, **given: forward(self, *args, **{"labels": None} | given),
    )  # fmt: skip
    config = peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[5, 6, 7, 8, 9], opt_projection_epsilon=40.0,
        opt_projection_format_epsilon=40.0,
    )  # fmt: skip
    adapter = compare_import(tmp_path, architecture, config, "causal-lm", atol=2e-5, strip=5)
    assert [method.name for method in adapter.methods] == ["prompt"]


# With padding: peft puts prompts in front of it, and its heads do not find it.


LENGTH = 4
# In peft, a prompt does not fit the embedding of these.
UNFIT = ("albert", "electra", "distilbert", "opt", "xglm")


def tasks(architecture):
    """Return the tasks whose prompts peft and we compute; a first position is never read here."""
    if architecture in tiny_models.ENCODER_DECODERS:
        return ("seq2seq",)
    decoder = architecture in tiny_models.DECODERS
    return ("classification", "causal-lm", "features") if decoder else ("features",)


CELLS = [(a, t) for a in tiny_models.ARCHITECTURES if a not in UNFIT for t in tasks(a)]
CORE = (
    ("gpt2", "classification"), ("llama", "causal-lm"), ("roberta", "features"),
    ("mpnet", "features"), ("t5", "seq2seq"),
)  # fmt: skip


def outputs(model, task, side):
    """Return what the model computes for tokens that are not padding, or for whole texts."""
    inputs = tiny_models.padded_batch(side)
    mask = inputs.get("attention_mask", torch.ones(3, 9)).bool()
    if task == "seq2seq":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :3]
    with torch.no_grad():
        values = model.eval()(**inputs)["last_hidden_state" if task == "features" else "logits"]
    if values.ndim == 2 or task == "seq2seq":
        return values
    return values[:, -9:][mask]


def assert_equal(found, expected, task):
    for side in (None, "right", "left"):
        torch.testing.assert_close(
            outputs(found, task, side), outputs(expected, task, side), atol=2e-5, rtol=1e-5
        )


def prompt(padding):
    """Spell the method whose prompt skips padding, or counts it."""
    return {"prompt": {"length": LENGTH, "counts_padding": padding == "count"}}


def exported_prompt(folder, architecture, task, padding):
    model = tiny_models.model(architecture, task)
    torch.manual_seed(0)
    adapter = ah.attach(model, prompt(padding))
    tiny_models.scramble(adapter)
    folder = folder / "peft"
    adapter.export(folder)
    return model, peft.PeftModel.from_pretrained(tiny_models.model(architecture, task), folder)


@pytest.mark.parametrize(("architecture", "task"), core(CELLS, *CORE))
def test_an_imported_prompt(tmp_path, architecture, task):
    config = peft.PromptTuningConfig(task_type=KINDS[task], num_virtual_tokens=LENGTH)
    folder = trained(tmp_path / "theirs", architecture, config, task)
    theirs = peft.PeftModel.from_pretrained(tiny_models.model(architecture, task), folder)
    ours, again = (tiny_models.model(architecture, task) for _ in range(2))
    ah.load(ours, folder).save(tmp_path / "ours")
    ah.load(again, tmp_path / "ours")
    assert_equal(ours, theirs, task)
    assert_equal(again, theirs, task)


# Without a task type, peft ignores the prompt of these.
EXPORTED = [(a, t) for a, t in CELLS if a not in ("bart", "mbart")]


@pytest.mark.parametrize(("architecture", "task"), core(EXPORTED, *CORE))
def test_an_exported_prompt(tmp_path, architecture, task):
    assert_equal(*exported_prompt(tmp_path, architecture, task, "count"), task)


def test_other_exports_name_the_difference(tmp_path):
    with pytest.warns(UserWarning, match="padding on the left"):
        ours, theirs = exported_prompt(tmp_path, "llama", "causal-lm", "skip")
    for side, equal in ((None, True), ("right", True), ("left", False)):
        pair = [outputs(model, "causal-lm", side) for model in (ours, theirs)]
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


# A prefix shifts positions as the backbone counts them, whatever the padding.


# Architectures whose prefixes of decoders and encoders both libraries compute.
BOTH = (
    "bert", "camembert", "electra", "gpt2", "gpt_neox", "llama", "olmo", "olmo2", "opt", "phi3",
    "qwen2", "qwen3", "roberta", "xlm-roberta", "mixtral",
)  # fmt: skip
PREFIX_CORE = ("roberta", "opt", "gpt2", "bert")


def logits(model, inputs):
    """Return the logits of tokens that are not padding, or of whole texts."""
    with torch.no_grad():
        values = model.eval()(**inputs).logits
    mask = inputs.get("attention_mask", torch.ones(3, 9)).bool()
    return values[mask] if values.ndim == 3 else values


@pytest.mark.parametrize("task", ["causal-lm", "classification"])
@pytest.mark.parametrize("architecture", core(BOTH, *PREFIX_CORE))
def test_an_imported_prefix_with_padding(tmp_path, architecture, task):
    config = peft.PrefixTuningConfig(task_type=KINDS[task], num_virtual_tokens=4)
    folder = trained(tmp_path, architecture, config, task)
    theirs = peft.PeftModel.from_pretrained(tiny_models.model(architecture, task), folder)
    ours, bare = (tiny_models.model(architecture, task) for _ in range(2))
    ah.load(ours, folder)
    for side in (None, "right", "left"):
        found = logits(ours, tiny_models.padded_batch(side))
        torch.testing.assert_close(
            found, logits(theirs, tiny_models.padded_batch(side)), atol=1e-5, rtol=1e-5
        )
        assert not torch.allclose(found, logits(bare, tiny_models.padded_batch(side)), atol=1e-3)


@pytest.mark.parametrize("architecture", core(BOTH, *PREFIX_CORE))
def test_an_exported_prefix_with_padding(tmp_path, architecture):
    task = "classification"
    ours = tiny_models.model(architecture, task)
    adapter = ah.attach(ours, "prefix(length=4, positions=true, sites=['attn.kv'])")
    tiny_models.scramble(adapter)
    adapter.export(tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(
        tiny_models.model(architecture, task), tmp_path / "peft"
    )
    for side in (None, "right", "left"):
        found = logits(theirs, tiny_models.padded_batch(side))
        torch.testing.assert_close(
            found, logits(ours, tiny_models.padded_batch(side)), atol=1e-5, rtol=1e-5
        )


@pytest.mark.skipif(not tiny_models.FULL_MATRIX, reason="the full matrix")
def test_all_other_architectures_are_refused_here_or_in_peft(tmp_path):
    for architecture in sorted(set(tiny_models.ARCHITECTURES) - set(BOTH)):
        config = peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)
        try:
            folder = trained(tmp_path / architecture, architecture, config)
        except (ValueError, TypeError, AttributeError):
            continue  # peft or transformers refuse
        with pytest.raises(AdapterhubError):
            ah.load(tiny_models.model(architecture), folder)


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
