"""Gated parts become one unipelt; in models that generate they are refused."""

from __future__ import annotations

import json
import shutil

import pytest

import adapterhub as ah
from adapterhub.errors import MismatchError
from tests.kit.peers import DECODING, GOLDEN, backbone, imported

# Imports warn about what they cannot carry over unchanged.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize(("architecture", "case"), sorted(DECODING))
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
