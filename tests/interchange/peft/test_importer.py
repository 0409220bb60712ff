"""A peft checkpoint is imported completely, or one error lists why not."""

import peft
import pytest
import torch

import adapterhub as ah
from adapterhub.errors import AdapterhubError, MismatchError
from tests.kit import tiny_models
from tests.kit.peers import KINDS, compare_import, edit, edit_tensors, lora_config, outputs, trained
from tests.kit.selection import long_table

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
CLASS, LM, S2S = "classification", "causal-lm", "seq2seq"


def virtual(task, kind=peft.PromptTuningConfig, tokens=5, **options):
    return kind(task_type=KINDS[task], num_virtual_tokens=tokens, **options)


NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
# What test_differential.py does not compare: architecture, task, configuration, options, methods.
IMPORTS = {
    **{f"lora, {a}": (a, CLASS, lora_config(target_modules=targets, fan_in_fan_out=a == "gpt2"),
                      {}, "lora")
       for a, targets in (("gpt2", ["c_attn", "mlp.c_proj"]), ("t5", ["q", "v", "wo"]),
                          ("phi3", ["qkv_proj", "gate_up_proj"]))},
    **{name: ("bert", CLASS, lora_config(**{"target_modules": ["query", "value"]} | options),
              {"atol": 1e-4} if "init_lora_weights" in options else {}, "")
       for name, options in {
           "alphas": {"alpha_pattern": {"value": 5}, "rank_pattern": {"query": 3},
                      "use_rslora": True},
           "all-linear-dora": {"target_modules": "all-linear", "use_dora": True},
           "pissa-rslora": {"init_lora_weights": "pissa", "use_rslora": True},
       }.items()},
    "head": ("bart", CLASS, lora_config(target_modules=["q_proj"],
        modules_to_save=["classification_head"]), {}, "lora"),
    "ia3": ("bert", CLASS, peft.IA3Config(task_type="SEQ_CLS", target_modules=[
        "key", "value", "output.dense"], feedforward_modules=["output.dense"]), {}, ""),
    "norms": ("llama", CLASS, peft.LNTuningConfig(task_type="SEQ_CLS", target_modules=NORMS),
              {}, ""),
    # With bias="all" peft also writes the head as `classifier.modules_to_save.default.dense`.
    "biases": ("roberta", CLASS, lora_config(target_modules=["query"], bias="all"), {}, ""),
    **{name: (a, LM, lora_config(LM, **{"target_modules": [], **options}),
              {"std": 0.1, "atol": 1e-4}, "lora")
       for name, (a, options) in {
           "experts": ("mixtral", {"target_modules": "all-linear"}),  # the experts, too
           "weights": ("mixtral", {"target_parameters": ["o_proj.weight", "lm_head.weight",
                                                         "embed_tokens.weight"]}),
           "transposed": ("gpt2", {"target_parameters": ["c_proj.weight", "wte.weight"]}),
       }.items()},
    **{f"llama-adapter, {a}": (a, LM, peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1,
        task_type="CAUSAL_LM"), {"atol": 2e-5, "std": 1.0}, "llama-adapter")
       for a in ("llama", "mistral")},
    **{f"cartridge, {a}": (a, LM, virtual(LM, peft.CartridgeConfig, num_frozen_tokens=frozen),
                           {"atol": 2e-5}, "cartridge")
       for a, frozen in (("gpt2", 0), ("llama", 2))},
    "LSTM": ("gpt2", LM, virtual(LM, peft.PromptEncoderConfig, encoder_hidden_size=7,
        encoder_reparameterization_type="LSTM"), {"atol": 2e-5, "strip": 5}, ""),
    **{f"prefix, {a}": (a, task, virtual(task, peft.PrefixTuningConfig, prefix_projection=True,
        encoder_hidden_size=7), {"atol": 2e-5}, "prefix")
       for a, task in (("gpt2", LM), ("qwen3", LM), ("umt5", S2S))},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
@long_table("case", IMPORTS, 3)
def test_an_import_gives_equal_outputs(tmp_path, case):
    architecture, task, config, options, methods = IMPORTS[case]
    adapter = compare_import(tmp_path, architecture, config, task, **options)
    if methods:
        assert {method.name for method in adapter.methods} == {methods}
    if methods == "cartridge":
        (method,) = adapter.methods
        assert (method.length, method.frozen) == (5, config.num_frozen_tokens)
        trained_ones = {n for n, t in adapter.tensors().items() if t.requires_grad}
        assert all(name.endswith(".prefix") for name in trained_ones)


BIASED = {"attention_bias": True}
REFUSED = {  # architecture, task, configuration, options of the model, and a part of the error
    "a classifier that reads one position": ("bert", CLASS, virtual(CLASS), {}, "one position"),
    "positions that cannot be given": ("m2m_100", S2S, virtual(S2S, peft.PrefixTuningConfig), {},
                                       "positions"),
    "a sliding window": ("mistral", LM, virtual(LM, peft.PrefixTuningConfig), {}, "sliding window"),
    "a method that is not here": ("bert", CLASS, peft.LilyConfig(task_type="SEQ_CLS",
                                  target_modules=["query"]), {}, "LILY"),
    "llama-adapter on GPT-2": ("gpt2", LM, peft.AdaptionPromptConfig(adapter_len=4,
                               adapter_layers=1, task_type="CAUSAL_LM"), {}, "llama and mistral"),
    "llama-adapter with biases": ("llama", LM, peft.AdaptionPromptConfig(adapter_len=4,
                                  adapter_layers=1, task_type="CAUSAL_LM"), BIASED, "adds twice"),
    "a bias where there is none": ("llama", CLASS, lora_config(target_modules=["q_proj"],
                                   lora_bias=True), {}, "q_proj.bias: lora_bias adds a bias (32,)"),
    # DeBERTa reads the weight, so peft's update has no effect; OPT gives it the mask.
    **{f"an embedding without a look-up, {a}": (a, CLASS, lora_config(target_modules=[module]), {},
        f"{module}: the model does not look up ids") for a, module in (
            ("deberta", "rel_embeddings"), ("deberta-v2", "rel_embeddings"),
            ("opt", "embed_positions"))},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_with_different_outputs_is_refused(tmp_path, case):
    architecture, task, config, options, reason = REFUSED[case]
    folder = trained(tmp_path / "theirs", architecture, config, task, **options)
    with pytest.raises(AdapterhubError) as error:
        ah.load(tiny_models.model(architecture, task, **options), folder)
    assert reason in str(error.value)


@pytest.mark.parametrize("init", ["corda", "lora_ga", "loftq", "new"])
def test_an_initialization_that_changes_the_backbone_is_refused(checkpoint, init):
    edit(checkpoint, init_lora_weights=init)
    with pytest.raises(MismatchError, match=init):
        ah.load(tiny_models.model("bert"), checkpoint)


def test_one_error_lists_all_tensors_that_do_not_fit(checkpoint):
    def change(tensors):
        names = sorted(n for n in tensors if "lora_A" in n)
        tensors[names[0].replace("query", "nothing")] = tensors.pop(names[0])
        tensors[names[1]] = tensors[names[1]][:, :-1].contiguous()
        return tensors

    edit_tensors(checkpoint, change)
    model = tiny_models.model("bert")
    before = outputs(model)
    with pytest.raises(MismatchError) as caught:
        ah.load(model, checkpoint)
    text = str(caught.value)
    assert "nothing" in text
    assert "layer.0.attention.self.query" in text
    assert "layer.1.attention.self.query: A is (8, 31), here it must be (8, 32)" in text
    assert torch.equal(outputs(model), before)
    assert not hasattr(model, "_adapterhub")


def test_another_backbone_is_refused_by_name(checkpoint):
    def model(name):
        made = tiny_models.model("bert")
        made.config._name_or_path = name
        return made

    edit(checkpoint, base_model_name_or_path="acme/one")
    ah.load(model("acme/one"), checkpoint)
    with pytest.raises(MismatchError, match="a different backbone"):
        ah.load(model("acme/two"), checkpoint)
    ah.load(model("acme/two"), checkpoint, any_backbone=True)
    edit(checkpoint, base_model_name_or_path="/home/someone/models/bert")
    with pytest.warns(UserWarning, match="it was not checked"):
        ah.load(model("acme/two"), checkpoint)


def test_the_head_and_its_labels_are_imported(checkpoint, tmp_path):
    """The model may have another number of outputs; our files store the labels."""
    expected = outputs(peft.PeftModel.from_pretrained(tiny_models.model("bert"), checkpoint))
    model = tiny_models.model("bert", num_labels=5)
    adapter = ah.load(model, checkpoint)
    assert adapter.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    torch.testing.assert_close(outputs(model), expected, atol=5e-6, rtol=1e-5)
    names = {"id2label": {0: "ham", 1: "eggs", 2: "spam"}}
    named = ah.load(tiny_models.model("bert", **names), checkpoint)
    assert named.labels == ("ham", "eggs", "spam")
    named.save(tmp_path / "ours")
    again = tiny_models.model("bert")
    assert ah.load(again, tmp_path / "ours").labels == ("ham", "eggs", "spam")
    torch.testing.assert_close(outputs(again), expected, atol=5e-6, rtol=1e-5)


def test_a_missing_part_of_the_head_is_noted(tmp_path):
    """DistilBERT's head is two modules."""
    config = lora_config(target_modules=["q_lin"])
    folder = trained(tmp_path / "theirs", "distilbert", config)
    edit_tensors(folder, lambda ts: {n: t for n, t in ts.items() if "pre_classifier" not in n})
    with pytest.warns(UserWarning, match="pre_classifier"):
        ah.load(tiny_models.model("distilbert"), folder)
    model = tiny_models.model("distilbert")
    model._adapterhub_fresh = frozenset({"pre_classifier.weight", "pre_classifier.bias"})
    with pytest.raises(MismatchError, match="pre_classifier"):
        ah.load(model, folder)


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
@pytest.mark.parametrize("bias", ["none", "all"])
def test_a_checkpoint_with_a_head_fits_a_headless_model(tmp_path, architecture, bias):
    config = lora_config(target_modules=["query"], bias=bias)
    folder = trained(tmp_path, architecture, config)
    theirs = peft.PeftModel.from_pretrained(tiny_models.model(architecture), folder)
    base = theirs.get_base_model().base_model_prefix
    expected = outputs(getattr(theirs.get_base_model(), base), "features")
    ours = getattr(tiny_models.model(architecture), base)
    with pytest.raises(MismatchError, match=r"classifier\S*: this backbone has no such module"):
        ah.load(ours, folder)
    adapter = ah.load(ours, folder, head=False)
    assert adapter.head is None
    torch.testing.assert_close(outputs(ours, "features"), expected, atol=5e-6, rtol=1e-5)


def test_active_adapters_do_not_affect_an_import(tmp_path):
    config = lora_config(init_lora_weights="pissa", target_modules=["query"])
    folder = trained(tmp_path / "theirs", "bert", config)
    expected = ah.load(tiny_models.model("bert"), folder).tensors()
    model = tiny_models.model("bert")
    tiny_models.scramble(ah.attach(model, "full", name="other"))
    found = ah.load(model, folder).tensors()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
