"""Invertible adapters and ReFT of `adapters`."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.errors import MismatchError
from tests.kit.peers import EXPECTED, GOLDEN, backbone, imported, inputs

# Imports warn about what they cannot carry over unchanged.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def load(folder, architecture, case, options=(), without=None, move=("", ""), model=None, **tree_):
    """Load a checkpoint with other options, without some tensors, or with some at another place."""
    shutil.copytree(GOLDEN / architecture / case, folder / case)
    path = folder / case / "adapter_config.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    tree["config"] |= dict(options)
    tree |= tree_
    path.write_text(json.dumps(tree), encoding="utf-8")
    tensors = load_file(folder / case / "adapter.safetensors")
    kept = {n.replace(*move): t for n, t in tensors.items() if not without or without not in n}
    save_file(kept, folder / case / "adapter.safetensors")
    model = backbone(architecture) if model is None else model
    return ah.load(model, folder / case, any_backbone=True, head=False)


def test_the_methods_and_their_options():
    coupling, bottleneck = imported(backbone("bert"), "bert", "madx", head=False).methods
    assert (coupling.name, coupling.reduction, bottleneck.name) == ("invertible", 2, "pfeiffer")
    (method,) = imported(backbone("bert"), "bert", "loreft", head=False).methods
    assert (method.name, method.rank) == ("loreft", 2)
    assert (method.positions, method.shared) == ("f2+l1", False)
    (method,) = imported(backbone("t5"), "t5", "noreft", head=False).methods
    assert (method.name, method.positions, method.shared) == ("noreft", "f3+l2", True)
    assert method.sites == ("encoder.1.layer",)


def test_rows_are_orthonormal_as_they_are():
    adapter = imported(backbone("bert"), "bert", "loreft", head=False)
    for placed in adapter.placed:
        for edit in placed.module.children():
            torch.testing.assert_close(edit.P @ edit.P.T, torch.eye(2), atol=1e-5, rtol=0)


def test_direft_is_told_by_an_option(tmp_path):
    adapter = load(tmp_path, "bert", "noreft", {"subtract_projection": False})
    assert adapter.methods[0].name == "direft"


def test_the_unit_of_no_token_is_left_out(tmp_path):
    adapter = load(tmp_path, "bert", "loreft", {"suffix_positions": 0})
    assert adapter.methods[0].positions == "f2"
    assert all(".first." in name for name in adapter.tensors())


def test_a_task_adapter_without_an_invertible_one(tmp_path):
    adapter = load(tmp_path, "bert", "madx", without="invertible_adapters")
    assert [method.name for method in adapter.methods] == ["pfeiffer"]


LANGUAGE_MODELS = {
    "bert": ("AutoModelForMaskedLM", "BertForMaskedLM"),
    "roberta": ("AutoModelForMaskedLM", "RobertaForMaskedLM"),
    "gpt2": ("AutoModelForCausalLM", "GPT2LMHeadModel"),
    "llama": ("AutoModelForCausalLM", "LlamaForCausalLM"),
    "t5": ("AutoModelForSeq2SeqLM", "T5ForConditionalGeneration"),
    "bart": ("AutoModelForSeq2SeqLM", "BartForConditionalGeneration"),
}


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("architecture", LANGUAGE_MODELS)
def test_the_class_of_the_files_decides_whether_the_change_is_undone(architecture, base, tmp_path):
    """`adapters` undoes it in its own classes; in those of transformers the head reads it."""
    auto, name = LANGUAGE_MODELS[architecture]
    name = name.partition("For")[0].partition("LM")[0] + "Model" if base else name
    model, given = backbone(architecture, auto), inputs(architecture)
    found, head = [], model.get_output_embeddings()
    mask, expected = given["attention_mask"].bool(), EXPECTED[architecture]["madx.hidden"]
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


REFUSED = {
    "another width": ("bert", "madx", {"inv_adapter_reduction_factor": 4}, "reduction_factor: 4"),
    "glow": ("bert", "madx", {"inv_adapter": "glow"}, "inv_adapter"),
    "no token": ("bert", "noreft", {"prefix_positions": 0, "suffix_positions": 0}, "nothing is"),
    "orthonormal": ("bert", "loreft", {"subtract_projection": False}, "orthogonality false"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_computed_otherwise_is_refused(tmp_path, case):
    architecture, checkpoint, options, reason = REFUSED[case]
    with pytest.raises(ah.AdapterhubError) as error:
        load(tmp_path, architecture, checkpoint, options)
    assert reason in str(error.value)


def test_the_last_tokens_of_a_decoder_behind_an_encoder_are_refused(tmp_path):
    with pytest.raises(MismatchError, match="suffix_positions"):
        load(tmp_path, "t5", "noreft", move=("encoder.block.1", "decoder.block.1"))
