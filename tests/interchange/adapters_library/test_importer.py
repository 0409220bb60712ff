"""Checkpoints of `adapters` compute the same here as in the library."""

from __future__ import annotations

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import MismatchError
from adapterhub.interchange.adapters_library.importer import adapters_checkpoint_info
from tests.kit.peers import CASES, COMPARED, EXPECTED, GOLDEN, backbone, hidden, imported, inputs
from tests.kit.selection import long_table

# Imports warn about what they cannot carry over unchanged.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_the_golden_files_cover_the_methods_and_backbones():
    assert {"bert", "roberta", "gpt2", "t5", "bart"} <= EXPECTED.keys()
    cases = {case for architecture, case in CASES if architecture == "bert"}
    expected = {"houlsby", "pfeiffer", "parallel", "mam", "prefix", "lora", "ia3", "compacter"}
    assert cases >= expected | {"unipelt", "unipelt-parts", "gated-lora"}
    for architecture, case in CASES:
        assert f"{case}.hidden" in EXPECTED[architecture]


@long_table(("architecture", "case"), COMPARED, 4)
def test_equal_hidden_states(architecture, case, tmp_path):
    """Compare after the import and after saving and loading our own files."""
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


def test_the_methods_and_their_options():
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


def test_every_unexpected_or_missing_tensor_is_named(altered):
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


def test_the_checkpoint_info_names_what_to_load():
    info = adapters_checkpoint_info(GOLDEN / "bert" / "houlsby")
    assert (info.backbone, info.task, info.outputs) == ("backbone", "classification", 3)


def test_another_model_type_is_refused():
    with pytest.raises(MismatchError, match="bert"):
        imported(backbone("roberta"), "bert", "pfeiffer", head=False)
