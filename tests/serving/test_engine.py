"""The engine: deadlines, the queue, errors of one request, and the end."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import DataError, FileError, RegistryError
from adapterhub.serving import Engine
from adapterhub.serving.shared_backbone import SharedBody, by_kind
from adapterhub.web.errors import (
    ComputationError,
    DeadlineError,
    OverloadedError,
    StoppedError,
    TooLargeError,
)
from tests.kit.server import EXAMPLES, TEXTS, expected_answers, same_answer, write_adapter


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
    futures = [engine.submit(polite, TEXTS[0]) for _ in range(12)]
    held.set()
    assert len({str(future.result(30)) for future in futures}) == 1
    assert rows == [12]


def test_a_future_names_its_adapter(engine, polite):
    future = engine.submit(polite, "a plot")
    future.result(30)
    assert future.reference == polite
    assert len(future.digest) == 64


def test_a_deadline_that_passed_is_not_computed(engine, held, polite, monkeypatch):
    rows = computed_rows(monkeypatch)
    late = engine.submit(polite, "a plot", deadline=0.01)
    other = engine.submit(polite, "a plot", deadline=60)
    time.sleep(0.05)
    held.set()
    with pytest.raises(DeadlineError, match=r"the deadline passed \d+\.\d+.* before"):
        late.result(30)
    assert other.result(30)
    assert rows == [1]
    assert engine.counts["expired"] == 1


def test_a_cancelled_future_is_dropped(engine, held, polite, monkeypatch):
    rows = computed_rows(monkeypatch)
    cancelled, other = (engine.submit(polite, "a plot") for _ in range(2))
    assert cancelled.cancel()
    held.set()
    assert other.result(30)
    assert rows == [1]
    assert engine.counts["cancelled"] == 1


def test_a_full_queue_says_how_long_to_wait(polite):
    with Engine(queue_tokens=20) as engine:
        engine.pin(polite)
        engine.submit(polite, TEXTS[0]).result(30)  # the rate is known now
        begun, free = threading.Event(), threading.Event()
        engine._between_batches(lambda: (begun.set(), free.wait(30)))
        assert begun.wait(30)
        futures = [engine.submit(polite, TEXTS[3]) for _ in range(2)]
        with pytest.raises(OverloadedError, match=r"the queue is full: 2\d tokens") as error:
            engine.submit(polite, "a plot")
        assert error.value.wait > 0
        assert engine.counts["refused"] == 1
        free.set()
        assert [each.result(30) for each in futures]
        engine.submit(polite, "a plot").result(30)


def test_a_bad_input_fails_alone(engine, held, polite):
    good = engine.submit(polite, TEXTS[0])
    several = engine.submit(polite, ["a plot", "a movie"])
    wrong = engine.submit(polite, {})
    number = engine.submit(polite, 3)
    held.set()
    assert good.result(30)
    with pytest.raises(DataError, match="a list of 2 inputs"):
        several.result(30)
    for each in (wrong, number):
        with pytest.raises(DataError):
            each.result(30)
    assert engine.is_alive


def test_rows_and_pairs_are_read_as_in_predict(engine, polite):
    text = engine.submit(polite, TEXTS[0]).result(30)
    assert same_answer(engine.submit(polite, {"text": TEXTS[0]}).result(30), text)


def test_an_adapter_that_cannot_be_loaded_fails_its_requests(engine, polite, tmp_path):
    missing = engine.submit(str(tmp_path / "none"), "a plot")
    unknown = engine.submit("nobody@3", "a plot")
    with pytest.raises(FileError):
        missing.result(30)
    with pytest.raises(RegistryError):
        unknown.result(30)
    assert engine.submit(polite, "a plot").result(30)


def test_nan_in_an_adapter_fails_its_rows_alone(engine, held, backbone, tmp_path, polite):
    broken = write_adapter(backbone, tmp_path / "broken", seed=5)
    tags = write_adapter(backbone, tmp_path / "tags", example=EXAMPLES[5])
    held.set()
    engine.pin(broken, tags)
    broken_adapter = next(
        each for each in engine.adapters._by_name.values() if each.reference == broken
    )
    with torch.no_grad():
        for slot_tensors in broken_adapter.model.model.named_parameters():
            name, parameter = slot_tensors
            if broken_adapter.name[:16] in name:
                parameter.fill_(float("nan"))
        body = broken_adapter.model.model
        ah.adapters(body)[broken_adapter.name].hold()  # once more, as it has changed
    free = threading.Event()
    engine._between_batches(lambda: free.wait(30))
    futures = [[engine.submit(a, t) for t in TEXTS] for a in (polite, broken, tags)]
    free.set()
    for number, adapter in ((0, polite), (2, tags)):
        found = [each.result(30) for each in futures[number]]
        assert same_answer(found, expected_answers(adapter, TEXTS))
    for each in futures[1]:
        with pytest.raises(ComputationError, match="NaN"):
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
    with pytest.raises(TooLargeError, match="does not fit into memory alone"):
        large.result(30)
    assert engine.is_alive


def test_a_dead_thread_fails_everything(engine, held, polite, monkeypatch):
    class Killed(BaseException):
        pass

    def die(self, asked):
        raise Killed("by a test")

    monkeypatch.setattr(SharedBody, "compute", die)
    futures = [engine.submit(polite, text) for text in TEXTS]
    held.set()
    for each in futures:
        with pytest.raises(StoppedError, match="has died") as error:
            each.result(30)
        assert "Killed: by a test" in str(error.value)
    engine._thread.join(30)
    assert not engine.is_alive
    with pytest.raises(StoppedError, match="has died"):
        engine.submit(polite, "a plot")


def test_closing_finishes_what_waits(polite):
    engine = Engine()
    futures = [engine.submit(polite, text) for text in TEXTS]  # its adapter is loaded meanwhile
    engine.close()
    assert all(each.result(0) for each in futures)
    assert not engine.is_alive
    with pytest.raises(StoppedError, match="the engine is closed"):
        engine.submit(polite, "a plot")
    engine.close()


def test_what_is_not_finished_in_time_fails(polite):
    engine = Engine()
    engine.pin(polite)
    free = threading.Event()
    engine._between_batches(lambda: free.wait(30))
    futures = [engine.submit(polite, text) for text in TEXTS]
    threading.Timer(0.3, free.set).start()
    engine.close(drain_seconds=0.05)
    for each in futures:
        with pytest.raises(StoppedError, match="closed before"):
            each.result(30)


def test_an_engine_that_is_closed_while_it_loads_fails_what_waits(polite):
    engine = Engine()
    future = engine.submit(polite, "a plot")
    engine.close(drain_seconds=0)
    with pytest.raises(StoppedError):
        future.result(30)


def test_what_is_computed_at_once_is_measured_unless_it_is_given(backbone, polite):
    with Engine(str(backbone), batch_tokens=77) as given, Engine(str(backbone)) as measured:
        for engine in (given, measured):
            engine.pin(None, polite)
        (given_body,) = given.adapters.models.bodies.values()
        (body,) = measured.adapters.models.bodies.values()
        assert given_body.limits.tokens == 77
        assert body.measured
        assert 16 <= body.limits.tokens <= 4096
        known = body.limits
        measured.submit(polite, "a plot").result(30)
        body.measure()
        assert body.limits == known


def test_rows_that_are_computed_together_are_side_by_side():
    affine, others = frozenset({("q", 0), ("v", 0)}), frozenset({("ffn", 0)})
    scales = frozenset({("k", 0), ("v", 0)})
    kinds = [affine, others, scales, affine, frozenset(), scales, others]
    ordered = [kinds[n] for n in by_kind(kinds)]
    assert sorted(by_kind(kinds)) == list(range(len(kinds)))
    changes = sum(some != other for some, other in pairwise(ordered))
    assert changes == 3
    assert abs(ordered.index(affine) - ordered.index(scales)) == 2


def test_the_bytes_of_an_adapter_are_those_that_leave_with_it(engine, held, polite, backbone):
    held.set()
    compacter = write_adapter(backbone, backbone.parent / "wide", "compacter(size=8, n=4)")
    engine.pin(polite, compacter)
    adapters = {each.reference: each for each in engine.adapters._by_name.values()}
    served = adapters[compacter]
    own = sum(t.nbytes for t in ah.adapters(served.model.model)[served.name].tensors().values())
    assert served.bytes > 2 * own  # its weights are written out in the banks
