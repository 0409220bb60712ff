"""Checkpoints that `adapters` wrote compute here what they computed there.

The golden files are made by tests/golden/adapters/make.py with the library itself.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.errors import FileError, MismatchError

# What an import could not carry over as it is, it says in a warning.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
GOLDEN = Path(__file__).parents[2] / "golden" / "adapters"
CASES = sorted(
    (folder.parent.name, folder.name)
    for folder in GOLDEN.glob("*/*")
    if (folder / "adapter_config.json").exists()
)
EXPECTED = {a: load_file(GOLDEN / a / "expected.safetensors") for a in {a for a, _ in CASES}}
AUTO = {
    "classification": "AutoModelForSequenceClassification",
    "tagging": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
}


def backbone(architecture, auto="AutoModel", **options):
    """The backbone of the golden files under the transformers that is installed."""
    cls = getattr(transformers, auto)
    folder = GOLDEN / architecture / "backbone"
    return cls.from_pretrained(folder, attn_implementation="eager", **options).eval()


def inputs(architecture):
    return {name: t for name, t in EXPECTED[architecture].items() if "." not in name}


def imported(model, architecture, case, **options):
    folder = GOLDEN / architecture / case
    return ah.load(model, folder, any_backbone=True, allow_pickle=True, **options)


def test_the_golden_files_cover_the_methods_and_backbones():
    assert {"bert", "roberta", "gpt2", "t5", "bart"} <= EXPECTED.keys()
    cases = {case for architecture, case in CASES if architecture == "bert"}
    expected = {"houlsby", "pfeiffer", "parallel", "mam", "prefix", "lora", "ia3", "compacter"}
    assert cases >= expected | {"unipelt", "unipelt-parts", "gated-lora"}
    for architecture, case in CASES:
        assert f"{case}.hidden" in EXPECTED[architecture]


# A layer without a prefix, behind which its T5 has no bias of relative positions.
UNEVEN = {("t5", "prefix-flat")}
EXPRESSIBLE = [cell for cell in CASES if cell not in UNEVEN]
# A gate of a whole sequence in a decoder.
DECODING = {("gpt2", "unipelt"), ("t5", "gated-lora"), ("bart", "gated-lora")}
# RoBERTa and BART repeat what BERT and T5 show; ADAPTERHUB_MATRIX=full compares them whole.
REPEATED = ("everywhere", "learned-scale", "compacter", "compacter++", "lora-all", "prefix")
FULL = os.environ.get("ADAPTERHUB_MATRIX") == "full"
COMPARED = [
    (a, c) for a, c in EXPRESSIBLE if FULL or a not in ("roberta", "bart") or c not in REPEATED
]


@pytest.mark.parametrize(("architecture", "case"), COMPARED)
def test_equal_hidden_states(architecture, case, tmp_path):
    """After the import, and again after a round through our own files."""
    model = backbone(architecture)
    given, mask = inputs(architecture), inputs(architecture)["attention_mask"].bool()
    expected = EXPECTED[architecture][f"{case}.hidden"][mask]
    adapter = imported(model, architecture, case, head=False)
    found = hidden(model, given)[mask]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    adapter.save(tmp_path / "own")
    adapter.detach()
    assert not torch.allclose(hidden(model, given)[mask], expected, atol=1e-2)
    ah.load(model, tmp_path / "own")
    assert torch.equal(hidden(model, given)[mask], found)


def hidden(model, given):
    with torch.no_grad():
        return model(**given)[0]


def head_of(architecture, case):
    path = GOLDEN / architecture / case / "head_config.json"
    if not path.exists():
        return None
    tree = json.loads(path.read_text(encoding="utf-8"))
    # Without options it is the head of a class of transformers, which has other labels.
    own = {"head_type": "classification", "num_labels": tree.get("num_labels")}
    return tree["config"] or own


def with_head(architecture, case):
    """A model with a head for the task, whose labels are others."""
    options = head_of(architecture, case)
    many = {"num_labels": 5} if options["head_type"] in ("classification", "tagging") else {}
    return backbone(architecture, AUTO[options["head_type"]], **many)


# One layer where transformers has two, or two where it has one, and untied language-model heads.
OTHER_HEADS = (
    {(a, c) for a in ("roberta", "t5", "bart") for c in ("everywhere", "compacter")}
    | {("gpt2", c) for c in ("houlsby", "lora", "mam", "compacter++")}
    | {("llama", c) for c in ("houlsby", "lora")}
    | {(a, "learned-scale") for a in ("bert", "roberta", "gpt2")}
)
HEADS = [(a, c) for a, c in COMPARED if head_of(a, c) and (a, c) not in OTHER_HEADS]


def test_heads_of_every_kind_are_compared():
    kinds = {head_of(*cell)["head_type"] for cell in HEADS}
    assert kinds == {"classification", "tagging", "question_answering", "seq2seq_lm"}
    assert len(HEADS) > 40


@pytest.mark.parametrize(("architecture", "case"), HEADS)
def test_equal_logits(architecture, case, tmp_path):
    model = with_head(architecture, case)
    adapter = imported(model, architecture, case)
    adapter.save(tmp_path / "own")
    expected, given = EXPECTED[architecture], inputs(architecture)
    names = [n for n in ("logits", "start_logits", "end_logits") if f"{case}.{n}" in expected]
    assert names
    with torch.no_grad():
        output = model(**given)
    for name in names:
        found, wanted = output[name], expected[f"{case}.{name}"]
        if found.dim() > 1 and found.shape[:2] == given["input_ids"].shape:
            mask = given["attention_mask"].bool()
            found, wanted = found[mask], wanted[mask]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    options = head_of(architecture, case)
    if "num_labels" in options and len(names) == 1:
        numbered = [f"LABEL_{i}" for i in range(options["num_labels"])]
        assert adapter.labels == tuple(options.get("label2id") or numbered)


@pytest.mark.parametrize(("architecture", "case"), sorted(OTHER_HEADS))
def test_a_head_that_is_not_expressible_is_refused(architecture, case):
    model = with_head(architecture, case)
    keys = list(model.state_dict())
    with pytest.raises(MismatchError, match="head=False"):
        imported(model, architecture, case)
    assert list(model.state_dict()) == keys
    assert imported(model, architecture, case, head=False).head is None


@pytest.mark.parametrize(("architecture", "case"), sorted(UNEVEN))
def test_a_prefix_in_some_layers_of_t5_is_refused(architecture, case):
    with pytest.raises(MismatchError, match="relative positions"):
        imported(backbone(architecture), architecture, case, head=False)


@pytest.mark.parametrize(("architecture", "case"), sorted(DECODING))
def test_a_gate_of_a_sequence_in_a_decoder_that_generates_is_refused(architecture, case):
    generates = "AutoModelForCausalLM" if architecture == "gpt2" else "AutoModelForSeq2SeqLM"
    model = backbone(architecture, generates)
    keys = list(model.state_dict())
    with pytest.raises(MismatchError, match="includes later tokens") as error:
        imported(model, architecture, case, head=False)
    gates = [line for line in error.value.offenders if line.startswith("use_gating")]
    assert gates
    assert all(": decoder." in line for line in gates)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_prefix_is_applied_by_every_attention(architecture):
    """In adapters 1.3 with transformers 4.57 a prefix on GPT-2 and Llama changes nothing under
    sdpa with an attention mask (a difference of 0.0); the golden files are of its eager
    attention, where it works. Here both give what its eager attention gives."""
    model = backbone(architecture)
    model.set_attn_implementation("sdpa")
    imported(model, architecture, "prefix-flat", head=False)
    mask = inputs(architecture)["attention_mask"].bool()
    found = hidden(model, inputs(architecture))[mask]
    expected = EXPECTED[architecture]["prefix-flat.hidden"][mask]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_methods_are_ours():
    adapter = imported(backbone("gpt2"), "gpt2", "pfeiffer", head=False)
    (method,) = adapter.methods
    assert (method.name, method.source, method.size) == ("pfeiffer", "block", 4)
    assert method.sites == ("ffn",)
    names = [m.name for m in imported(backbone("bert"), "bert", "mam", head=False).methods]
    assert names == ["prefix", "scaled-parallel"]
    (method,) = imported(backbone("roberta"), "roberta", "unipelt", head=False).methods
    assert (method.name, method.gate, method.source) == ("unipelt", "sequence", "block")
    assert (method.rank, method.length, method.size) == (2, 3, 4)
    (method,) = imported(backbone("bert"), "bert", "gated-lora", head=False).methods
    assert method.sites == ("encoder.0.attn.k", "encoder.0.ffn.down")
    adapter = imported(backbone("t5"), "t5", "everywhere", head=False)
    sizes = {p.site.id: len(p.module.down.weight) for p in adapter.placed}
    assert sizes.pop("encoder.1.attn") == sizes.pop("encoder.1.ffn") == 2
    assert set(sizes.values()) == {4}
    assert all(site.startswith("decoder.") for site in sizes)


def test_bert_owns_its_pooler():
    """The first layer of its head on BERT stands in for the pooler, which is the backbone's."""
    model = with_head("bert", "houlsby")
    pooler = model.bert.pooler.dense.weight.clone()
    adapter = imported(model, "bert", "houlsby")
    assert not torch.equal(model.bert.pooler.dense.weight, pooler)
    ah.activate(model)
    assert torch.equal(model.bert.pooler.dense.weight, pooler)
    assert adapter.labels == ("a", "b", "c")


def test_the_code_in_a_pickle_never_runs(tmp_path):
    folder = tmp_path / "hostile"
    shutil.copytree(GOLDEN / "bert" / "pickle", folder)
    marker = tmp_path / "ran"

    class Hostile:
        def __reduce__(self):
            return open, (str(marker), "w")

    torch.save({"bert.x": Hostile()}, folder / "pytorch_adapter.bin")
    with pytest.raises(FileError):
        ah.load(backbone("bert"), folder, any_backbone=True, allow_pickle=True, head=False)
    assert not marker.exists()


def test_a_pickle_is_opened_only_when_asked_for():
    model, folder = backbone("bert"), GOLDEN / "bert" / "pickle"
    with pytest.raises(FileError, match="pickle"):
        ah.load(model, folder, any_backbone=True, head=False)


@pytest.fixture
def altered(tmp_path):
    """A copy of a checkpoint to change: its folder, its options and its tensors, and `write`."""
    source = GOLDEN / "bert" / "pfeiffer"
    folder = tmp_path / "checkpoint"
    shutil.copytree(source, folder)
    tree = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "adapter.safetensors")

    def load():
        (folder / "adapter_config.json").write_text(json.dumps(tree), encoding="utf-8")
        save_file(tensors, folder / "adapter.safetensors")
        return ah.load(backbone("bert"), folder, any_backbone=True, head=False)

    return tree, tensors, load


def test_every_option_that_is_not_expressible_is_named(altered):
    tree, _, load = altered
    tree["config"] |= {"ln_after": True, "inv_adapter": "nice", "new": 3}
    with pytest.raises(FileError) as error:
        load()
    named = {line.partition(":")[0].rpartition(".")[2] for line in error.value.offenders}
    assert named == {"ln_after", "inv_adapter", "new"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"residual_before_ln": False}, "residual_before_ln"),
        ({"non_linearity": "sine"}, "non_linearity"),
        ({"mh_adapter": True}, "encoder.0.attn"),
        ({"leave_out": [1]}, "encoder.layer.1.output"),
        ({"output_adapter": False}, "no sublayer"),
        ({"reduction_factor": 8}, "shape"),
        ({"architecture": "reft"}, "reft"),
        ({"use_gating": True}, "missing: encoder.0.ffn.pfeiffer.gate.bias"),
        ({"use_gating": True, "is_parallel": True}, "only sequential"),
        ({"use_gating": True, "reduction_factor": {"0": 8, "default": 4}}, "one size"),
    ],
)
def test_options_and_tensors_must_agree(altered, options, named):
    tree, _, load = altered
    tree["config"] |= options
    with pytest.raises((FileError, MismatchError)) as error:
        load()
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("case", "options", "named"),
    [
        ("unipelt", {"shared_gating": False}, "shared_gating"),
        ("gated-lora", {"composition_mode": "scale"}, "composition_mode scale"),
        ("gated-lora", {"use_gating": False}, "gate.weight: unexpected tensor"),
        ("unipelt", {"use_gating": False}, "prefix_gates.own.weight: unexpected tensor"),
    ],
)
def test_gates_and_their_options_must_agree(case, options, named, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "bert" / case, folder)
    tree = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    part = tree["config"]["configs"][0] if case == "unipelt" else tree["config"]
    assert options.keys() <= part.keys()
    part.update(options)
    (folder / "adapter_config.json").write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(MismatchError, match=named):
        ah.load(backbone("bert"), folder, any_backbone=True, allow_pickle=True, head=False)


def test_every_tensor_without_a_place_is_named(altered):
    _, tensors, load = altered
    gone = "bert.encoder.layer.1.output.adapters.own.adapter_up.bias"
    tensors["bert.encoder.layer.7.output.adapters.own.adapter_up.bias"] = tensors.pop(gone)
    with pytest.raises(MismatchError) as error:
        load()
    assert any("layer.7" in line for line in error.value.offenders)
    del tensors["bert.encoder.layer.7.output.adapters.own.adapter_up.bias"]
    with pytest.raises(MismatchError) as error:
        load()
    assert error.value.offenders == ("missing: encoder.1.ffn.pfeiffer.up.bias",)


def test_old_lora_was_not_scaled(tmp_path):
    """Before version 1.1 of adapters LoRA did not multiply by alpha / r."""
    folder = tmp_path / "lora"
    shutil.copytree(GOLDEN / "bert" / "lora", folder)
    path = folder / "adapter_config.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    for version, alpha in (("adapters.1.0.1", 2), ("adapters.1.10.0", 4)):
        path.write_text(json.dumps(tree | {"version": version}), encoding="utf-8")
        adapter = ah.load(backbone("bert"), folder, any_backbone=True, head=False)
        assert (adapter.methods[0].rank, adapter.methods[0].alpha) == (2, alpha)


def test_the_outline_tells_what_to_load():
    from adapterhub.interchange.formats import detect

    form = detect(GOLDEN / "bert" / "houlsby")
    checkpoint_info = form.checkpoint_info(GOLDEN / "bert" / "houlsby")
    assert (form.name, checkpoint_info.backbone, checkpoint_info.task) == (
        "adapters",
        "backbone",
        "classification",
    )
    assert checkpoint_info.outputs == 3


def test_another_type_of_backbone_is_refused():
    with pytest.raises(MismatchError, match="bert"):
        imported(backbone("roberta"), "bert", "pfeiffer", head=False)
