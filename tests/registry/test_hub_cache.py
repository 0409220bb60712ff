"""The cache of a hub."""

from __future__ import annotations

import pytest

from adapterhub.errors import OutputError
from adapterhub.registry.hub_reader import HubCache, Refs

A = "a" * 40


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_each_hub_has_its_own_folder(folder):
    hosts = ("h.org", "h.org:8443", "h.org/x", "H.org", "[::1]", "a" * 300)
    bases = [f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts]
    folders = {HubCache(base).folder for base in bases}
    assert len(folders) == len(bases)
    assert {path.parent for path in folders} == {folder / "adapterhub" / "hubs"}
    assert all(len(path.name) < 100 and ":" not in path.name for path in folders)


def test_a_version_enters_complete_or_not_at_all():
    cache, digest = HubCache("https://h.org"), "0" * 64
    with pytest.raises(OutputError), cache.adding(digest) as staged:
        (staged / "file").write_bytes(b"half") and staged.write_bytes(b"")
    assert not cache.adapter(digest).exists()
    assert not list(cache.adapter(digest).parent.iterdir())
    for data in (b"first", b"second"):  # of two processes, the first wins
        with cache.adding(digest) as staged:
            (staged / "file").write_bytes(data)
    assert (cache.adapter(digest) / "file").read_bytes() == b"first"


def test_a_digest_is_no_path():
    for digest in ("../x", "", "0" * 63, "0" * 64 + "/x"):
        with pytest.raises(AssertionError):
            HubCache("https://h.org").adapter(digest)


def test_refs_and_manifests_are_remembered():
    cache, refs = (
        HubCache("https://h.org"),
        Refs(A, {"main": A}, {"v1": A, "a/b": A}, {"v1": "wrong\n"}),
    )
    assert cache.refs("a/b") is None
    assert cache.manifest("a/b", A, "adapter.json") is None
    cache.keep_refs("a/b", refs)
    cache.keep_manifest("a/b", A, "adapter.json", b"{}")
    assert cache.refs("a/b") == refs
    assert cache.manifest("a/b", A, "adapter.json") == b"{}"
    assert cache.manifest("a/b", A, "adapter_config.json") is None
    assert HubCache("https://other.org").refs("a/b") is None


def test_a_damaged_or_read_only_cache_is_as_empty(monkeypatch, folder):
    cache = HubCache("https://h.org")
    cache.keep_refs("a/b", Refs(A))
    (file,) = (cache.folder / "names").iterdir()
    for text in ("", "{", "[]", '{"head": "../x", "branches": {}, "tags": {}, "yanked": {}}'):
        file.write_text(text)
        assert cache.refs("a/b") is None
    (folder / "plain").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "plain"))
    HubCache("https://h.org").keep_refs("a/b", Refs(A))
