"""The index finds what a look at each entry finds, whatever is asked."""

from __future__ import annotations

import itertools
import random

import pytest

from adapterhub.registry import index as module
from adapterhub.registry.bitmaps import Bitmaps, members
from adapterhub.registry.index import open_index
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


def entries(count: int) -> list[Entry]:
    """Entries of two versions a name, with fields drawn at random; sizes and scores differ."""
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


def text_of(entry: Entry) -> str:
    return " ".join((entry.name, entry.task or "", *entry.methods, *entry.tags, "adapter"))


def enter(index, found):
    pairs = itertools.groupby(found, lambda entry: entry.name)
    versions = [(name, name, [(e, text_of(e)) for e in group]) for name, group in pairs]
    index.update(versions, (), "whole")


@pytest.mark.parametrize("few", [0, 500])
def test_each_query_finds_what_a_look_at_each_entry_does(tmp_path, monkeypatch, few):
    monkeypatch.setattr(module, "_FEW", few)
    monkeypatch.setattr(module, "_BATCH", 7)
    known = entries(60)
    standing = [entry for entry in known if entry.yanked is None]
    newest = list({entry.name: entry for entry in standing}.values())
    sizes = set()
    with open_index(tmp_path / "x.sqlite") as index:
        enter(index, known)
        enter(index, known[:40])  # again: a folder that changed
        for query in QUERIES:
            words = words_in(query.text)
            pool = standing if query.all_versions else newest
            pool = [e for e in pool if all(any(w.startswith(s) for w in words_in(text_of(e)))
                                           for s in words)]  # fmt: skip
            found = index.search(query)
            assert {e.reference for e in found} == {
                e.reference for e in filter_entries(pool, Query(**{**vars(query), "text": ""}))
            }, query
            sizes.add(len(found))
    assert len(sizes) > 5


def test_sets_are_as_large_as_they_must_be(tmp_path):
    with open_index(tmp_path / "x.sqlite") as index:
        sets = Bitmaps(index.db)
        numbers = [1, 2_047, 2_048, 300_000]
        sets.add({("k", "ab"): numbers, ("k", "ac"): [5]})
        assert list(members(sets.of("k", "ab"))) == numbers
        assert list(members(sets.starting("k", "a"))) == [1, 5, *numbers[1:]]
        assert sets.starting("k", "b") == sets.of("k", "a") == sets.of("x", "ab") == 0
        sets.remove(("k", "ab"), [2_047, 9])
        assert list(members(sets.of("k", "ab"))) == [1, 2_048, 300_000]
        (chunks,) = index.db.execute("SELECT count(*) FROM sets").fetchone()
        assert chunks == 4
