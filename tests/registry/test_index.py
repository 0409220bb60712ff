"""The index returns the same versions as a comparison of every entry, for every query."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sqlite3

import pytest
from selection import rotating

from adapterhub.errors import RegistryError
from adapterhub.registry import index as index_module
from adapterhub.registry.index import IndexedFolder, open_index
from adapterhub.registry.store import Entry, Query, filter_entries, words_in

WORDS = ("english", "german", "legal", "Größe")
QUERIES = [
    Query(text, backbone, task, method, tags, metric, sort, all_versions, limit)
    for text, backbone, task, method, tags, metric, sort, all_versions, limit in itertools.product(
        ("", "ger leg", "grosse", "adapter"),
        (None, "acme/b1", f"bf16-{1:064x}"),
        (None, "tagging"),
        (None, "lora"),
        ((), ("best",)),
        (None, "loss"),
        ("name", "size", "accuracy", "loss"),
        (False, True),
        (3, 1_000),
    )
]


def random_entries(count: int) -> list[Entry]:
    """Make entries of two versions per name with random fields; sizes and scores differ."""
    draw = random.Random(0)
    sizes = draw.sample(range(10_000), count)
    return [
        Entry(
            reference=f"n{i // 2:03}@v{i % 2 + 1}",
            name=f"n{i // 2:03}",
            version=f"v{i % 2 + 1}",
            digest=f"{i:064x}",
            backbone=f"acme/b{i // 2 % 3}",
            fingerprint=f"bf16-{i // 2 % 3:064x}",
            methods=tuple(draw.sample(("lora", "prefix", "bitfit"), 2)),
            task=draw.choice(("tagging", "classification", None)),
            metrics=draw.choice(({"accuracy": i / count}, {"loss": i / count}, {})),
            tags=tuple(draw.sample(("best", "last", *WORDS), 2)),
            size=size,
            yanked=draw.choice((None, None, None, "why")),
        )
        for i, size in enumerate(sizes)
    ]


NUMBERS = itertools.count()


def text_of(entry: Entry) -> str:
    return " ".join((entry.name, entry.task or "", *entry.methods, *entry.tags, "adapter"))


def update(index, entries, removed=(), stamp="registry stamp"):
    """Index folders that changed, and remove others."""
    groups = itertools.groupby(entries, lambda entry: entry.name)
    changed = {name: IndexedFolder([(e, text_of(e)) for e in group]) for name, group in groups}
    with index.writing():
        stamps = {**index.stamps(), **{name: f"stamp {next(NUMBERS)}" for name in changed}}
        stamps = {name: stamp for name, stamp in stamps.items() if name not in removed}
        index.update(stamps, changed.__getitem__, stamp)


def has_words(entry: Entry, text: str) -> bool:
    words = words_in(text_of(entry))
    return all(any(word.startswith(prefix) for word in words) for prefix in words_in(text))


@pytest.mark.parametrize(
    ("few", "most_words"), [(0, 64), (500, 64), (500, 0)], ids=["scan", "sort", "sort by prefix"]
)
def test_every_query_equals_a_comparison_of_every_entry(tmp_path, monkeypatch, few, most_words):
    monkeypatch.setattr(index_module, "_FEW", few)
    monkeypatch.setattr(index_module, "_MOST_WORDS", most_words)
    entries = random_entries(60)
    available = [entry for entry in entries if entry.yanked is None]
    newest = list({entry.name: entry for entry in available}.values())
    sizes = set()
    with open_index(tmp_path / "x.sqlite") as index:
        update(index, entries)
        update(index, entries[:40])  # these folders changed
        for query in rotating(random.Random(0).sample(QUERIES, len(QUERIES))):
            candidates = available if query.all_versions else newest
            candidates = [entry for entry in candidates if has_words(entry, query.text)]
            expected = filter_entries(candidates, dataclasses.replace(query, text=""))
            results = index.search(query)
            if query.sort == "name":  # a tie between two versions of a name
                assert [e.name for e in results] == [e.name for e in expected], query
            else:
                assert results == expected, query
            sizes.add(len(results))
    assert len(sizes) > 5


def test_removed_and_yanked_versions_are_not_found(tmp_path):
    entries = [dataclasses.replace(entry, yanked=None) for entry in random_entries(20)]
    everything = Query("adapter", all_versions=True)
    with open_index(tmp_path / "x.sqlite") as index:
        update(index, entries)
        assert len(index.search(everything)) == 20
        update(index, [], removed=["n000", "n001"], stamp="later")
        assert [e.name for e in index.search(everything)] == [e.name for e in entries[4:]]
        assert (index.count(), index.registry_stamp()) == (8, "later")
        assert "n000" not in index.stamps()
        update(index, [dataclasses.replace(entry, yanked="why") for entry in entries[4:6]])
        assert "n002" not in {entry.name for entry in index.search(everything)}
        assert index.count() == 8


@pytest.mark.parametrize("few", [0, 500], ids=["scan", "sort"])
def test_labels_are_never_mistaken_for_words(tmp_path, monkeypatch, few):
    monkeypatch.setattr(index_module, "_FEW", few)
    entry = random_entries(1)[0]
    with open_index(tmp_path / "x.sqlite") as index:
        folder = IndexedFolder([(entry, "Größe 数据集 x_y")])
        with index.writing():
            index.update({"a": "1"}, lambda path: folder, "")
        for text in ("task", "_task", "newest", "74", "y x größ", "数据"):
            expected = text in ("y x größ", "数据")
            assert bool(index.search(Query(text))) == expected, text
        for tag in ('" OR tokens:"', "' OR 1=1 --", "*", "_newest", ""):
            assert index.search(Query(tags=(tag,))) == []
            assert index.search(Query(sort=f"{tag}accuracy")) == []


def test_a_failed_update_changes_nothing(tmp_path):
    entries = random_entries(20)

    def interrupted(path):
        raise OSError(5, "Input/output error")

    with open_index(tmp_path / "x.sqlite") as index:
        update(index, entries)
        before = index.search(Query(limit=100)), index.stamps()
        stamps = {**before[1], "n000": "new stamp"}
        del stamps["n001"]
        with pytest.raises(OSError, match="Input"), index.writing():
            index.update(stamps, interrupted, "later")
        assert (index.search(Query(limit=100)), index.stamps()) == before
        assert index.registry_stamp() == "registry stamp"


def test_broken_files_are_kept_with_their_folder(tmp_path):
    entry = random_entries(1)[0]
    folders = {"a": IndexedFolder([(entry, "x")], {"v2": "damaged"}), "b": IndexedFolder([], {})}
    with open_index(tmp_path / "x.sqlite") as index:
        with index.writing():
            index.update({"a": "1", "b": "1"}, folders.__getitem__, "")
        assert index.broken() == {"a/v2": "damaged"}
        assert index.digests() == {f"a/{entry.version}": entry.digest}
        with index.writing():
            index.update({"a": "2", "b": "1"}, lambda path: folders["b"], "")
        assert (index.broken(), index.count()) == ({}, 2)
        with index.writing():
            index.clear()
        assert (index.stamps(), index.search(Query())) == ({}, [])


def test_an_index_in_memory(tmp_path):
    with open_index(None) as index:
        update(index, random_entries(10))
        assert len(index.search(Query("adapter"))) > 3


def test_without_fts5_the_error_names_it(tmp_path, monkeypatch):
    missing = index_module._SCHEMA.replace("fts5 (", "fts5_missing (")
    monkeypatch.setattr(index_module, "_SCHEMA", missing)
    with pytest.raises(RegistryError, match="FTS5"), open_index(tmp_path / "x.sqlite"):
        pass
    with sqlite3.connect(tmp_path / "x.sqlite") as db:  # nothing half-made is left
        assert db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    db.close()
