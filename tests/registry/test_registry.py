"""A registry, here in a bucket: what the conformance suite of all stores does not cover."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from adapterhub.errors import FileError, RegistryError
from adapterhub.files.native import Saved
from adapterhub.registry import registry
from adapterhub.registry.bucket import Bucket
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Publication, Query
from adapterhub.registry.version_files import Names
from tests.kit import registries

objects = pytest.importorskip("obstore.store")
PATH = f"{registries.SAMPLE_BACKBONE.replace('/', '--')}/polite"


@pytest.fixture
def bucket():
    return Bucket("s3://bucket/p", objects.MemoryStore())


@pytest.fixture
def store(bucket):
    return Registry(bucket)


def test_damage_is_found_and_a_cached_copy_is_downloaded_again(store, bucket, made, tmp_path):
    for seed in (0, 1):
        publish(store, made(seed))
    entry = store.resolve("polite", "v1")
    cached = store.get(entry)
    assert store.get(entry) == cached
    (cached / "adapter.safetensors").write_bytes(b"altered")
    Saved.at(store.get(entry)).check()
    tensors = f"{PATH}/v1/adapter.safetensors"
    bucket.write(tensors, bucket.read(tensors, 1 << 20).data[:-1] + b"\x7f")
    with pytest.raises(FileError):
        store.get(entry, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
    assert len(store.verify()) == 1
    bucket.write(f"{PATH}/v1/adapter.json", b"{}")
    with pytest.warns(UserWarning, match="cannot be read and are left out"):
        assert [entry.version for entry in store.versions("polite")] == ["v2"]
    bucket.write(f"{PATH}/names.json", b"no JSON")
    with pytest.raises(FileError, match=r"names\.json cannot be read"):
        store.versions("polite")


@pytest.fixture
def made(tmp_path):
    def make(seed):
        folder = tmp_path / f"made-{seed}"
        return folder if folder.exists() else registries.write_sample(folder, seed)

    return make


def publish(store, folder, version=None):
    return store.put(folder, Publication("polite", version)).version


def test_racing_publishers_never_share_a_version(store, made):
    """Nor do two that ask for the same one."""

    def attempt(seed):
        try:
            return publish(store, made(seed), "v7" if seed >= 8 else None)
        except RegistryError as error:
            return error.problem

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(attempt, range(12)))
    versions = [text for text in found if text[1:].isdigit()]
    assert all("v7" in text for text in found if text not in versions)
    assert len({*versions}) == len(versions) >= 8
    entries = store.versions("polite")
    assert [entry.version for entry in entries] == sorted(versions, key=lambda v: int(v[1:]))
    assert len({entry.digest for entry in entries}) == len(versions)
    assert store.verify() == []


@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_interrupted_upload_is_no_version_and_its_number_is_not_used_again(
    after, store, bucket, made, monkeypatch
):
    write, written = bucket.write, []

    def cut(path, data):
        written.append(path)
        if len(written) == after:
            raise RegistryError("the network is gone")
        write(path, data)

    monkeypatch.setattr(bucket, "write", cut)
    with pytest.raises(RegistryError, match="the network is gone"):
        publish(store, made(0))
    monkeypatch.setattr(bucket, "write", write)
    assert store.search(Query()) == []
    assert publish(store, made(0)) == "v2"
    assert [entry.version for entry in store.versions("polite")] == ["v2"]


def test_a_folder_and_a_bucket_have_one_layout(store, bucket, made, tmp_path):
    local = LocalRegistry(tmp_path / "local")
    first = local.put(made(0), Publication("polite", None, ("best",)))
    local.put(made(1), Publication("polite"))
    local.yank(first, "wrong data")
    for file in (tmp_path / "local").rglob("*"):
        if file.is_file():
            bucket.write(file.relative_to(tmp_path / "local").as_posix(), file.read_bytes())
    assert store.versions("polite") == local.versions("polite")
    assert publish(store, made(2)) == "v3"
    copy = tmp_path / "copy"
    for path in bucket.files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes(bucket.read(path, 1 << 30).data)
    assert LocalRegistry(copy).versions("polite") == store.versions("polite")
    assert LocalRegistry(copy).verify() == []


def test_a_missing_name_is_told_with_what_there_is(store, made):
    publish(store, made(0))
    assert (store.has("polite"), store.has("rude")) == (True, False)
    with pytest.raises(RegistryError, match="has no adapter 'polit'; did you mean 'polite'"):
        store.resolve("polit")
    with pytest.raises(RegistryError, match="for other/model"):
        store.resolve("polite", backbone="other/model")


def test_a_manifest_is_read_once_and_again_if_it_has_changed(store, bucket, tmp_path, monkeypatch):
    store.put(registries.write_sample(tmp_path / "made"), Publication("polite"))
    read, original = [], bucket._objects.get

    def counted(path):
        read.append(path.rpartition("/")[2])
        return original(path)

    class Counted:
        def __getattr__(self, name):
            return counted if name == "get" else getattr(objects_of_bucket, name)

    objects_of_bucket = bucket._objects
    monkeypatch.setattr(bucket, "_objects", Counted())
    (entry,) = Registry(bucket).versions("polite")
    assert "adapter.json" not in read
    other = registries.write_sample(tmp_path / "other", 1)
    (path,) = [path for path in bucket.files() if path.endswith("v1/adapter.json")]
    bucket.write(path, (other / "adapter.json").read_bytes())
    (changed,) = Registry(bucket).versions("polite")
    assert changed.digest != entry.digest
    assert "adapter.json" in read


def test_a_writer_gives_up_when_others_always_are_first(store, bucket, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(registry, "_ATTEMPTS", 3)
    writes: list[Names] = []

    def update(names):
        writes.append(names)
        highest = len(writes)
        bucket.write("b/n/names.json", b'{"highest":%d,"tags":{},"yanked":{}}' % highest)
        return Names({"best": "v1"}, {}, highest)

    with pytest.raises(RegistryError, match=r"b/n/names\.json keeps changing"):
        store._change("b/n", update)
    assert [names.highest for names in writes] == [0, 1, 2]
