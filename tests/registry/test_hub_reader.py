"""What a hub says is checked field by field, and kept in a cache."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.errors import OutputError, RegistryError
from adapterhub.registry.hub_client import Expected, MissingFileError
from adapterhub.registry.hub_reader import HubCache, HubReader, Refs, split_items

A, B = "a" * 40, "b" * 40


class Answers:
    """A client that gives one answer to everything."""

    def __init__(self, answer):
        self.answer, self.paths = answer, []

    def read(self, path, limit, subject, params=()):
        self.paths.append(path)
        if self.answer is None:
            raise MissingFileError("none")
        return self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()


def reader(answer):
    return HubReader(Answers(answer), "hf:")


def test_refs_with_other_names_or_commits_are_left_out():
    tags = [
        {"name": "v1", "targetCommit": A},
        {"name": "release/1", "targetCommit": B},
        *({"name": name, "targetCommit": A} for name in ("../x", "a b", "\x1b", 3, None, A * 9)),
        *({"name": f"w{n}", "targetCommit": c} for n, c in enumerate(("main", A[1:], "A" * 40, 3))),
    ]  # fmt: skip
    branches = [{"name": "main", "targetCommit": B}]
    refs = reader({"tags": tags, "branches": branches}).refs("a/b")
    assert refs.tags == {"v1": A, "release/1": B}
    assert (refs.head, refs.branches) == (B, {"main": B})
    assert reader({}).refs("a/b").head is None


def test_a_revision_is_one_segment_of_the_path():
    reading = reader({"sha": A})
    assert reading.commit_of("a/b", "refs/pr/1") == A
    assert reading.client.paths == ["/api/models/a/b/revision/refs%2Fpr%2F1"]
    for wrong in ({}, {"sha": None}, {"sha": "../x"}, {"sha": [A]}):
        with pytest.raises(RegistryError, match="malformed"):
            reader(wrong).commit_of("a/b", "main")


def test_a_missing_file_is_none():
    assert reader(None).small_file("a/b", A, "x", 9) is None
    assert reader(None).first_file("a/b", A, {"x": 9, "y": 9}) is None
    assert reader(b"data").first_file("a/b", A, {"x": 9, "y": 9}) == ("x", b"data")
    assert reader(None).yanked("a/b", A) == {}
    assert reader({"v1": "a\x1bb"}).yanked("a/b", A) == {"v1": "a\\u001bb"}


def test_a_listing_gives_sizes_and_hashes():
    items = [
        {"type": "file", "path": "small", "size": 3, "oid": A},
        {"type": "file", "path": "large", "size": 130, "oid": B,
         "lfs": {"oid": "c" * 64, "size": 9, "pointerSize": 130}},
        {"type": "directory", "path": "d", "oid": A},
    ]  # fmt: skip
    assert reader(items).listing("a/b", A) == {
        "small": Expected(3, 3, git_sha1=A),
        "large": Expected(9, 9, sha256="c" * 64),
    }


JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(st.lists(JSON, max_size=5), st.binary() | st.text('[]{},"\\ 1').map(str.encode))
def test_items_are_split_as_a_parser_splits_them(items, other):
    for indent in (None, 1):
        data = json.dumps(items, indent=indent, ensure_ascii=False).encode("utf-8", "replace")
        assert [json.loads(item) for item in split_items(data)] == json.loads(data)
    assert isinstance(split_items(other), list)


# What a hub said is kept in a cache.


def test_each_hub_has_its_own_folder(tmp_path):
    hosts = ("h.org", "h.org:8443", "h.org/x", "H.org", "[::1]", "a" * 300)
    bases = [f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts]
    folders = {HubCache(base).folder for base in bases}
    assert len(folders) == len(bases)
    assert {path.parent for path in folders} == {tmp_path / "cache" / "adapterhub" / "hubs"}
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


def test_a_damaged_or_read_only_cache_is_as_empty(monkeypatch, tmp_path):
    cache = HubCache("https://h.org")
    cache.keep_refs("a/b", Refs(A))
    (file,) = (cache.folder / "names").iterdir()
    for text in ("", "{", "[]", '{"head": "../x", "branches": {}, "tags": {}, "yanked": {}}'):
        file.write_text(text)
        assert cache.refs("a/b") is None
    (tmp_path / "plain").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "plain"))
    HubCache("https://h.org").keep_refs("a/b", Refs(A))
