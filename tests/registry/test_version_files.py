"""The files of a version, the names of versions, and the index."""

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.errors import ConfigError, FileError
from adapterhub.files.native import Saved
from adapterhub.files.signature import Statement, sign_statement
from adapterhub.registry import store, version_files
from adapterhub.registry.registry import Registry
from adapterhub.registry.store import Entry, Publication, Query
from adapterhub.registry.version_files import (
    DATE_FILE,
    Names,
    copy_adapter,
    entry_of_row,
    names_bytes,
    parse_names,
    row_of,
)
from tests.kit import registries
from tests.kit.registries import MemoryStorage


def test_an_adapter_without_a_name_is_called_as_its_run(tmp_path):
    for folder, own, name in (("mine/adapter", "default", "mine"), ("mine2", "default", "mine2"),
                              ("mine3/adapter", "polite", "polite"),
                              ("my run/adapter", "default", "default")):  # fmt: skip
        saved = Saved.at(registries.write_sample(tmp_path / folder))
        assert (
            version_files.name_to_publish(
                replace(saved, manifest=replace(saved.manifest, name=own))
            )
            == name
        )


def test_the_date_of_a_version_is_in_no_copy(tmp_path):
    folder = registries.write_sample(tmp_path / "made")
    digest, date = Saved.at(folder).digest, version_files.date_now()
    published = copy_adapter(folder, tmp_path / "v1", digest, date=date)
    text = version_files.parse_date((published / DATE_FILE).read_bytes())
    assert (text[:2], text[-1]) == ("20", "Z")
    date = b"2026-11-22T00:00:00Z"
    for data in (b"", b"yesterday", date.replace(b"11", b"13"), b"\xff", date * 9):
        assert version_files.parse_date(data) is None
    assert not (copy_adapter(published, tmp_path / "copy", digest) / DATE_FILE).exists()


# `names.json`: read strictly, written only as a reader accepts it.


def test_names_are_read_as_written_and_by_earlier_releases():
    names = Names({"best": "v1"}, {"v2": "a\nreason"}, 2)
    assert parse_names(names_bytes(names, "polite"), "names.json") == names
    data = b'{"tags": {"con": "v1"}, "yanked": {}}'
    assert parse_names(data, "names.json") == Names({"con": "v1"}, {}, 0)
    with pytest.raises(FileError, match=r"names\.json(.|\n)*tags\.best: 3"):
        parse_names(b'{"tags": {"best": 3}, "yanked": {}}', "names.json")


def test_what_readers_would_refuse_is_not_written(monkeypatch):
    for tags in ({"v1": "v2"}, {"best": "../x"}, {"a b": "v1"}):
        with pytest.raises(ConfigError):
            names_bytes(Names(tags), "polite")
    names = Names({f"tag-{number}": "v1" for number in range(100)})
    data = names_bytes(names, "polite")
    assert len(json.loads(data)["tags"]) == 100
    monkeypatch.setattr(version_files, "MAX_NAMES_BYTES", 1_000)
    with pytest.raises(FileError, match="more than 1000"):
        parse_names(data, "names.json")
    with pytest.raises(ConfigError, match="invalid tags"):
        names_bytes(names, "polite")


# `index.json`: what it has, how it follows changes, and what is no index.


BACKBONE = "acme--bert-small"
FILE = f"{BACKBONE}/index.json"


@pytest.fixture
def registry(tmp_path):
    """A registry whose searches read the index."""
    return Registry(MemoryStorage(tmp_path / "copies"))


@pytest.fixture
def publish(registry, tmp_path):
    def publish(name="polite", seed=0, **options):
        folder = tmp_path / f"made-{name}-{seed}"
        if not folder.exists():
            registries.write_sample(folder, seed, **options)
        return registry.put(folder, Publication(name))

    return publish


def found(registry, **query):
    return [f"{e.name}@{e.version}" for e in registry.search(Query(all_versions=True, **query))]


def rows(registry):
    return json.loads(registry.storage.stored[FILE])["adapters"]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
entries = st.builds(
    Entry,
    reference=st.just("a@v1"), name=st.just("a"), version=st.just("v1"), digest=texts,
    backbone=st.just("acme/bert"), fingerprint=texts, methods=st.tuples(texts),
    task=st.none() | texts, metrics=st.dictionaries(texts, st.floats(-1e9, 1e9), max_size=3),
    tags=st.tuples() | st.tuples(texts), size=st.integers(0, 2**40), parameters=st.integers(0, 9),
    yanked=st.none() | texts, description=st.none() | texts, language=st.just(("de",)),
    published=st.none() | texts, signers=st.tuples() | st.tuples(texts), data=st.none() | texts,
)  # fmt: skip


@settings(max_examples=30)
@given(entries)
def test_an_entry_survives(entry):
    row = json.loads(json.dumps(row_of(entry)))
    assert row_of(entry_of_row("a", "v1", row)) == row_of(entry)
    assert entry_of_row("a", "v1", row) == entry


def test_the_index_follows_every_change(registry, publish):
    first, second = publish(accuracy=0.5), publish(seed=1)
    publish("rude")
    assert rows(registry).keys() == {"polite", "rude"}
    assert version_files.parse_backbones(registry.storage.stored["index.json"], "") == [BACKBONE]
    registry.tag(first, "best")
    assert rows(registry)["polite"]["v1"]["tags"] == ["best"]
    registry.untag(first, "best")
    assert "tags" not in rows(registry)["polite"]["v1"]
    registry.yank(second, "trained on the dev set")
    assert rows(registry)["polite"]["v2"]["yanked"] == "trained on the dev set"
    key = registries.new_key()
    statement = Statement(first.digest, "polite", "v1")
    registry.add_signatures(first, [sign_statement(statement, key)])
    assert rows(registry)["polite"]["v1"]["signers"] == [key.public.id]
    registry.delete("polite", "v1")
    assert rows(registry)["polite"].keys() == {"v2"}
    registry.delete("polite", "v2")
    assert rows(registry).keys() == {"rude"}
    assert registry.verify() == []
    before = dict(registry.storage.stored)
    assert registry.index() == 1
    assert {k: v for k, v in registry.storage.stored.items() if v != before[k]} == {}


def test_a_search_reads_the_index_alone(registry, publish, monkeypatch):
    publish(accuracy=0.5)
    publish("other", seed=1, backbone="other/gpt", fingerprint=f"bf16-{'1' * 64}")
    read, asked = registry.storage.read, []
    monkeypatch.setattr(registry.storage, "files", None)
    monkeypatch.setattr(registry.storage, "folders", None)
    monkeypatch.setattr(
        registry.storage, "read", lambda path, most: asked.append(path) or read(path, most)
    )
    assert found(registry) == ["other@v1", "polite@v1"]
    assert set(asked) == {"index.json", FILE, "other--gpt/index.json"}
    asked.clear()
    assert found(registry, backbone="acme/bert-small") == ["polite@v1"]
    assert set(asked) == {FILE}
    assert found(registry, backbone="nobody/nothing") == []
    assert found(registry, backbone="../..") == []


@pytest.mark.parametrize("killed", [True, False])
def test_an_index_that_was_not_written_is_healed_by_the_next_publisher(
    registry, publish, monkeypatch, killed
):
    publish()
    replace_ = registry.storage.replace

    def refuse(path, data, old):
        if path.endswith("index.json"):
            raise KeyboardInterrupt if killed else FileError("this storage has no room")
        replace_(path, data, old)

    with monkeypatch.context() as patch:
        patch.setattr(registry.storage, "replace", refuse)
        if killed:
            with pytest.raises(KeyboardInterrupt):
                publish(seed=1)
        else:
            with pytest.warns(UserWarning, match="published, but not in the index.*has no room"):
                assert publish(seed=1).version == "v2"
    assert found(registry) == ["polite@v1"]
    assert registry.resolve("polite").version == "v2"  # by its name it is found at once
    (problem,) = registry.verify()
    assert problem.startswith(f"{FILE}: polite has changed since")
    publish(seed=2)
    assert found(registry) == ["polite@v1", "polite@v2", "polite@v3"]
    assert registry.verify() == []


def test_publishers_at_once_lose_no_row(registry, publish):
    registry.storage.is_atomic = False  # without a lock, as a bucket
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda n: publish(f"n{n}", seed=n), range(12)))
    assert len(found(registry)) == 12
    assert registry.verify() == []


DAMAGED = {
    "half": lambda data: data[: len(data) // 2],
    "a login page": lambda data: b"<!doctype html><title>Log in</title>",
    "a list": lambda data: b"[]",
    "another version": lambda data: data.replace(b'"index":1', b'"index":2'),
    "of another backbone": lambda data: data.replace(b'"backbone":"acme--', b'"backbone":"evil--'),
    "no digest": lambda data: data.replace(b'"digest"', b'"digits"'),
    "a name of another kind": lambda data: data.replace(b'"polite"', b'"../up"'),
    "a version of another kind": lambda data: data.replace(b'"v1"', b'"../v1"'),
    "a score that is none": lambda data: data.replace(b'"accuracy":0.5', b'"accuracy":NaN'),
    "half a character": lambda data: data.replace(b'"lora"', b'"\\ud800"'),
    "a number for a text": lambda data: data.replace(b'"methods":["lora"]', b'"methods":[1]'),
    "a deep tree": lambda data: b"[" * 100_000,
}


def test_a_missing_index_is_written_again(registry, publish):
    publish()
    for file in ("index.json", FILE):
        del registry.storage.stored[file]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert found(registry) == ["polite@v1"]
        assert registry.index() == 1
        assert registry.verify() == []


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_index_is_said_and_the_folders_are_read(registry, publish, damage):
    publish(accuracy=0.5)
    stored = registry.storage.stored
    before = stored[FILE]
    stored[FILE] = DAMAGED[damage](before)
    assert stored[FILE] != before
    with pytest.warns(UserWarning, match="is not the index of a registry.*the folders are read"):
        assert found(registry) == ["polite@v1"]
    (problem,) = registry.verify()
    assert "adapterhub registry index" in problem or "is not the index" in problem
    publish("rude")  # the next writer heals it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(registry) == ["polite@v1", "rude@v1"]
    assert registry.verify() == []


def test_a_broken_version_is_in_the_index_as_such(registry, publish):
    publish()
    publish(seed=1)
    registry.storage.stored[f"{BACKBONE}/polite/v2/adapter.json"] = b"{}"
    registry.index()
    assert rows(registry)["polite"]["v2"] == {"broken": True}  # why has a path of a machine
    with pytest.warns(UserWarning, match="polite/v2: it could not be read"):
        assert found(registry) == ["polite@v1"]


def test_a_root_that_names_no_folders():
    assert not any(map(store.is_backbone_folder, ("index.json", "INDEX.json")))
    with pytest.raises(ConfigError, match="invalid adapter name"):
        store.check_name("index.json")
    data = version_files.root_bytes(["a--b"])
    assert version_files.parse_backbones(data, "index.json") == ["a--b"]
    for backbones in (b'["a/b"]', b'["index.json"]', b'"a"', b"[1]", b'["..a"]'):
        with pytest.raises(FileError, match="does not list folders"):
            version_files.parse_backbones(data.replace(b'["a--b"]', backbones), "index.json")


def test_a_later_field_is_left_out_and_kept(registry, publish):
    publish()
    stored = registry.storage.stored
    stored[FILE] = stored[FILE].replace(b'"digest"', b'"downloads":7,"digest"')
    assert found(registry) == ["polite@v1"]
    publish("rude")
    assert b'"downloads":7' in stored[FILE]
