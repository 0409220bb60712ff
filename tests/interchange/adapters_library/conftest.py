"""A checkpoint of `adapters`, for tests that alter it."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

import adapterhub as ah
from tests.kit.peers import GOLDEN, backbone


@pytest.fixture
def altered(tmp_path):
    """Return a checkpoint's options and tensors, to alter, and a function that loads it."""
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
