"""The engine: deadlines, the queue, errors of one request, the end, and adapters in memory."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import DataError, FileError, RegistryError
from adapterhub.registry.local import LocalRegistry
from adapterhub.serving import Engine, adapter_cache
from adapterhub.serving.shared_backbone import SharedBody
from adapterhub.web import errors
from tests.kit.server import EXAMPLES, TEXTS, busy, expected_answers, same_answer, write_adapter


@pytest.fixture
def engine(polite):
    with Engine(batch_tokens=256) as engine:
        engine.pin(polite)
        yield engine


def computed_rows(monkeypatch):
    """Record how many requests each batch has."""
    rows, compute = [], SharedBody.compute

    def counted(self, asked):
        rows.append(len(asked))
        return compute(self, asked)

    monkeypatch.setattr(SharedBody, "compute", counted)
    return rows


def test_what_waits_is_computed_together(engine, held, polite, monkeypatch):
    rows = computed_rows(monkeypatch)
    futures = [engine.submit(polite, given) for given in (TEXTS[0], {"text": TEXTS[0]}) * 6]
    held.set()
    assert len({str(future.result(30)) for future in futures}) == 1
    assert rows == [12]
    assert {(future.reference, len(future.digest)) for future in futures} == {(polite, 64)}


def test_what_is_late_or_cancelled_is_not_computed(engine, held, polite, monkeypatch):
    rows = computed_rows(monkeypatch)
    late = engine.submit(polite, "a plot", deadline=0.01)
    cancelled = engine.submit(polite, "a plot")
    other = engine.submit(polite, "a plot", deadline=60)
    assert cancelled.cancel()
    time.sleep(0.05)
    held.set()
    with pytest.raises(errors.DeadlineError, match=r"the deadline passed \d+\.\d+.* before"):
        late.result(30)
    assert other.result(30)
    assert rows == [1]
    assert (engine.counts["expired"], engine.counts["cancelled"]) == (1, 1)


def test_a_full_queue_says_how_long_to_wait(polite):
    with Engine(queue_tokens=20) as engine:
        engine.pin(polite)
        engine.submit(polite, TEXTS[0]).result(30)  # the rate is known now
        with busy(engine):
            futures = [engine.submit(polite, TEXTS[3]) for _ in range(2)]
            with pytest.raises(
                errors.OverloadedError, match=r"the queue is full: 2\d tokens"
            ) as error:
                engine.submit(polite, "a plot")
            assert error.value.wait > 0
            assert engine.counts["refused"] == 1
        assert [each.result(30) for each in futures]
        engine.submit(polite, "a plot").result(30)


def test_a_bad_request_fails_alone(engine, held, polite, tmp_path):
    good = engine.submit(polite, TEXTS[0])
    wrong = {
        engine.submit(polite, ["a plot", "a movie"]): DataError,
        engine.submit(polite, {}): DataError,
        engine.submit(polite, 3): DataError,
        engine.submit(str(tmp_path / "none"), "a plot"): FileError,
        engine.submit("nobody@3", "a plot"): RegistryError,
    }
    held.set()
    assert good.result(30)
    for future, error in wrong.items():
        with pytest.raises(error):
            future.result(30)
    assert engine.is_alive


def test_nan_in_an_adapter_fails_its_rows_alone(engine, backbone, tmp_path, polite):
    broken = write_adapter(backbone, tmp_path / "broken", seed=5)
    tags = write_adapter(backbone, tmp_path / "tags", example=EXAMPLES[5])
    engine.pin(broken, tags)
    (served,) = (each for each in engine.adapters._by_name.values() if each.reference == broken)
    with torch.no_grad():
        for name, parameter in served.model.model.named_parameters():
            if served.name[:16] in name:
                parameter.fill_(float("nan"))
        ah.adapters(served.model.model)[served.name].hold()  # once more, as it has changed
    with busy(engine):
        futures = [[engine.submit(a, t) for t in TEXTS] for a in (polite, broken, tags)]
    for number, adapter in ((0, polite), (2, tags)):
        found = [each.result(30) for each in futures[number]]
        assert same_answer(found, expected_answers(adapter, TEXTS))
    for each in futures[1]:
        with pytest.raises(errors.ComputationError, match="NaN"):
            each.result(30)


def test_out_of_memory_halves_the_batch(engine, held, polite, monkeypatch):
    compute, tried = SharedBody.compute, []

    def small(self, asked):
        tried.append(len(asked))
        if len(asked) > 2 or "scene" in str(asked[0][1].example):
            raise torch.OutOfMemoryError("no memory")
        return compute(self, asked)

    monkeypatch.setattr(SharedBody, "compute", small)
    futures = [engine.submit(polite, TEXTS[0]) for _ in range(8)]
    large = engine.submit(polite, TEXTS[5])
    held.set()
    assert [each.result(30) for each in futures]
    assert tried[:4] == [8, 4, 2, 2]
    with pytest.raises(errors.TooLargeError, match="does not fit into memory alone"):
        large.result(30)
    assert engine.is_alive


def test_what_is_not_finished_in_time_fails(polite):
    for is_loaded in (True, False):
        engine = Engine()
        if is_loaded:
            engine.pin(polite)
            free = threading.Event()
            engine._between_batches(lambda free=free: free.wait(30))
            threading.Timer(0.3, free.set).start()
        futures = [engine.submit(polite, text) for text in TEXTS]
        engine.close(drain_seconds=0.05 if is_loaded else 0)
        for each in futures:
            with pytest.raises(errors.StoppedError, match="closed before" if is_loaded else None):
                each.result(30)


# Adapters in memory: loaded once, beside running batches; evicted, and exchanged.


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
        for _ in range(2):
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
