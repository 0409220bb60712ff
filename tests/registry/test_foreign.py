"""Adapters of other libraries on the Hub: pulled without pickles, loaded with equal outputs."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModel

import adapterhub as ah
from adapterhub.errors import FileError
from adapterhub.files.native import Saved
from adapterhub.registry.foreign import entry_of_foreign
from adapterhub.registry.hub import HubStore
from tests.kit import tiny_models

GOLDEN = Path(__file__).parents[1] / "golden" / "adapters" / "bert"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def upload(hub, folder, name, **more):
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    hub.add(name, files | more)
    return f"{hub.address}/{name}"


def test_a_peft_adapter_has_equal_logits(hub, tmp_path):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "dora")
    tiny_models.scramble(adapter)
    with torch.no_grad():
        expected = model(**tiny_models.batch()).logits
    adapter.export(tmp_path / "theirs")
    again = tiny_models.model("bert")
    ah.load(again, upload(hub, tmp_path / "theirs", "acme/theirs"))
    with torch.no_grad():
        torch.testing.assert_close(again(**tiny_models.batch()).logits, expected)


def test_an_adapter_of_the_adapters_library_has_equal_outputs(hub):
    reference = upload(
        hub, GOLDEN / "parallel", "acme/theirs", **{"pytorch_adapter.bin": b"\x80\x04."}
    )
    model = AutoModel.from_pretrained(GOLDEN / "backbone", attn_implementation="eager").eval()
    ah.load(model, reference, any_backbone=True, head=False)
    expected = load_file(GOLDEN / "expected.safetensors")
    inputs = {name: t for name, t in expected.items() if "." not in name}
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        hidden = model(**inputs)[0][mask]
    torch.testing.assert_close(hidden, expected["parallel.hidden"][mask], atol=1e-5, rtol=1e-5)


def test_the_revision_of_an_adapter_is_not_that_of_its_backbone(hub, tmp_path, monkeypatch):
    """`@v1` is a version of the adapter; the manifest records the commit of the backbone."""
    # A push looks for the backbone on the Hub: here on this one, which has none, instead of trying
    # to reach huggingface.co again and again.
    template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
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
    assert Saved.at(first).manifest.backbone.revision == "ab" * 20
    saved, adapter = load_file(first / "adapter.safetensors"), ah.load(model, f"{reference}@v1")
    assert all(torch.equal(adapter.tensors()[name], tensor) for name, tensor in saved.items())
    newest = load_file(tmp_path / "2" / "adapter.safetensors")
    assert not all(torch.equal(newest[name], tensor) for name, tensor in saved.items())


def test_only_the_files_that_the_importer_reads_are_pulled(hub, tmp_path):
    config = {"peft_type": "LORA", "base_model_name_or_path": "acme/bert", "r": 8}
    files = {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": safetensors.torch.save({"a": torch.ones(1)}),
    }
    repository = hub.add("acme/lora", {**files, "adapter_model.bin": b"x", "setup.py": b""})
    store = HubStore(hub.address, token=False)
    entry = store.resolve("acme/lora")
    assert (entry.backbone, entry.methods, entry.fingerprint) == ("acme/bert", ("lora",), "")
    assert entry.version == repository.commits[-1][0]
    folder = store.get(entry, tmp_path / "mine")
    assert {p.name for p in folder.iterdir()} == files.keys()
    assert store.get(store.resolve("acme/lora", entry.version)).is_dir()


def test_allow_pickle_pulls_a_pickle(hub, tmp_path):
    files = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.bin": b"x" * 9}
    hub.add("acme/old", files | {"setup.py": b"", "training_args.bin": b"y"})
    for place in (tmp_path / "mine", None):  # a copy, and the cache
        hub.requests.clear()
        with pytest.raises(FileError, match="--allow-pickle"):
            ah.pull(f"{hub.address}/acme/old", place)
        assert not [line for line in hub.requests if line.startswith("GET") and ".bin" in line]
        folder = ah.pull(f"{hub.address}/acme/old", place, allow_pickle=True)
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == files
    with pytest.raises(FileError, match="--allow-pickle"):
        ah.pull(f"{hub.address}/acme/old")


def test_the_entry_of_another_library_names_method_and_backbone():
    place = {"reference": "hf:a/b@x", "name": "a/b", "version": "x"}
    data = b'{"config": {"architecture": "prefix_tuning"}, "model_name": "acme/bert"}'
    entry = entry_of_foreign(data, **place)
    assert (entry.methods, entry.backbone) == (("prefix_tuning",), "acme/bert")
    assert entry.fingerprint == ""
    for broken in (b"", b"[]", b'{"peft_type": "LORA"'):
        with pytest.raises(FileError, match=r"adapter_config.json of hf:a/b@x cannot be read"):
            entry_of_foreign(broken, **place)
