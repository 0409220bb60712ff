"""Invertible adapters and ReFT of `adapters`."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from adapters_golden import GOLDEN, backbone, imported
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.errors import MismatchError

# Imports warn about what they cannot carry over unchanged.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def load(folder, architecture, case, options=(), without=None, move=("", "")):
    """Load a checkpoint with other options, without some tensors, or with some at another place."""
    shutil.copytree(GOLDEN / architecture / case, folder / case)
    path = folder / case / "adapter_config.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    tree["config"] |= dict(options)
    path.write_text(json.dumps(tree), encoding="utf-8")
    tensors = load_file(folder / case / "adapter.safetensors")
    kept = {n.replace(*move): t for n, t in tensors.items() if not without or without not in n}
    save_file(kept, folder / case / "adapter.safetensors")
    return ah.load(backbone(architecture), folder / case, any_backbone=True, head=False)


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
