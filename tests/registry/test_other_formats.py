"""Checkpoints of other libraries in repositories of the Hub: loaded by name, with equal logits."""

from __future__ import annotations

from pathlib import Path

import hub_server
import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from transformers import AutoModel

import adapterhub as ah
from adapterhub.errors import FileError
from adapterhub.files.native import read_manifest

GOLDEN = Path(__file__).parents[1] / "golden" / "adapters" / "bert"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def upload(hub, folder, name, **more):
    repository = hub_server.Repository()
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    repository.commit(files | more)
    hub.repositories[name] = repository
    return f"{hub.address}/{name}"


@pytest.mark.parametrize("method", ["lora", "dora", "ia3", "norms"])
def test_of_peft(hub, tmp_path, method):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, method)
    tiny_models.scramble(adapter)
    with torch.no_grad():
        expected = model(**tiny_models.batch()).logits
    adapter.export(tmp_path / "theirs")
    again = tiny_models.model("bert")
    ah.load(again, upload(hub, tmp_path / "theirs", "acme/theirs"))
    with torch.no_grad():
        torch.testing.assert_close(again(**tiny_models.batch()).logits, expected)


@pytest.mark.parametrize("case", ["houlsby", "parallel", "lora", "ia3"])
def test_of_adapters(hub, case):
    reference = upload(hub, GOLDEN / case, "acme/theirs", **{"pytorch_adapter.bin": b"\x80\x04."})
    model = AutoModel.from_pretrained(GOLDEN / "backbone", attn_implementation="eager").eval()
    ah.load(model, reference, any_backbone=True, head=False)
    expected = load_file(GOLDEN / "expected.safetensors")
    given = {name: t for name, t in expected.items() if "." not in name}
    mask = given["attention_mask"].bool()
    with torch.no_grad():
        found = model(**given)[0][mask]
    torch.testing.assert_close(found, expected[f"{case}.hidden"][mask], atol=1e-5, rtol=1e-5)


def test_a_pickle_is_not_even_fetched(hub):
    reference = upload(hub, GOLDEN / "pickle", "acme/pickle")
    with pytest.raises(FileError, match="no safetensors") as error:
        ah.load(AutoModel.from_pretrained(GOLDEN / "backbone"), reference, any_backbone=True)
    assert "allow_pickle" in error.value.hint
    assert not [line for line in hub.requests if line.startswith("GET") and ".bin" in line]


def test_the_revision_of_the_adapter_is_not_that_of_its_base(hub, tmp_path):
    """`@v1` names a version of the adapter; the manifest keeps the commit of the base."""
    model = tiny_models.model("bert")
    model.config._name_or_path, model.config._commit_hash = "acme/bert", "ab" * 20
    reference = f"{hub.address}/acme/polite"
    for seed in (1, 2):
        adapter = ah.attach(model, "lora")
        tiny_models.scramble(adapter, seed=seed)
        adapter.save(tmp_path / str(seed))
        adapter.detach()
        assert ah.push(tmp_path / str(seed), reference).version == f"v{seed}"
    first = ah.pull(f"{reference}@v1", tmp_path / "first")
    assert read_manifest(first).backbone.revision == "ab" * 20
    held, found = load_file(first / "adapter.safetensors"), ah.load(model, f"{reference}@v1")
    assert all(torch.equal(found.tensors()[name], tensor) for name, tensor in held.items())
    newest = load_file(tmp_path / "2" / "adapter.safetensors")
    assert not all(torch.equal(newest[name], tensor) for name, tensor in held.items())
