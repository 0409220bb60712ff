"""The versions in a bucket: listing, the cache, and writers that are in each other's way."""

from __future__ import annotations

from pathlib import Path

import pytest
import sample_adapters

from adapterhub.errors import RegistryError
from adapterhub.registry import bucket_versions
from adapterhub.registry.bucket import Bucket
from adapterhub.registry.bucket_registry import BucketRegistry
from adapterhub.registry.bucket_versions import BucketVersions
from adapterhub.registry.names_file import Names
from adapterhub.registry.store import Publication

objects = pytest.importorskip("obstore.store")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Bucket("s3://bucket", objects.MemoryStore())


def test_files_are_grouped_by_version_in_their_order(bucket: Bucket) -> None:
    for path in ("b/n/v10/x", "b/n/v2/y", "b/n/v2/x", "b/n/names.json", "b/n/v02/x", "b/n2/v1/x"):
        bucket.write(path, b"1")
    files = BucketVersions(bucket).files("b/n")
    assert {version: sorted(own) for version, own in files.items()} == {
        "v2": ["x", "y"],
        "v10": ["x"],
    }
    assert list(files) == ["v2", "v10"]


def test_a_manifest_is_read_once_and_again_if_it_has_changed(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BucketRegistry("s3://bucket", bucket)
    store.put(sample_adapters.write(tmp_path / "made"), Publication("polite"))
    read, original = [], bucket.read

    def counted(path: str, most: int) -> object:
        read.append(path.rpartition("/")[2])
        return original(path, most)

    monkeypatch.setattr(bucket, "read", counted)
    (entry,) = BucketRegistry("s3://bucket", bucket).versions("polite")
    assert "adapter.json" not in read
    other = sample_adapters.write(tmp_path / "other", 1)
    (path,) = [path for path in bucket.e_tags() if path.endswith("v1/adapter.json")]
    bucket.write(path, (other / "adapter.json").read_bytes())
    (changed,) = BucketRegistry("s3://bucket", bucket).versions("polite")
    assert changed.digest != entry.digest
    assert "adapter.json" in read


def test_a_writer_gives_up_when_others_always_are_first(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(bucket_versions, "_ATTEMPTS", 3)
    versions, writes = BucketVersions(bucket), []

    def update(names: Names) -> Names:
        writes.append(names)
        highest = len(writes)
        bucket.write("b/n/names.json", b'{"highest":%d,"tags":{},"yanked":{}}' % highest)
        return Names({"best": "v1"}, {}, highest)

    with pytest.raises(RegistryError, match=r"b/n/names\.json changes all the time"):
        versions.change("b/n", update)
    assert [names.highest for names in writes] == [0, 1, 2]
