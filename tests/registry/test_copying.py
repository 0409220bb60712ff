"""`registry copy`: from each kind of place to each other, and again."""

import pytest

from adapterhub.errors import ConfigError
from adapterhub.files.signature import Statement, sign_statement
from adapterhub.registry import bucket as buckets
from adapterhub.registry import copying
from adapterhub.registry.bucket import Bucket
from adapterhub.registry.copying import copy_registry, place
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Publication
from tests.kit import fake_hub, registries, web_servers

DATE = "2026-01-02T03:04:05Z"


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A registry with tags, a yank, a deleted number, a signature and dates."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    registry = LocalRegistry(tmp_path / "source")
    for seed in range(3):
        made = registries.write_sample(tmp_path / f"made-{seed}", seed)
        tags = ("best",) if seed == 2 else ()
        registry.put(made, Publication("polite", tags=tags, published=DATE))
    registry.put(registries.write_sample(tmp_path / "rude", 7), Publication("rude"))
    registry.delete("polite", "v1")
    second = registry.resolve("polite", "v2")
    registry.yank(second, "trained on the dev set")
    key = registries.new_key()
    registry.add_signatures(second, [sign_statement(Statement(second.digest, "polite"), key)])
    return registry


@pytest.fixture(params=["folder", "bucket", "hub"])
def target(request, tmp_path, monkeypatch):
    if request.param == "hub":
        with fake_hub.serving() as (_, address):
            yield f"{address}/acme"
    elif request.param == "bucket":
        objects = registries.Objects()
        monkeypatch.setattr(buckets, "Bucket", lambda url: Bucket(url, objects))
        yield "s3://bucket/p"
    else:
        yield str(tmp_path / "target")


def seen(text):
    """Return what a place has, by name and version."""
    found = {}
    opened = place(text, reading=True)
    for (backbone, name), entries in opened.names().items():
        for entry in entries:
            signed = {s.key for s in opened.store.signatures(entry)}
            found[backbone, name, entry.version] = (
                entry.digest, {*entry.tags}, entry.yanked, signed,
            )  # fmt: skip
    return found


def test_a_copy_has_all_and_the_second_copies_nothing(source, tmp_path, monkeypatch, target):
    report = copy_registry(str(source.root), target)
    assert sorted(report.copied) == ["polite@v2", "polite@v3", "rude@v1"]
    assert report.refused == {}
    copy_registry(target, str(tmp_path / "back"))
    assert seen(target) == seen(str(tmp_path / "back")) == seen(str(source.root))
    store = place(target).store
    if isinstance(store, Registry):
        assert store.resolve("polite", "v3").published == DATE
        assert store.verify() == []
    monkeypatch.setattr(type(store), "put", None)
    again = copy_registry(str(source.root), target)
    assert (again.copied, again.changed, again.unchanged) == ([], [], 3)


def test_a_website_is_copied_and_its_index_is_written_once(source, tmp_path, monkeypatch):
    written, write = [], Registry._write_index
    monkeypatch.setattr(
        Registry, "_write_index", lambda self, *args: written.append(args) or write(self, *args)
    )
    with web_servers.python(source.root) as url:
        copy_registry(url, str(tmp_path / "back"))
    assert seen(str(tmp_path / "back")) == seen(str(source.root))
    assert len(written) == 1


def test_later_tags_yanks_and_signatures_follow(source, tmp_path):
    target = str(tmp_path / "target")
    copy_registry(str(source.root), target)
    third = source.resolve("polite", "v3")
    source.tag(third, "good")
    source.add_signatures(
        third, [sign_statement(Statement(third.digest, "polite"), registries.new_key())]
    )
    source.yank(source.resolve("rude"), "rude")
    report = copy_registry(str(source.root), target)
    assert (sorted(report.changed), report.copied) == (["polite@v3", "rude@v1"], [])
    assert seen(target) == seen(str(source.root))


def test_an_interrupted_copy_goes_on(source, tmp_path, monkeypatch):
    target, put, calls = tmp_path / "target", LocalRegistry.put, []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return put(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LocalRegistry, "put", interrupted)
        patch.setattr(copying, "_AT_ONCE", 1)
        with pytest.raises(KeyboardInterrupt):
            copy_registry(str(source.root), str(target))
    assert 0 < len(seen(str(target))) < 3
    report = copy_registry(str(source.root), str(target))
    assert report.unchanged + len(report.copied) == 3
    assert seen(str(target)) == seen(str(source.root))
    assert LocalRegistry(target).verify() == []


def test_what_cannot_be_copied_does_not_stop_the_others(source, tmp_path):
    target = LocalRegistry(tmp_path / "target")
    target.put(registries.write_sample(tmp_path / "other", 9), Publication("rude"))
    file = source.root / "acme--bert-small/polite/v2/adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    report = copy_registry(str(source.root), str(target.root))
    assert sorted(report.refused) == ["polite@v2", "rude@v1"]
    assert "already published with other bytes" in report.refused["rude@v1"]
    assert report.copied == ["polite@v3"]
    assert [entry.version for entry in target.versions("polite")] == ["v3"]


@pytest.mark.parametrize("target", ["hub"], indirect=True)
def test_a_hub_that_answers_with_a_page_is_no_website(tmp_path, source, target):
    copy_registry(str(source.root), target)
    page = web_servers.answering(200, body=b"<!doctype html>")
    with web_servers.python(tmp_path / "none", page) as url:
        assert not isinstance(place(f"{url}/acme", reading=True).store, Registry)
    assert place(target, reading=True).owner == "acme"


def test_places_that_are_none(source):
    for wrong in ("hf:", "hf:a/b/../c", "https://example.org/"):
        with pytest.raises(ConfigError):
            copy_registry(str(source.root), wrong)
    with pytest.raises(ConfigError, match="copied to itself"):
        copy_registry(str(source.root), f"{source.root}/")
