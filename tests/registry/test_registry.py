"""A registry in a bucket: what the conformance suite of all stores does not cover."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.files.native import Saved
from adapterhub.registry import registry
from adapterhub.registry.bucket import Bucket
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import ConflictError, Publication, Query, is_bucket
from adapterhub.registry.version_files import Names
from tests.kit import registries
from tests.kit.selection import long_table

pytest.importorskip("obstore")
PATH = f"{registries.SAMPLE_BACKBONE.replace('/', '--')}/polite"


@pytest.fixture
def bucket():
    return Bucket("s3://bucket/p", registries.Objects())


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


def test_a_manifest_is_read_once_and_again_if_it_has_changed(store, bucket, tmp_path):
    store.put(registries.write_sample(tmp_path / "made"), Publication("polite"))
    read, get = [], bucket._objects.get
    bucket._objects.get = lambda path: read.append(path.rpartition("/")[2]) or get(path)
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


# Objects of a bucket, and servers that ignore conditions.


def test_a_bucket_is_known_by_its_scheme():
    assert all(map(is_bucket, ("s3://bucket/prefix", "gs://bucket", "az://container/x")))
    others = ("hf://owner/name", "s3:/bucket", "./s3", "https://host/owner/name", None)
    assert not any(map(is_bucket, others))


def test_objects_are_listed_and_deleted():
    bucket = Bucket("s3://bucket/p/", registries.Objects())
    assert bucket.location == "s3://bucket/p"
    for path in ("b/x", "a/y/z", "a/x"):
        bucket.write(path, b"12345")
    assert list(bucket.files()) == ["a/x", "a/y/z", "b/x"]
    assert list(bucket.files("a/")) == ["a/x", "a/y/z"]
    assert (bucket.folders(), bucket.folders("a/")) == (["a", "b"], ["a/y"])
    with pytest.raises(FileError, match="s3://bucket/p/a/x has 5 bytes"):  # before it is read
        bucket.read("a/x", 4)
    found = bucket.read("a/x", 5)
    for _ in range(2):
        bucket.delete("a/x")
    with pytest.raises(ConflictError):
        bucket.replace("a/x", b"5", found)


def test_an_unusable_bucket_is_one_short_error(monkeypatch):
    with pytest.raises(ConfigError, match="cannot open"):
        Bucket("s3://")
    monkeypatch.setattr("adapterhub.registry.bucket._RETRIES", {"max_retries": 0})
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "eu-central-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(RegistryError, match="s3://bucket/x cannot be used") as caught:
        Bucket("s3://bucket/x").files()
    assert "Debug source" not in str(caught.value)
    assert len(caught.value.problem) < 600


class Careless(registries.Objects):
    """A bucket whose server ignores some conditions of writes, or obeys them always."""

    ignored = ()

    def put(self, path, data, mode="overwrite"):
        condition = "If-Match" if isinstance(mode, dict) else mode
        if "nothing" in self.ignored and condition == "If-Match":
            mode = {"e_tag": "another"}
        return self.store.put(path, data, mode="overwrite" if condition in self.ignored else mode)


CARELESS = {
    "stale tags": (("If-Match",), "If-Match"),
    "objects that exist": (("create",), "If-None-Match"),
    "all conditions": (("If-Match", "create"), "If-None-Match"),
    "no tag": (("nothing",), "If-Match"),
}
WRITES: dict[str, Callable[[Registry, Path], object]] = {
    "publish": lambda store, made: store.put(made, Publication("polite")),
    "publish another": lambda store, made: store.put(made, Publication("rude")),
    "tag": lambda store, made: store.tag(store.resolve("polite"), "best"),
    "yank": lambda store, made: store.yank(store.resolve("polite"), "wrong data"),
    "delete": lambda store, made: store.delete("polite", "v1"),
    "sign": lambda store, made: store.add_signatures(store.resolve("polite"), ()),
    "write": lambda store, made: store.storage.write("x", b"1"),
}


@long_table(("server", "write"), itertools.product(CARELESS, WRITES), parts=4)
def test_a_bucket_that_ignores_conditions_is_refused_before_the_first_write(
    server, write, tmp_path
):
    """Else eight publishers of eight adapters get one version, and seven are lost."""
    ignored, named = CARELESS[server]
    objects = Careless()
    first = Registry(Bucket("s3://b", objects))
    first.put(registries.write_sample(tmp_path / "first"), Publication("polite"))
    before = first.storage.files()  # the probe is gone, too
    objects.ignored = ignored
    store = Registry(Bucket("s3://b", objects))
    assert len(store.versions("polite")) == 1  # reading needs no proof
    other = registries.write_sample(tmp_path / "other", 1)
    for _ in range(2):
        with pytest.raises(RegistryError, match=f"does not obey the condition {named}"):
            WRITES[write](store, other)
    assert first.storage.files() == before


def test_one_proof_is_enough_and_needs_no_right_to_delete():
    objects = registries.Objects()
    bucket = Bucket("s3://b", objects)

    def denied(path):
        raise OSError("access denied")

    objects.delete = denied
    for number in (b"1", b"2"):
        bucket.write("x", number)
    (probe, _) = bucket.files()
    assert probe.startswith(".adapterhub-probe-")
    assert bucket.folders() == []
