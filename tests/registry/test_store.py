"""The conformance suite: what holds for every store, whatever it is made of."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import hub_server
import pytest
import sample_adapters
from memory_store import MemoryStore

from adapterhub.errors import AdapterhubError, FileError, OutputError, RegistryError
from adapterhub.files.native import read_adapter
from adapterhub.registry import local_versions as name_folder
from adapterhub.registry.hub import HubStore
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.local_versions import digest_of
from adapterhub.registry.store import Publication, Query


class OwnersHub(HubStore):
    """The hub as its one owner sees it: names without the owner."""

    def _own_name(self, name):
        return name if "/" in name else f"acme/{name}"

    def resolve(self, name, version=None, **options):
        return super().resolve(self._own_name(name), version, **options)

    def versions(self, name, **options):
        return super().versions(self._own_name(name), **options)

    def put(self, folder, publication):
        return super().put(folder, replace(publication, name=self._own_name(publication.name)))


@contextmanager
def on_hub(folder):
    with hub_server.serving() as (hub, address):
        store = OwnersHub(address, token=False)
        store.hub = hub
        yield store


STORES = {
    "memory": lambda folder: nullcontext(MemoryStore(folder)),
    "local": lambda folder: nullcontext(LocalRegistry(folder)),
    "hub": on_hub,
}


@pytest.fixture(params=sorted(STORES))
def store(request, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with STORES[request.param](tmp_path / "store") as store:
        yield store


def plain(entry):
    """The name of an entry without its owner."""
    return entry.name.removeprefix("acme/")


@pytest.fixture
def publish(store, tmp_path):
    """Write an adapter and publish it."""

    def publish(name="polite", seed=0, version=None, tags=(), **options):
        folder = tmp_path / f"made-{name}-{seed}-{len(options)}-{options.get('backbone', 'x')[:4]}"
        if not folder.exists():
            sample_adapters.write(folder, seed, **options)
        return store.put(folder, Publication(name, version, tags))

    return publish


def test_what_is_published_can_be_had(store, publish, tmp_path):
    entry = publish(accuracy=0.9)
    assert entry.reference.endswith("polite@v1")
    assert (plain(entry), entry.version, entry.yanked) == ("polite", "v1", None)
    assert (entry.backbone, entry.methods, entry.task) == (
        sample_adapters.BACKBONE, ("lora",), "classification",
    )  # fmt: skip
    assert entry.metrics == {"accuracy": 0.9}
    assert entry.parameters == 8
    assert entry.size > 0
    got = store.get(store.resolve("polite"), tmp_path / "mine")
    assert got == tmp_path / "mine"
    manifest, tensors = read_adapter(got)
    assert manifest.metrics == {"accuracy": 0.9}
    assert tensors["encoder.0.attn.q.lora.a"].shape == (2, 4)
    read_adapter(store.get(entry))


def test_the_same_bytes_are_the_same_version(publish):
    assert publish() == publish()
    assert publish(seed=1).version == "v2"
    assert publish().version == "v1"


def test_a_version_never_changes(store, publish):
    first = publish(seed=0, version="v1")
    with pytest.raises(RegistryError):
        publish(seed=1, version="v1")
    assert store.resolve("polite").digest == first.digest


def test_versions_are_listed_oldest_first(store, publish):
    published = [publish(seed=seed).version for seed in range(11)]
    assert [entry.version for entry in store.versions("polite")] == published
    assert store.resolve("polite").version == "v11"
    assert store.resolve("polite", "v2").version == "v2"


def test_a_tag_names_a_version(store, publish):
    publish(seed=0, tags=("best",))
    publish(seed=1)
    assert store.resolve("polite", "best").version == "v1"
    assert store.resolve("polite").version == "v2"


def test_yanked_versions_are_had_by_number_only(store, publish):
    publish(seed=0)
    second = publish(seed=1)
    store.yank(second, "trained on the dev set")
    assert store.resolve("polite").version == "v1"
    assert [entry.version for entry in store.search(Query())] == ["v1"]
    pinned = store.resolve("polite", "v2")
    assert pinned.yanked == "trained on the dev set"
    read_adapter(store.get(pinned))
    store.yank(store.resolve("polite"), "too")
    with pytest.raises(RegistryError, match="yanked"):
        store.resolve("polite")


def test_backbones_are_apart(store, publish):
    fingerprint = f"bf16-{'1' * 64}"
    publish(seed=0)
    if isinstance(store, HubStore):  # a repository is of one backbone
        with pytest.raises(RegistryError, match="another name"):
            publish(seed=1, backbone="other/gpt", fingerprint=fingerprint)
        with pytest.raises(RegistryError, match="is not for other/gpt"):
            store.resolve("polite", backbone="other/gpt")
        return
    publish(seed=1, backbone="other/gpt", fingerprint=fingerprint)
    with pytest.raises(RegistryError, match="several backbones"):
        store.resolve("polite")
    assert store.resolve("polite", backbone="other/gpt").version == "v1"
    assert store.resolve("polite", backbone=fingerprint).backbone == "other/gpt"
    with pytest.raises(RegistryError):
        store.resolve("polite", backbone="third/model")


def test_search_finds_by_each_field(store, publish):
    publish("a", seed=0, accuracy=0.7, tags=("english",))
    publish("b", seed=1, accuracy=0.9, method="pfeiffer")
    publish("c", seed=2, task="tagging", f1=0.5)
    publish("d", seed=3, backbone="other/gpt", fingerprint=f"bf16-{'1' * 64}")

    def found(**query):
        return [plain(entry) for entry in store.search(Query(**query))]

    assert found() == ["a", "b", "c", "d"]
    assert found(backbone=sample_adapters.BACKBONE) == ["a", "b", "c"]
    assert found(backbone=f"bf16-{'1' * 64}") == ["d"]
    assert found(task="tagging") == ["c"]
    assert found(method="pfeiffer") == ["b"]
    assert found(tags=("english",)) == ["a"]
    assert found(metric="accuracy") == ["a", "b"]
    assert found(sort="accuracy") == ["b", "a"]
    assert found(text="tagg") == ["c"]
    assert found(text="pfeiffer classification") == ["b"]
    assert found(text="nothing") == []
    assert found(limit=2) == ["a", "b"]


def test_search_shows_the_newest_unless_asked(store, publish):
    publish(seed=0)
    publish(seed=1)
    assert [entry.version for entry in store.search(Query())] == ["v2"]
    assert len(store.search(Query(all_versions=True))) == 2


def test_what_is_not_there_is_an_error(store, publish):
    with pytest.raises(RegistryError):
        store.resolve("polite")
    entry = publish()
    with pytest.raises(RegistryError):
        store.resolve("polite", "v9")
    with pytest.raises(AdapterhubError):
        store.get(replace(entry, digest="0" * 64))
    assert store.search(Query(task="none")) == []


def test_what_is_no_adapter_is_not_published(store, publish, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError):
        store.put(tmp_path / "empty", Publication("polite"))
    broken = sample_adapters.write(tmp_path / "broken")
    with open(broken / "adapter.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(FileError):
        store.put(broken, Publication("polite"))
    with pytest.raises(RegistryError):
        store.versions("polite")


def test_a_copy_replaces_nothing(store, publish, tmp_path):
    entry = publish()
    (tmp_path / "mine").mkdir()
    with pytest.raises(OutputError):
        store.get(entry, tmp_path / "mine")


def refuse_writers(store):
    """Let a store refuse its writers, each in its own way; what makes it take them again."""
    if isinstance(store, HubStore):
        store.hub.tokens = {"somebody else's": "write"}
        return lambda: store.hub.tokens.clear()
    if isinstance(store, MemoryStore):
        store.read_only = True
        return lambda: setattr(store, "read_only", False)
    store.root.write_text("no folder")
    return store.root.unlink


def test_a_writer_who_is_refused_leaves_nothing(store, publish):
    allow = refuse_writers(store)
    with pytest.raises(AdapterhubError):
        publish()
    allow()
    assert store.search(Query()) == []
    assert publish().version == "v1"


def break_next_get(store, monkeypatch):
    """Let the next download break off in the middle."""
    if isinstance(store, HubStore):
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        store.hub.cut_after = 40
        return
    write, calls = name_folder.write_files, []

    def broken(staged, payload):
        calls.append(staged)
        if len(calls) == 1:
            write(staged, dict(list(payload.items())[:1]))
            raise OSError(5, "Input/output error")
        write(staged, payload)

    monkeypatch.setattr(name_folder, "write_files", broken)


def test_a_get_that_broke_off_left_nothing_and_the_next_is_whole(
    store, publish, tmp_path, monkeypatch
):
    entry = publish()
    break_next_get(store, monkeypatch)
    target = tmp_path / "got" / "mine"
    try:
        store.get(entry, target)
    except AdapterhubError:
        assert not target.exists()
        assert list(target.parent.iterdir()) == []
        store.get(entry, target)
    read_adapter(target)
    assert sorted(p.name for p in target.parent.iterdir()) == ["mine"]


def test_of_many_writers_at_once_none_is_lost(store, publish, tmp_path):
    folders = [sample_adapters.write(tmp_path / f"at-once-{seed}", seed) for seed in range(4)]

    def put(folder):
        for _ in range(50):  # a writer who was too late is told to try again
            try:
                return store.put(folder, Publication("polite"))
            except RegistryError as error:
                if "another writer" not in str(error):
                    raise
        raise AssertionError("fifty times too late")

    with ThreadPoolExecutor(4) as pool:
        entries = list(pool.map(put, folders))
    assert sorted(entry.version for entry in entries) == ["v1", "v2", "v3", "v4"]
    for entry, folder in zip(entries, folders, strict=True):
        assert store.resolve("polite", entry.version).digest == digest_of(folder) == entry.digest
