"""A peft checkpoint is imported completely, or one error lists why not."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import AdapterhubError, MismatchError
from tests.kit import tiny_models

peft = pytest.importorskip("peft")
from tests.kit.peers import (  # noqa: E402
    compare_import,
    core,
    edit,
    edit_tensors,
    lora_config,
    outputs,
    trained,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


NORMS = {
    "bert": ["LayerNorm"],
    "llama": ["input_layernorm", "post_attention_layernorm", "norm"],
    "gpt2": ["ln_1", "ln_f"],
    "t5": r".*layer_norm",
}


@pytest.mark.parametrize("architecture", core(NORMS, "llama"))
def test_norms(tmp_path, architecture):
    config = peft.LNTuningConfig(task_type="SEQ_CLS", target_modules=NORMS[architecture])
    compare_import(tmp_path, architecture, config)


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


CLASSIFIERS = {a: None for a in ("bert", "roberta", "xlm-roberta", "camembert", "electra")}
HEADS = {"bert": "classifier", "gpt2": "score", "bart": "classification_head"}


@pytest.mark.parametrize("architecture", HEADS)
def test_a_head_of_any_name(tmp_path, architecture):
    name = HEADS[architecture]
    targets = {"gpt2": ["c_attn"], "bart": ["q_proj"]}.get(architecture, ["query"])
    config = lora_config(target_modules=targets, modules_to_save=[name])
    folder = trained(tmp_path / "theirs", architecture, config)
    theirs = peft.PeftModel.from_pretrained(tiny_models.model(architecture), folder)
    ours = tiny_models.model(architecture)
    adapter = ah.load(ours, folder)
    assert {n.split(".")[1] for n in adapter.tensors() if n.startswith("head.")} == {name}
    torch.testing.assert_close(outputs(ours), outputs(theirs), atol=5e-6, rtol=1e-5)


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


REFUSED = {
    "a classifier that reads one position": (
        "bert", peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=5),
        "classification", "one position",
    ),
    "positions that cannot be given": (
        "m2m_100", peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=5),
        "seq2seq", "positions",
    ),
    "a sliding window": (
        "mistral", peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
        "causal-lm", "sliding window",
    ),
    "a method that is not here": (
        "bert", peft.LilyConfig(task_type="SEQ_CLS", target_modules=["query"]),
        "classification", "LILY",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_with_different_outputs_is_refused(tmp_path, case):
    architecture, config, task, reason = REFUSED[case]
    folder = trained(tmp_path / "theirs", architecture, config, task)
    with pytest.raises(AdapterhubError, match=reason):
        ah.load(tiny_models.model(architecture, task), folder)


@pytest.mark.parametrize("architecture", core(CLASSIFIERS, "roberta"))
def test_biases_of_a_saved_head_are_named_after_the_adapter(tmp_path, architecture):
    """With bias="all" peft also writes the head as `classifier.modules_to_save.default.dense`."""
    compare_import(tmp_path, architecture, lora_config(target_modules=["query"], bias="all"))


@pytest.mark.parametrize("architecture", core(CLASSIFIERS, "bert", "roberta"))
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
