"""Objects of a bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.registry.bucket import Bucket
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import ConflictError, Publication, is_bucket
from tests.kit import registries

memory = pytest.importorskip("obstore.store").MemoryStore


def test_a_bucket_is_known_by_its_scheme():
    assert all(map(is_bucket, ("s3://bucket/prefix", "gs://bucket", "az://container/x")))
    others = ("hf://owner/name", "s3:/bucket", "./s3", "https://host/owner/name", None)
    assert not any(map(is_bucket, others))


def test_objects_are_listed_and_deleted():
    bucket = Bucket("s3://bucket/p/", memory())
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


class Careless:
    """A bucket whose server ignores some conditions of writes, or obeys them always."""

    def __init__(self, *ignored):
        self.store, self.ignored = memory(), ignored

    def __getattr__(self, name):
        return getattr(self.store, name)

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


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("server", CARELESS)
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


def test_one_proof_is_enough_and_needs_no_right_to_delete(monkeypatch):
    objects = Careless()
    bucket = Bucket("s3://b", objects)

    def denied(path):
        raise OSError("access denied")

    monkeypatch.setattr(objects, "delete", denied, raising=False)
    for number in (b"1", b"2"):
        bucket.write("x", number)
    (probe, _) = bucket.files()
    assert probe.startswith(".adapterhub-probe-")
    assert bucket.folders() == []
