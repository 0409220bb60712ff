"""Checkpoints of `adapters` compute the same here as in the library."""

import itertools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.errors import FileError, MismatchError
from adapterhub.interchange.adapters_library.files import read_adapters
from adapterhub.interchange.adapters_library.importer import adapters_checkpoint_info
from adapterhub.interchange.adapters_library.module_paths import RemainingTensors
from tests.kit import peers
from tests.kit.peers import backbone, hidden, imported, inputs
from tests.kit.selection import cases_of, long_table

# Imports warn about what they cannot carry over unchanged.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


GATED = [("bert", "unipelt"), ("gpt2", "unipelt"), ("t5", "unipelt")]


@pytest.mark.parametrize(
    ("architecture", "case"), dict.fromkeys([*cases_of(peers.COMPARED, nightly=2), *GATED])
)
def test_equal_hidden_states(architecture, case, tmp_path):
    """Compare after the import and after saving and loading our own files."""
    model = backbone(architecture)
    given, mask = inputs(architecture), inputs(architecture)["attention_mask"].bool()
    expected = peers.EXPECTED[architecture][f"{case}.hidden"][mask]
    adapter = imported(model, architecture, case, head=False)
    found = hidden(model, given)[mask]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    adapter.save(tmp_path / "own")
    adapter.detach()
    assert not torch.allclose(hidden(model, given)[mask], expected, atol=1e-2)
    ah.load(model, tmp_path / "own")
    assert torch.equal(hidden(model, given)[mask], found)


def load(folder, architecture, case, change=(), without="-", move=("", ""), model=None, **tree_):
    """Load a checkpoint with other options, without some tensors, or with some at another place."""
    shutil.copytree(peers.GOLDEN / architecture / case, folder / case)
    path = folder / case / "adapter_config.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    part = tree["config"]["configs"][0] if case == "unipelt" else tree["config"]
    part |= dict(change)
    tree |= tree_
    path.write_text(json.dumps(tree), encoding="utf-8")
    file = folder / case / "adapter.safetensors"
    if without != "-" or any(move):
        tensors = load_file(file).items()
        save_file({n.replace(*move): t for n, t in tensors if without not in n}, file)
    model = backbone(architecture) if model is None else model
    return ah.load(model, folder / case, any_backbone=True, allow_pickle=True, head=False)


def test_the_methods_and_their_options():
    def methods(architecture, case):
        return imported(backbone(architecture), architecture, case, head=False).methods

    (method,) = methods("gpt2", "pfeiffer")
    assert (method.name, method.source, method.size) == ("pfeiffer", "block", 4)
    assert method.sites == ("ffn",)
    assert [m.name for m in methods("bert", "mam")] == ["prefix", "scaled-parallel"]
    (method,) = methods("roberta", "unipelt")
    assert (method.name, method.gate, method.source) == ("unipelt", "sequence", "block")
    assert (method.rank, method.length, method.size) == (2, 3, 4)
    (method,) = methods("bert", "gated-lora")
    assert method.sites == ("encoder.0.attn.k", "encoder.0.ffn.down")
    coupling, bottleneck = methods("bert", "madx")
    assert (coupling.name, coupling.reduction, bottleneck.name) == ("invertible", 2, "pfeiffer")
    (method,) = methods("bert", "loreft")
    assert (method.name, method.rank) == ("loreft", 2)
    assert (method.positions, method.shared) == ("f2+l1", False)
    (method,) = methods("t5", "noreft")
    assert (method.name, method.positions, method.shared) == ("noreft", "f3+l2", True)
    assert method.sites == ("encoder.1.layer",)
    adapter = imported(backbone("t5"), "t5", "everywhere", head=False)
    sizes = {p.site.id: len(p.module.down.weight) for p in adapter.placed}
    assert sizes.pop("encoder.1.attn") == sizes.pop("encoder.1.ffn") == 2
    assert set(sizes.values()) == {4}
    assert all(site.startswith("decoder.") for site in sizes)


def test_options_that_decide_on_the_method(tmp_path):
    adapter = load(tmp_path / "a", "bert", "noreft", {"subtract_projection": False})
    assert adapter.methods[0].name == "direft"
    adapter = load(tmp_path / "b", "bert", "loreft", {"suffix_positions": 0})
    assert adapter.methods[0].positions == "f2"
    assert all(".first." in name for name in adapter.tensors())
    adapter = load(tmp_path / "c", "bert", "madx", without="invertible_adapters")
    assert [method.name for method in adapter.methods] == ["pfeiffer"]
    for version, alpha in (("adapters.1.0.1", 2), ("adapters.1.10.0", 4)):  # by alpha / r since 1.1
        (method,) = load(tmp_path / version, "bert", "lora", version=version).methods
        assert (method.rank, method.alpha) == (2, alpha)


P, Q = ("bert", "pfeiffer"), ("bert", "unipelt")
GATED = ("bert", "gated-lora")
REFUSED = {  # checkpoint, options, and what the error names
    "before a norm": (*P, {"residual_before_ln": False}, "residual_before_ln"),
    "activation": (*P, {"non_linearity": "sine"}, "non_linearity"),
    "attention": (*P, {"mh_adapter": True}, "encoder.0.attn"),
    "layer": (*P, {"leave_out": [1]}, "encoder.layer.1.output"),
    "nothing": (*P, {"output_adapter": False}, "no sublayer"),
    "size": (*P, {"reduction_factor": 8}, "shape"),
    "architecture": (*P, {"architecture": "vision"}, "vision"),
    "gate": (*P, {"use_gating": True}, "missing: encoder.0.ffn.pfeiffer.gate.bias"),
    "parallel": (*P, {"use_gating": True, "is_parallel": True}, "only sequential"),
    "sizes": (*P, {"use_gating": True, "reduction_factor": {"0": 8, "default": 4}}, "one size"),
    "several": (*P, {"ln_after": True, "inv_adapter": "glow", "new": 3}, "config.ln_after", "glow",
                "config.new"),
    "shared gates": (*Q, {"shared_gating": False}, "shared_gating"),
    "no gates": (*Q, {"use_gating": False}, "prefix_gates.own.weight: unexpected tensor"),
    "composition": (*GATED, {"composition_mode": "scale"}, "composition_mode scale"),
    "no gate": (*GATED, {"use_gating": False}, "gate.weight: unexpected tensor"),
    "unnamed": ("bert", "lora", {"attn_matrices": ["q"]}, "encoder.0.attn.v: has tensors"),
    "named": ("bert", "lora", {"output_lora": True}, "the options name output_lora"),
    "ia3": ("bert", "ia3", {"alpha": 2}, "only with r 1 and alpha 1"),
    "width": ("bert", "madx", {"inv_adapter_reduction_factor": 4}, "reduction_factor: 4"),
    "glow": ("bert", "madx", {"inv_adapter": "glow"}, "inv_adapter"),
    "no token": ("bert", "noreft", {"prefix_positions": 0, "suffix_positions": 0}, "nothing is"),
    "orthonormal": ("bert", "loreft", {"subtract_projection": False}, "orthogonality false"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_options_and_tensors_must_agree(tmp_path, case):
    architecture, checkpoint, change, *reasons = REFUSED[case]
    with pytest.raises(ah.AdapterhubError) as error:
        load(tmp_path, architecture, checkpoint, change)
    assert all(reason in str(error.value) for reason in reasons)


def test_the_last_tokens_of_a_decoder_behind_an_encoder_are_refused(tmp_path):
    with pytest.raises(MismatchError, match="suffix_positions"):
        load(tmp_path, "t5", "noreft", move=("encoder.block.1", "decoder.block.1"))


def test_every_unexpected_or_missing_tensor_is_named(tmp_path):
    with pytest.raises(MismatchError) as error:
        load(tmp_path / "a", *P, move=("layer.1.", "layer.7."))
    assert any("layer.7" in line for line in error.value.offenders)
    with pytest.raises(MismatchError) as error:
        load(tmp_path / "b", *P, without="layer.1.output.adapters.own.adapter_up.bias")
    with pytest.raises(MismatchError, match="unexpected tensor"):
        load(tmp_path / "c", *P, move=("adapter_up.weight", "adapter_up.other"))
    assert error.value.offenders == ("missing: encoder.1.ffn.pfeiffer.up.bias",)


def test_options_have_defaults_and_missing_ones_are_named(tmp_path):
    (part,) = read_adapters(peers.GOLDEN / "bert" / "pfeiffer", head=False).parts
    assert (part.kind, part.options["phm_dim"]) == ("bottleneck", 4)
    assert part.options["is_parallel"] is False
    shutil.copytree(peers.GOLDEN / "bert" / "pfeiffer", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "adapter_config.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    del tree["config"]["non_linearity"]
    path.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(FileError) as error:
        read_adapters(tmp_path / "checkpoint")
    assert error.value.offenders == ("config.non_linearity: missing",)


def test_an_adapter_name_is_no_pattern():
    remaining = RemainingTensors("o.n", {"a.loras.own.lora_A": torch.ones(1)})
    assert remaining.take("loras") == []


def test_another_model_type_and_a_pickle_are_refused():
    info = adapters_checkpoint_info(peers.GOLDEN / "bert" / "houlsby")
    assert (info.backbone, info.task, info.outputs) == ("backbone", "classification", 3)
    with pytest.raises(FileError, match="pickle"):
        ah.load(backbone("bert"), peers.GOLDEN / "bert" / "pickle", any_backbone=True, head=False)
    with pytest.raises(MismatchError, match="bert"):
        imported(backbone("roberta"), "bert", "pfeiffer", head=False)


@pytest.mark.parametrize(("architecture", "case"), sorted(peers.DECODING))
def test_a_sequence_gate_in_a_generating_decoder_is_refused(architecture, case):
    generates = "AutoModelForCausalLM" if architecture == "gpt2" else "AutoModelForSeq2SeqLM"
    model = backbone(architecture, generates)
    keys = list(model.state_dict())
    with pytest.raises(MismatchError, match="includes later tokens") as error:
        imported(model, architecture, case, head=False)
    gates = [line for line in error.value.offenders if line.startswith("use_gating")]
    assert gates
    assert all(": decoder." in line for line in gates)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize(("architecture", "case"), sorted(peers.UNEVEN))
def test_a_prefix_in_some_layers_of_t5_is_refused(architecture, case):
    with pytest.raises(MismatchError, match="relative positions"):
        imported(backbone(architecture), architecture, case, head=False)


LANGUAGE_MODELS = {
    "bert": ("AutoModelForMaskedLM", "BertForMaskedLM"),
    "roberta": ("AutoModelForMaskedLM", "RobertaForMaskedLM"),
    "gpt2": ("AutoModelForCausalLM", "GPT2LMHeadModel"),
    "llama": ("AutoModelForCausalLM", "LlamaForCausalLM"),
    "t5": ("AutoModelForSeq2SeqLM", "T5ForConditionalGeneration"),
    "bart": ("AutoModelForSeq2SeqLM", "BartForConditionalGeneration"),
}


@long_table(
    ("architecture", "base"), itertools.product(LANGUAGE_MODELS, (False, True)), 3, nightly=2
)
def test_the_class_of_the_files_decides_whether_the_change_is_undone(architecture, base, tmp_path):
    """`adapters` undoes it in its own classes; in those of transformers the head reads it."""
    auto, name = LANGUAGE_MODELS[architecture]
    name = name.partition("For")[0].partition("LM")[0] + "Model" if base else name
    model, given = backbone(architecture, auto), inputs(architecture)
    found, head = [], model.get_output_embeddings()
    mask, expected = given["attention_mask"].bool(), peers.EXPECTED[architecture]["madx.hidden"]
    for cls in (name, f"{name.partition('For')[0]}AdapterModel"):
        adapter = load(tmp_path / cls, architecture, "madx", model=model, model_class=cls)
        states = []
        hook = head.register_forward_hook(lambda m, x, y, kept=states: kept.append(x[0]))
        with torch.no_grad():
            found.append(model(**given).logits)
        hook.remove()
        assert adapter.methods[0].undone is (cls != name)
        if architecture not in ("bert", "roberta"):  # their heads have more layers
            scale = model.config.d_model**-0.5 if architecture == "t5" else 1.0
            equal = torch.allclose(states[0][mask], expected[mask] * scale, atol=1e-5)
            assert equal is (cls == name)
        adapter.save(tmp_path / f"{cls}-own")
        adapter.detach()
        adapter = ah.load(model, tmp_path / f"{cls}-own")
        with torch.no_grad():
            assert torch.equal(model(**given).logits, found[-1])
        adapter.detach()
    assert (found[0] - found[1]).abs().max() > 0.05


def test_older_files_are_undone_in_every_class(tmp_path):
    model = backbone("gpt2", "AutoModelForCausalLM")
    cls = {"model_class": "GPT2LMHeadModel", "version": "3.2.1"}
    assert load(tmp_path, "gpt2", "madx", model=model, **cls).methods[0].undone
