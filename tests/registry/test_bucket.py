"""Objects of a bucket."""

from __future__ import annotations

import pytest

from adapterhub.errors import ConfigError, FileError, RegistryError
from adapterhub.registry.bucket import Bucket, ConflictError, is_bucket

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
    assert bucket.url == "s3://bucket/x"
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
    assert list(bucket.e_tags()) == ["a/x", "a/y/z", "b/x"]
    assert list(bucket.e_tags("a/")) == ["a/x", "a/y/z"]
    assert bucket.folders() == ["a", "b"]


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
        Bucket("s3://bucket/x").e_tags()
    assert "Debug source" not in str(caught.value)
    assert len(caught.value.problem) < 600


def test_a_malformed_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot open the registry"):
        Bucket("s3://")
