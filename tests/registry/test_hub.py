"""The Hub through its real client: access, interrupted downloads, races and the cache."""

from dataclasses import replace

import pytest
from huggingface_hub import constants

from adapterhub.errors import FileError, RegistryError
from adapterhub.files.native import Saved
from adapterhub.registry.hub import HubStore
from adapterhub.registry.pull import pull
from adapterhub.registry.store import Publication, Query
from tests.kit import registries


def store(hub, token=False):
    return HubStore(hub.address, token=token)


@pytest.fixture
def published(hub, tmp_path):
    folder = registries.write_sample(tmp_path / "made", accuracy=0.9, card="# Polite\n\nMine.\n")
    return store(hub).put(folder, Publication("acme/polite"))


def test_a_publication_is_one_commit_and_a_tag_and_a_search_one_request(hub, published):
    repository = hub.repositories["acme/polite"]
    assert len(repository.commits) == 2
    oid, files = repository.commits[-1]
    assert {"adapter.json", "adapter.safetensors", "README.md"} <= files.keys()
    assert repository.tags == {"v1": oid}
    assert published.reference == f"{hub.address}/acme/polite@v1"
    hub.requests.clear()
    (found,) = store(hub).search(Query(backbone=registries.SAMPLE_BACKBONE, metric="accuracy"))
    assert found == published
    assert hub.requests == ["GET /api/models"]
    assert store(hub).search(Query(backbone="other/gpt")) == []


def test_access_rights(hub, tmp_path):
    hub.tokens = {"reader": "read", "writer": "write"}
    folder = registries.write_sample(tmp_path / "made")
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


def test_altered_bytes_and_a_moved_version_tag_are_refused(hub, published, tmp_path):
    repository = hub.repositories["acme/polite"]
    files = repository.commits[-1][1]
    kept = files["adapter.safetensors"]
    files["adapter.safetensors"] = kept[:-1] + bytes([kept[-1] ^ 1])
    with pytest.raises(FileError):
        store(hub).get(published, tmp_path / "mine")
    files["adapter.safetensors"] = kept
    registries.write_sample(tmp_path / "other", seed=5)
    other = {p.name: p.read_bytes() for p in (tmp_path / "other").iterdir()}
    repository.tags["v1"] = repository.commit(other)
    with pytest.raises(FileError, match="not what was published"):
        store(hub).get(published, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_of_two_concurrent_writers_one_is_refused(hub, published, tmp_path):
    mine = registries.write_sample(tmp_path / "mine", seed=1)
    theirs = registries.write_sample(tmp_path / "theirs", seed=2)
    hub.before_commit = lambda: store(hub).put(theirs, Publication("acme/polite"))
    with pytest.raises(RegistryError, match="try again"):
        store(hub).put(mine, Publication("acme/polite"))
    assert store(hub).put(mine, Publication("acme/polite")).version == "v3"
    assert [entry.version for entry in store(hub).versions("acme/polite")] == ["v1", "v2", "v3"]


def test_offline_the_cache_is_used(hub, published, tmp_path, monkeypatch, capfd):
    pull(published.reference)
    assert f"Fetching {published.reference}" in capfd.readouterr().err  # its progress
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert store(hub).resolve("acme/polite").digest == published.digest
    again = store(hub).put(tmp_path / "made", Publication("acme/polite", tags=("best",)))
    assert again.tags == ("best",)
    store(hub).get(again)
    store(hub).yank(again, "wrong")
    store(hub).resolve("acme/polite", "v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for version in ("v1", "best"):
        entry = store(hub).resolve("acme/polite", version)
        assert (entry.version, entry.yanked, entry.digest) == ("v1", "wrong", published.digest)
        assert Saved.at(store(hub).get(entry)).read()
    assert [entry.version for entry in store(hub).versions("acme/polite")] == ["v1"]
    with pytest.raises(RegistryError, match="cannot be reached"):
        store(hub).resolve("acme/other")


def test_a_damaged_copy_in_the_cache_is_downloaded_again(hub, published):
    cached = store(hub).get(published)
    for file in ("adapter.json", "adapter.safetensors"):
        data = bytearray((cached / file).read_bytes())
        data[-2] ^= 1
        (cached / file).write_bytes(data)
        assert Saved.at(store(hub).get(published)).read()
    hub.requests.clear()
    store(hub).get(published)
    assert hub.requests == []


def test_another_librarys_adapter_is_pinned_to_its_commit_and_none_is_an_error(hub):
    files = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": b"1"}
    hub.add("acme/text", {"README.md": b"x"})
    with pytest.raises(FileError, match="holds no adapter"):
        store(hub).resolve("acme/text")
    repository = hub.add("acme/theirs", files)
    repository.tags["v1"] = commit = repository.commits[-1][0]
    for version in (None, "v1", commit):
        entry = store(hub).resolve("acme/theirs", version)
        assert entry.version == commit
    assert store(hub).get(entry)
    for forged in (replace(entry, version="v1"), replace(entry, digest="0" * 64)):
        with pytest.raises(FileError, match="not pinned"):
            store(hub).get(forged)
