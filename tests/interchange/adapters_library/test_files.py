"""Options and tensors of `adapters` checkpoints are read strictly."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import FileError
from adapterhub.interchange.adapters_library.files import read_adapters
from tests.kit.peers import GOLDEN, backbone

# Imports warn about what they cannot carry over unchanged.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_code_in_a_pickle_is_not_run(tmp_path):
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


def test_a_pickle_is_opened_only_on_request():
    model, folder = backbone("bert"), GOLDEN / "bert" / "pickle"
    with pytest.raises(FileError, match="pickle"):
        ah.load(model, folder, any_backbone=True, head=False)


def test_every_unsupported_option_is_named(altered):
    tree, _, load = altered
    tree["config"] |= {"ln_after": True, "inv_adapter": "glow", "new": 3}
    with pytest.raises(FileError) as error:
        load()
    named = {line.partition(":")[0].rpartition(".")[2] for line in error.value.offenders}
    assert named == {"ln_after", "inv_adapter", "new"}


def test_options_have_defaults_and_missing_ones_are_named(tmp_path):
    files = read_adapters(GOLDEN / "bert" / "pfeiffer", head=False)
    (part,) = files.parts
    assert (part.kind, part.options["phm_dim"], part.options["is_parallel"]) == (
        "bottleneck",
        4,
        False,
    )
    shutil.copytree(GOLDEN / "bert" / "pfeiffer", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "adapter_config.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    del tree["config"]["non_linearity"]
    path.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(FileError) as error:
        read_adapters(tmp_path / "checkpoint")
    assert error.value.offenders == ("config.non_linearity: missing",)
