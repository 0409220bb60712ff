"""The Hub through its real client: access, broken downloads, races, cards, other libraries."""

from __future__ import annotations

import json
from pathlib import Path

import hub_server
import pytest
import safetensors.torch
import sample_adapters
import torch
from huggingface_hub import constants
from transformers import AutoModel

import adapterhub as ah
from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.files.native import read_adapter
from adapterhub.registry.hub import HubStore
from adapterhub.registry.pull import pull
from adapterhub.registry.push import push
from adapterhub.registry.secrets import refuse_leaks
from adapterhub.registry.store import Publication, Query


def store(hub, token=False):
    return HubStore(hub.address, token=token)


@pytest.fixture
def published(hub, tmp_path):
    folder = sample_adapters.write(tmp_path / "made", accuracy=0.9, card="# Polite\n\nMine.\n")
    return store(hub).put(folder, Publication("acme/polite"))


def test_a_publication_is_one_commit_and_a_tag(hub, published):
    repository = hub.repositories["acme/polite"]
    assert len(repository.commits) == 2
    oid, files = repository.commits[-1]
    assert {"adapter.json", "adapter.safetensors", "README.md"} <= files.keys()
    assert repository.tags == {"v1": oid}
    assert published.reference == f"{hub.address}/acme/polite@v1"


def test_the_card_is_the_writers_with_what_the_hub_reads(hub, published):
    text = hub.repositories["acme/polite"].commits[-1][1]["README.md"].decode()
    data = hub_server.card_data({"README.md": text.encode()})
    assert "# Polite\n\nMine." in text
    assert data["base_model"] == sample_adapters.BACKBONE
    assert data["base_model_relation"] == "adapter"
    assert data["library_name"] == "adapterhub"
    assert {"adapterhub", "lora"} <= set(data["tags"])
    (result,) = data["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "accuracy", "value": 0.9}]
    assert data["adapterhub"]["digest"] == published.digest


def test_one_search_is_one_request(hub, published):
    hub.requests.clear()
    (found,) = store(hub).search(Query(backbone=sample_adapters.BACKBONE, metric="accuracy"))
    assert found == published
    assert hub.requests == ["GET /api/models"]
    assert store(hub).search(Query(backbone="other/gpt")) == []


def test_who_may_what(hub, tmp_path):
    hub.tokens = {"reader": "read", "writer": "write"}
    folder = sample_adapters.write(tmp_path / "made")
    for token, words in ((False, "log"), ("reader", "permission"), ("wrong", "log")):
        with pytest.raises(RegistryError) as caught:
            store(hub, token).put(folder, Publication("acme/polite"))
        assert words in str(caught.value)
    assert hub.repositories == {}
    store(hub, "writer").put(folder, Publication("acme/polite", visibility="private"))
    with pytest.raises(RegistryError, match="you have no access"):
        store(hub).resolve("acme/polite")
    assert store(hub).search(Query()) == []
    assert store(hub, "reader").resolve("acme/polite").version == "v1"


def test_a_broken_download_goes_on(hub, published, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    store(hub).resolve("acme/polite")
    hub.cut_after = 40
    read_adapter(store(hub).get(published, tmp_path / "mine"))
    assert hub.cut_after is None


def test_what_had_come_is_not_fetched_again(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    numbers = safetensors.torch.save({"a": torch.arange(3 << 20, dtype=torch.float32)})
    repository = hub_server.Repository()
    config = b'{"peft_type": "LORA"}'
    repository.commit({"adapter_config.json": config, "adapter_model.safetensors": numbers})
    hub.repositories["acme/large"] = repository
    entry = store(hub).resolve("acme/large")
    hub.cut_after = 11 << 20
    folder = store(hub).get(entry, tmp_path / "mine")
    assert (folder / "adapter_model.safetensors").read_bytes() == numbers
    (start,) = hub.resumed_at
    assert 0 < start <= 11 << 20


def test_bytes_that_changed_on_the_way_are_refused(hub, published, tmp_path):
    files = hub.repositories["acme/polite"].commits[-1][1]
    data = bytearray(files["adapter.safetensors"])
    data[-1] ^= 1
    files["adapter.safetensors"] = bytes(data)
    with pytest.raises(FileError):
        store(hub).get(published, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_a_tag_that_was_moved_is_seen(hub, published, tmp_path):
    sample_adapters.write(tmp_path / "other", seed=5)
    other = {p.name: p.read_bytes() for p in (tmp_path / "other").iterdir()}
    repository = hub.repositories["acme/polite"]
    repository.tags["v1"] = repository.commit(other)
    with pytest.raises(FileError, match="not what was published"):
        store(hub).get(published, tmp_path / "mine")


def test_of_two_writers_one_wins(hub, published, tmp_path):
    mine = sample_adapters.write(tmp_path / "mine", seed=1)
    theirs = sample_adapters.write(tmp_path / "theirs", seed=2)
    hub.before_commit = lambda: store(hub).put(theirs, Publication("acme/polite"))
    with pytest.raises(RegistryError, match="try again"):
        store(hub).put(mine, Publication("acme/polite"))
    assert store(hub).put(mine, Publication("acme/polite")).version == "v3"
    assert [entry.version for entry in store(hub).versions("acme/polite")] == ["v1", "v2", "v3"]


def test_without_network_the_cache_serves(hub, published, tmp_path, monkeypatch):
    pull(published.reference)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = store(hub)
    for version in ("v1", None):
        entry = offline.resolve("acme/polite", version)
        assert entry.digest == published.digest
        read_adapter(offline.get(entry))
    with pytest.raises(RegistryError, match="cannot be reached"):
        offline.resolve("acme/other")


def test_a_hub_that_is_not_there_is_an_error():
    with pytest.raises(RegistryError, match="cannot be reached"):
        HubStore("http://127.0.0.1:9", token=False).search(Query())


def test_other_libraries_adapters_are_pulled_without_pickles(hub, tmp_path):
    config = {"peft_type": "LORA", "base_model_name_or_path": "acme/bert", "r": 8}
    repository = hub_server.Repository()
    repository.commit(
        {
            "adapter_config.json": json.dumps(config).encode(),
            "adapter_model.safetensors": safetensors.torch.save({"a": torch.ones(1)}),
            "adapter_model.bin": b"\x80\x04.",
            "setup.py": b"",
        }
    )
    hub.repositories["acme/lora"] = repository
    entry = store(hub).resolve("acme/lora")
    assert (entry.backbone, entry.methods, entry.fingerprint) == ("acme/bert", ("lora",), "")
    assert entry.version == repository.commits[-1][0]
    folder = store(hub).get(entry, tmp_path / "mine")
    assert {p.name for p in folder.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    assert store(hub).get(store(hub).resolve("acme/lora", entry.version)).is_dir()


INPUTS = {"input_ids": torch.tensor([[2, 3, 4, 5]])}
GOLDEN = Path(__file__).parents[1] / "golden" / "adapters" / "bert"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_of_adapters_is_pulled_and_loaded(hub, tmp_path):
    folder = next(p.parent for p in sorted(GOLDEN.glob("*/adapter.safetensors")))
    repository = hub_server.Repository()
    repository.commit({p.name: p.read_bytes() for p in folder.iterdir()})
    hub.repositories["acme/houlsby"] = repository
    model = AutoModel.from_pretrained(GOLDEN / "backbone", attn_implementation="eager").eval()
    bare = model(**INPUTS).last_hidden_state
    adapter = ah.load(model, f"{hub.address}/acme/houlsby", any_backbone=True, head=False)
    found = model(**INPUTS).last_hidden_state
    adapter.detach()
    ah.load(model, folder, any_backbone=True, head=False)
    assert found.equal(model(**INPUTS).last_hidden_state)
    assert not found.equal(bare)


def test_pickles_come_when_they_are_asked_for(hub, tmp_path):
    repository = hub_server.Repository()
    files = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.bin": b"x" * 9}
    repository.commit(files | {"setup.py": b"", "training_args.bin": b"y"})
    hub.repositories["acme/old"] = repository
    with pytest.raises(FileError, match="--allow-pickle"):
        pull(f"{hub.address}/acme/old", tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
    folder = pull(f"{hub.address}/acme/old", tmp_path / "mine", allow_pickle=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == files


def test_a_repository_without_an_adapter_is_an_error(hub):
    hub.repositories["acme/text"] = hub_server.Repository()
    hub.repositories["acme/text"].commit({"README.md": b"x"})
    with pytest.raises(FileError, match="holds no adapter"):
        store(hub).resolve("acme/text")


def test_a_download_shows_its_progress(hub, published, capfd):
    pull(published.reference)
    assert "Fetching 3 files" in capfd.readouterr().err


def test_push_and_pull_by_reference(hub, tmp_path):
    folder = sample_adapters.write(tmp_path / "made")
    entry = push(folder, f"{hub.address}/acme/polite", tags=("best",))
    assert entry.tags == ("best",)
    assert pull(f"{hub.address}/acme/polite@best", tmp_path / "mine") == tmp_path / "mine"
    with pytest.raises(ConfigError, match="hf:owner/name"):
        push(folder, "polite")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("see /home/someone/data", "absolute path"),
        ("C:\\Users\\someone", "absolute path"),
        ("token hf_" + "a" * 34, "Hugging Face token"),
        ("sk-" + "a" * 24, "OpenAI key"),
        ("-----BEGIN RSA PRIVATE KEY-----", "private key"),
        ("https://me:secret@h.org", "password"),
    ],
)
def test_what_must_not_leave_is_caught_before_upload(hub, tmp_path, text, what):
    folder = sample_adapters.write(tmp_path / "made", card=f"# Polite\n\n{text}\n")
    with pytest.raises(FileError) as caught:
        store(hub).put(folder, Publication("acme/polite"))
    assert what in str(caught.value)
    assert "secret" not in str(caught.value).replace("secrets", "")
    assert hub.requests == []


def test_plain_text_is_no_leak():
    refuse_leaks({"README.md": b"and/or 1/2, https://example.org/a/b, 10 km/h, `a/b`, 3.5/5"})
