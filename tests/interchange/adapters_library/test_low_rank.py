"""LoRA and (IA)^3 of `adapters`."""

from __future__ import annotations

import json
import shutil

import pytest

import adapterhub as ah
from adapterhub.errors import MismatchError
from tests.kit.peers import GOLDEN, backbone

# Imports warn about what they cannot carry over unchanged.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_lora_before_version_1_1_is_not_scaled(tmp_path):
    """Before version 1.1 of adapters LoRA was not scaled by alpha / r."""
    folder = tmp_path / "lora"
    shutil.copytree(GOLDEN / "bert" / "lora", folder)
    path = folder / "adapter_config.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    for version, alpha in (("adapters.1.0.1", 2), ("adapters.1.10.0", 4)):
        path.write_text(json.dumps(tree | {"version": version}), encoding="utf-8")
        adapter = ah.load(backbone("bert"), folder, any_backbone=True, head=False)
        assert (adapter.methods[0].rank, adapter.methods[0].alpha) == (2, alpha)


@pytest.mark.parametrize(
    ("case", "change", "reason"),
    [
        ("lora", {"attn_matrices": ["q"]}, "encoder.0.attn.v: has tensors"),
        ("lora", {"output_lora": True}, "the options name output_lora"),
        ("ia3", {"alpha": 2}, "only with r 1 and alpha 1"),
    ],
)
def test_options_and_tensors_must_agree(case, change, reason, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "bert" / case, folder)
    path = folder / "adapter_config.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    tree["config"] |= change
    path.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(MismatchError, match=reason):
        ah.load(backbone("bert"), folder, any_backbone=True, head=False)
