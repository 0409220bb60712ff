"""Objects of a bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.registry.bucket import Bucket
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import ConflictError, Publication, is_bucket
from tests.kit import registries

memory = pytest.importorskip("obstore.store").MemoryStore


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("s3://bucket/prefix", True),
        ("gs://bucket", True),
        ("az://container/x", True),
        ("hf://owner/name", False),
        ("s3:/bucket", False),
        ("./s3", False),
        ("https://host/owner/name", False),
        (None, False),
    ],
)
def test_a_bucket_is_known_by_its_scheme(location: object, expected: bool) -> None:
    assert is_bucket(location) is expected


def test_only_the_first_of_two_writers_replaces_what_both_have_read() -> None:
    bucket = Bucket("s3://bucket/x/", memory())
    assert bucket.location == "s3://bucket/x"
    assert bucket.read("a/b", 10) is None
    bucket.replace("a/b", b"1", None)
    with pytest.raises(ConflictError):
        bucket.replace("a/b", b"2", None)
    read = bucket.read("a/b", 10)
    assert read is not None
    assert read.data == b"1"
    bucket.replace("a/b", b"3", read)
    with pytest.raises(ConflictError):
        bucket.replace("a/b", b"4", read)
    found = bucket.read("a/b", 10)
    assert found is not None
    assert found.data == b"3"
    bucket.delete("a/b")
    bucket.delete("a/b")
    with pytest.raises(ConflictError):
        bucket.replace("a/b", b"5", found)


def test_objects_are_listed_below_a_prefix() -> None:
    bucket = Bucket("s3://bucket", memory())
    for path in ("b/x", "a/y/z", "a/x"):
        bucket.write(path, b"123")
    assert list(bucket.files()) == ["a/x", "a/y/z", "b/x"]
    assert list(bucket.files("a/")) == ["a/x", "a/y/z"]
    assert bucket.folders() == ["a", "b"]
    assert bucket.folders("a/") == ["a/y"]


def test_a_large_object_is_refused_before_it_is_read() -> None:
    bucket = Bucket("s3://bucket", memory())
    bucket.write("a", b"12345")
    with pytest.raises(FileError, match="s3://bucket/a has 5 bytes"):
        bucket.read("a", 4)


def test_an_unreachable_bucket_is_one_short_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapterhub.registry.bucket._RETRIES", {"max_retries": 0})
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_REGION": "eu-central-1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RegistryError, match="s3://bucket/x cannot be used") as caught:
        Bucket("s3://bucket/x").files()
    assert "Debug source" not in str(caught.value)
    assert len(caught.value.problem) < 600


def test_a_malformed_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot open"):
        Bucket("s3://")


class Careless:
    """A bucket whose server ignores some conditions of writes, or obeys them always."""

    def __init__(self, *ignored: str) -> None:
        self.store, self.ignored = memory(), ignored

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def put(self, path: str, data: Any, mode: Any = "overwrite") -> Any:
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
    server: str, write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else eight publishers of eight adapters get one version, and seven are lost."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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


def test_one_proof_is_enough_and_needs_no_right_to_delete(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = Careless()
    bucket = Bucket("s3://b", objects)

    def denied(path: str) -> None:
        raise OSError("access denied")

    monkeypatch.setattr(objects, "delete", denied, raising=False)
    for number in (b"1", b"2"):
        bucket.write("x", number)
    (probe, _) = bucket.files()
    assert probe.startswith(".adapterhub-probe-")
    assert bucket.folders() == []
