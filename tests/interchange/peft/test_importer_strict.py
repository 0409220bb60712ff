"""A checkpoint of peft loads as a whole, on the backbone it is for, or one error lists why not."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.errors import AdapterhubError, FileError, MismatchError

peft = pytest.importorskip("peft")
from peft_reference import outputs, trained  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def lora(**options):
    return peft.LoraConfig(**({"task_type": "SEQ_CLS", "target_modules": ["query"]} | options))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("made") / "theirs", "bert", lora())


@pytest.fixture
def folder(made, tmp_path):
    """A checkpoint to spoil."""
    return shutil.copytree(made, tmp_path / "theirs")


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(config), encoding="utf-8")


def edit_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def test_fields_of_a_newer_peft_pass_while_they_are_neutral(folder):
    expected = ah.load(tiny_models.model("bert"), folder).tensors()
    edit(folder, use_hyperlora=False, hyper_config=None, hyper_names=[], note="")
    found = ah.load(tiny_models.model("bert"), folder).tensors()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


CHANGING = {
    "use_hyperlora": True,
    "lora_bias": True,
    "use_qalora": True,
    "target_parameters": ["experts.gate_up_proj"],
    "trainable_token_indices": [1, 2],
    "layer_replication": [[0, 2]],
    "alora_invocation_tokens": [7],
    "megatron_config": {"a": 1},
    "arrow_config": {"top_k": 3},
    "kasa_config": {"beta": 1.0},
    "use_bdlora": {"nblocks": 2},
    "monteclora_config": {"num_samples": 2},
}


def test_options_that_change_the_function_are_refused_all_at_once(folder):
    edit(folder, **CHANGING)
    with pytest.raises(FileError) as caught:
        ah.load(tiny_models.model("bert"), folder)
    for name in CHANGING:
        assert any(name in offender for offender in caught.value.offenders), name


def test_every_option_of_every_kind_is_known():
    """A field of peft is read, ignored as training's own, or refused: never overlooked."""
    from adapterhub.interchange.peft import files as format_

    kinds = {
        "LORA": peft.LoraConfig,
        "IA3": peft.IA3Config,
        "LN_TUNING": peft.LNTuningConfig,
        "PROMPT_TUNING": peft.PromptTuningConfig,
        "P_TUNING": peft.PromptEncoderConfig,
        "PREFIX_TUNING": peft.PrefixTuningConfig,
    }
    assert set(kinds) == set(format_.KINDS)
    for kind, config in kinds.items():
        known = format_._FIELDS[kind]
        assert set(config.__dataclass_fields__) <= set(known), kind


@pytest.mark.parametrize("init", ["corda", "lora_ga", "loftq", "new"])
def test_an_initialization_that_changed_the_backbone_is_refused(folder, init):
    edit(folder, init_lora_weights=init)
    with pytest.raises(MismatchError, match=init):
        ah.load(tiny_models.model("bert"), folder)


def test_tensors_that_do_not_fit_are_listed_all_at_once(folder):
    def change(tensors):
        names = sorted(n for n in tensors if "lora_A" in n)
        tensors[names[0].replace("query", "nothing")] = tensors.pop(names[0])
        tensors[names[1]] = tensors[names[1]][:, :-1].contiguous()
        return tensors

    edit_tensors(folder, change)
    model = tiny_models.model("bert")
    before = outputs(model)
    with pytest.raises(MismatchError) as caught:
        ah.load(model, folder)
    text = str(caught.value)
    assert "nothing" in text
    assert "layer.0.attention.self.query" in text
    assert "layer.1.attention.self.query: A is (8, 31), here it must be (8, 32)" in text
    assert torch.equal(outputs(model), before)
    assert not hasattr(model, "_adapterhub")


@pytest.mark.parametrize("targets", [["query", "value"], ["value"], r".*layer\.0.*query"])
def test_targets_and_tensors_must_agree(folder, targets):
    edit(folder, target_modules=targets)
    with pytest.raises(MismatchError, match="target_modules"):
        ah.load(tiny_models.model("bert"), folder)


def test_an_empty_file_is_refused(folder):
    edit_tensors(folder, lambda tensors: {n: t[:0] for n, t in tensors.items()})
    with pytest.raises(FileError, match="empty"):
        ah.load(tiny_models.model("bert"), folder)
    (folder / "adapter_model.safetensors").write_bytes(b"x" * 443)
    with pytest.raises(FileError, match="cannot be read"):
        ah.load(tiny_models.model("bert"), folder)


def test_another_backbone_is_refused_by_name(folder):
    def model(name):
        made = tiny_models.model("bert")
        made.config._name_or_path = name
        return made

    edit(folder, base_model_name_or_path="acme/one")
    ah.load(model("acme/one"), folder)
    with pytest.raises(MismatchError, match="a different backbone"):
        ah.load(model("acme/two"), folder)
    ah.load(model("acme/two"), folder, any_backbone=True)
    edit(folder, base_model_name_or_path="/home/someone/models/bert")
    with pytest.warns(UserWarning, match="it was not checked"):
        ah.load(model("acme/two"), folder)


def test_a_pickle_is_opened_only_when_asked_for_and_runs_nothing(folder, tmp_path):
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    with pytest.raises(FileError, match="allow_pickle"):
        ah.load(tiny_models.model("bert"), folder)
    assert ah.load(tiny_models.model("bert"), folder, allow_pickle=True).count() > 0

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    torch.save({"a": Evil()}, folder / "adapter_model.bin", pickle_module=pickle)
    with pytest.raises(FileError, match="cannot be read"):
        ah.load(tiny_models.model("bert"), folder, allow_pickle=True)
    assert not (tmp_path / "pwned").exists()


def test_the_head_and_its_labels_come_back(folder, tmp_path):
    """However many outputs the model at hand has; and our files keep the labels."""
    expected = outputs(peft.PeftModel.from_pretrained(tiny_models.model("bert"), folder))
    model = tiny_models.model("bert", num_labels=5)
    adapter = ah.load(model, folder)
    assert adapter.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    torch.testing.assert_close(outputs(model), expected, atol=5e-6, rtol=1e-5)
    names = {"id2label": {0: "ham", 1: "eggs", 2: "spam"}}
    named = ah.load(tiny_models.model("bert", **names), folder)
    assert named.labels == ("ham", "eggs", "spam")
    named.save(tmp_path / "ours")
    again = tiny_models.model("bert")
    assert ah.load(again, tmp_path / "ours").labels == ("ham", "eggs", "spam")
    torch.testing.assert_close(outputs(again), expected, atol=5e-6, rtol=1e-5)


HEADS = {"bert": "classifier", "gpt2": "score", "bart": "classification_head"}


@pytest.mark.parametrize("architecture", HEADS)
def test_a_head_of_any_name(tmp_path, architecture):
    name = HEADS[architecture]
    targets = {"gpt2": ["c_attn"], "bart": ["q_proj"]}.get(architecture, ["query"])
    config = lora(target_modules=targets, modules_to_save=[name])
    folder = trained(tmp_path / "theirs", architecture, config)
    theirs = peft.PeftModel.from_pretrained(tiny_models.model(architecture), folder)
    ours = tiny_models.model(architecture)
    adapter = ah.load(ours, folder)
    assert {n.split(".")[1] for n in adapter.tensors() if n.startswith("head.")} == {name}
    torch.testing.assert_close(outputs(ours), outputs(theirs), atol=5e-6, rtol=1e-5)


def test_a_part_of_the_head_that_nobody_saved_is_told(tmp_path):
    """DistilBERT's head is two modules."""
    config = lora(target_modules=["q_lin"])
    folder = trained(tmp_path / "theirs", "distilbert", config)
    edit_tensors(folder, lambda ts: {n: t for n, t in ts.items() if "pre_classifier" not in n})
    with pytest.warns(UserWarning, match="pre_classifier"):
        ah.load(tiny_models.model("distilbert"), folder)
    model = tiny_models.model("distilbert")
    model._adapterhub_fresh = frozenset({"pre_classifier.weight", "pre_classifier.bias"})
    with pytest.raises(MismatchError, match="pre_classifier"):
        ah.load(model, folder)


RENAMED = {
    "another class": ("bert.encoder", "encoder"),
    "another wrapper": ("bert.encoder", "text_model.bert.encoder"),
    "another version": ("bert.encoder.layer", "model.transformer.layers"),
}


@pytest.mark.parametrize("case", RENAMED)
def test_modules_that_were_renamed_are_found(folder, case):
    expected = ah.load(tiny_models.model("bert"), folder).tensors()
    old, new = RENAMED[case]
    edit_tensors(folder, lambda tensors: {n.replace(old, new): t for n, t in tensors.items()})
    found = ah.load(tiny_models.model("bert"), folder).tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_tied_embeddings_that_were_trained_apart_are_refused(tmp_path, module):
    config = lora(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=[module])
    tied = {"tie_word_embeddings": True}
    folder = trained(tmp_path / "theirs", "llama", config, "causal-lm", **tied)
    with pytest.raises(MismatchError, match="tied"):
        ah.load(tiny_models.model("llama", "causal-lm", **tied), folder)


def test_all_linear_as_a_word(tmp_path):
    folder = trained(tmp_path / "theirs", "llama", lora(target_modules="all-linear"))
    expected = ah.load(tiny_models.model("llama"), folder).tensors()
    edit(folder, target_modules="all-linear")
    assert ah.load(tiny_models.model("llama"), folder).tensors().keys() == expected.keys()


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
        "bert", peft.VeraConfig(task_type="SEQ_CLS", target_modules=["query"]),
        "classification", "VERA",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_compute_something_else_is_refused(tmp_path, case):
    architecture, config, task, reason = REFUSED[case]
    folder = trained(tmp_path / "theirs", architecture, config, task)
    with pytest.raises(AdapterhubError, match=reason):
        ah.load(tiny_models.model(architecture, task), folder)


def test_other_adapters_on_the_model_do_not_disturb_an_import(tmp_path):
    config = lora(init_lora_weights="pissa")
    folder = trained(tmp_path / "theirs", "bert", config)
    expected = ah.load(tiny_models.model("bert"), folder).tensors()
    model = tiny_models.model("bert")
    tiny_models.scramble(ah.attach(model, "full", name="other"))
    found = ah.load(model, folder).tensors()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
