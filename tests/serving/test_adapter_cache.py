"""Adapters in memory: loaded once, beside running batches; evicted, and exchanged."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import adapterhub as ah
from adapterhub.registry.local import LocalRegistry
from adapterhub.serving import Engine, adapter_cache
from tests.kit.server import TEXTS, expected_answers, same_answer, write_adapter


def answer(engine, adapter, text=TEXTS[0]):
    return engine.submit(adapter, text).result(60)


def test_references_of_one_version_share_one_adapter(published, tmp_path):
    with Engine(registry=tmp_path / "registry") as engine:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: answer(engine, "polite@stable"), range(16)))
        assert same_answer(found, expected_answers(published[0], (TEXTS[0],)) * 16)
        assert same_answer(answer(engine, "polite@1"), found[0])
        assert same_answer(answer(engine, "polite"), expected_answers(published[1], (TEXTS[0],))[0])
        assert engine.adapters.counts["loads"] == 2
        assert {use.reference for use in engine.models()} == {"polite@v1", "polite@v2"}


def test_others_are_answered_while_an_adapter_is_loaded(polite, backbone, tmp_path, monkeypatch):
    other = write_adapter(backbone, tmp_path / "other", seed=3)
    read, go_on, begun = adapter_cache.read_source, threading.Event(), threading.Event()

    def slow(source, *args, **options):
        if source.reference == other:
            begun.set()
            go_on.wait(30)
        return read(source, *args, **options)

    with Engine() as engine:
        engine.pin(polite)
        monkeypatch.setattr(adapter_cache, "read_source", slow)
        waiting = [engine.submit(other, "a plot") for _ in range(3)]
        begun.wait(30)
        assert answer(engine, polite)
        assert not any(each.done() for each in waiting)
        go_on.set()
        assert all(each.result(30) for each in waiting)
        assert engine.adapters.counts["loads"] == 2


def test_the_least_recently_used_leaves(backbone, tmp_path, polite):
    folders = [write_adapter(backbone, tmp_path / f"{n}", seed=n) for n in range(4)]
    expected = {f: expected_answers(f, (TEXTS[0],))[0] for f in folders}
    with Engine() as engine:
        answer(engine, polite)
        (size,) = (use.bytes for use in engine.models())
    with Engine(adapter_memory=3 * size) as engine:
        engine.pin(polite)
        for folder in (0, 1, 0, 2, 0, 3, 1, 0):
            assert same_answer(answer(engine, folders[folder]), expected[folders[folder]])
        there = {use.reference for use in engine.models()}
        assert there == {polite, folders[0], folders[1]}
        assert engine.adapters.counts["evictions"] == 4
        assert engine.refresh() == 0
        assert len(ah.adapters(next(iter(engine.adapters.models.bodies.values())).model)) == 3


def test_adapters_in_use_stay(backbone, tmp_path):
    folders = [write_adapter(backbone, tmp_path / f"{n}", seed=n) for n in range(4)]
    with Engine(adapter_memory=1) as engine:
        for _ in range(3):
            futures = [engine.submit(f, text) for text in TEXTS[:3] for f in folders]
            found = [each.result(60) for each in futures]
            assert same_answer(found[:4], [expected_answers(f, (TEXTS[0],))[0] for f in folders])


def test_a_pinned_adapter_follows_its_tag_and_no_other_one_is_unpinned(published, tmp_path):
    store = LocalRegistry(tmp_path / "registry")
    with Engine(registry=tmp_path / "registry", adapter_memory=0) as engine:
        engine.pin("polite@2")
        answer(engine, "polite@stable")
        store.tag(store.resolve("polite", "v2"), "stable")
        assert engine.refresh() == 1
        engine._between_batches(lambda: None).result(30)  # until then the old one may be used again
        answer(engine, "polite@1")
        answer(engine, "polite@stable")
        assert engine.adapters.counts["loads"] == 3
        assert "polite@v2" in {use.reference for use in engine.models()}
    with Engine(registry=tmp_path / "registry", adapter_memory=0) as engine:
        engine.pin("polite@stable")
        assert engine.refresh() == 0
        store.tag(store.resolve("polite", "v1"), "stable")
        assert engine.refresh() == 1
        engine._between_batches(lambda: None).result(30)
        assert [use.reference for use in engine.models()] == ["polite@v1"]
        answer(engine, "polite@2")
        assert "polite@v1" in {use.reference for use in engine.models()}


def test_a_new_version_that_cannot_be_loaded_changes_nothing(published, tmp_path):
    store = LocalRegistry(tmp_path / "registry")
    with Engine(registry=tmp_path / "registry") as engine:
        before = answer(engine, "polite@stable")
        store.tag(store.resolve("polite", "v2"), "stable")
        (file,) = (tmp_path / "registry").glob("**/v2/adapter.json")
        file.chmod(0o644)
        file.write_text(json.dumps({"format": "nothing"}))
        with pytest.warns(UserWarning, match="polite@stable stays at polite@v1"):
            assert engine.refresh() == 0
        assert engine.adapters.counts["failed_refreshes"] == 1
        assert answer(engine, "polite@stable") == before
