"""Prompts and prefixes that test_differential.py does not compare with those of peft."""

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, BertForNextSentencePrediction

import adapterhub as ah
from adapterhub.backbones.task_models import TASK_MODELS
from adapterhub.errors import MismatchError, SiteError
from tests.kit import tiny_models
from tests.kit.peers import compare_import, edit, trained
from tests.kit.selection import long_table

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


def text_logits(model, side):
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
        pair = [text_logits(model, side) for model in (ours, theirs)]
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
    """The head of a decoder finds padding for the whole batch; a language model reads no ids."""
    model, language = tiny_models.model("gpt2"), tiny_models.model("llama", "causal-lm")
    for padding in ("skip", "count"):
        ah.attach(model, prompt(padding), name=padding)
        ah.attach(language, prompt(padding), name=padding)
    with ah.route(language, ["skip", "count", "skip"]):
        language(**tiny_models.padded_batch("left"))
    for rows in (["skip", "count", "skip"], ["count", None, None]):
        with ah.route(model, rows), pytest.raises(SiteError, match="count padding"):
            model(**tiny_models.padded_batch("right"))
    ah.activate(model, "skip", "count")
    with pytest.raises(SiteError, match="count padding"):
        model(**tiny_models.padded_batch("right"))


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


# On every kind of model peft uses an exported prompt or prefix, or the export is refused.

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
PREFIX = "prefix(length=3, positions=true, sites=['{}.attn.kv'])"


def configuration(architecture):
    tokens = {"vocab_size": tiny_models.VOCAB, "pad_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(architecture, **tiny_models.SIZES[architecture], **tokens)


def new_model(model_class, architecture):
    torch.manual_seed(0)
    return model_class(configuration(architecture)).eval()


def model_classes():
    """Return each model class of our tasks, and one of no task, with its architecture."""
    for architecture in ("bert", "bart", "gpt2"):
        config = configuration(architecture)
        classes = {cls for row in TASK_MODELS.values() for cls in row.classes_for(config)}
        classes |= {BertForNextSentencePrediction} if architecture == "bert" else set()
        for model_class in sorted(classes, key=lambda cls: cls.__name__):
            yield pytest.param(model_class, architecture, id=model_class.__name__)


def outputs(model):
    """Return the logits, or the last hidden state: a pooler reads one position."""
    inputs = tiny_models.batch()
    if "MultipleChoice" in str(type(model)):
        inputs = {name: tensor[:, None] for name, tensor in inputs.items()}
    if model.config.is_encoder_decoder and "Classification" not in str(type(model)):
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    with torch.no_grad():
        values = model(**inputs, use_cache=False)
    names = ("logits", "start_logits", "end_logits", "last_hidden_state")
    return [values[name] for name in names if name in values]


CELLS = list(model_classes())


@long_table(
    ("model_class", "architecture", "method"),
    [
        pytest.param(*cell.values, method, id=f"{cell.id}-{kind}")
        for cell in CELLS
        for kind, method in (("prompt", "prompt(length=3)"), ("prefix", PREFIX))
    ],
    4,
    nightly=2,
)
def test_peft_uses_exported_virtual_tokens(tmp_path, model_class, architecture, method):
    ours, bare = (new_model(model_class, architecture) for _ in range(2))
    last = "encoder" if architecture not in tiny_models.GENERATORS else "decoder"
    try:
        adapter = ah.attach(ours, method.format(last))
        tiny_models.scramble_parameters(adapter, std=0.3)
        adapter.export(tmp_path / "peft")
    except ah.errors.AdapterhubError:
        return
    theirs = peft.PeftModel.from_pretrained(new_model(model_class, architecture), tmp_path / "peft")
    assert type(theirs) is not peft.PeftModel  # the class that ignores virtual tokens
    for found, expected, without in zip(outputs(theirs), outputs(ours), outputs(bare), strict=True):
        found = found[:, -expected.shape[1] :]  # peft returns the outputs of virtual tokens too
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        assert not torch.allclose(expected, without, atol=1e-3)


@pytest.mark.parametrize("task", ["classification", "tagging", "question-answering"])
def test_a_head_that_the_adapter_does_not_have_is_exported_as_it_is(tmp_path, task):
    """peft requires it in the files."""
    kind = {"classification": "SequenceClassification", "tagging": "TokenClassification"}
    name = f"T5For{kind.get(task, 'QuestionAnswering')}"
    ours, theirs = (new_model(getattr(transformers, name), "t5") for _ in range(2))
    adapter = ah.attach(ours, "lora")
    tiny_models.scramble_parameters(adapter, std=0.3)
    adapter.export(tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft")
    for found, expected in zip(outputs(theirs), outputs(ours), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["MaskedLM", "NextSentencePrediction", "MultipleChoice"])
@pytest.mark.parametrize("method", ["prompt(length=3)", PREFIX.format("encoder")])
def test_a_model_without_a_task_type_is_refused(tmp_path, name, method):
    model = new_model(getattr(transformers, f"BertFor{name}"), "bert")
    with pytest.raises(MismatchError) as caught:
        ah.attach(model, method).export(tmp_path / "peft")
    problem = f"peft has no task type for BertFor{name}, and without one it ignores virtual tokens"
    assert problem in caught.value.offenders


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_virtual_tokens_without_a_task_type_are_not_imported(tmp_path, kind):
    """peft loads such a checkpoint, and ignores its virtual tokens."""
    config = kind(num_virtual_tokens=3, task_type="CAUSAL_LM")
    peft.get_peft_model(tiny_models.model("gpt2", "causal-lm"), config).save_pretrained(tmp_path)
    edit(tmp_path, task_type=None)
    theirs = peft.PeftModel.from_pretrained(tiny_models.model("gpt2"), tmp_path)
    assert type(theirs) is peft.PeftModel
    with pytest.raises(MismatchError) as caught:
        ah.load(tiny_models.model("gpt2", "causal-lm"), tmp_path)
    assert "task_type: none, and then peft ignores virtual tokens" in caught.value.offenders
