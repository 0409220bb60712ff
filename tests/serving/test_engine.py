"""The engine: deadlines, the queue, errors of one request, and the end."""

import threading
import time

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import DataError, FileError, RegistryError
from adapterhub.serving import Engine
from adapterhub.serving.shared_backbone import SharedBody
from adapterhub.web.errors import (
    ComputationError,
    DeadlineError,
    OverloadedError,
    StoppedError,
    TooLargeError,
)
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
    with pytest.raises(DeadlineError, match=r"the deadline passed \d+\.\d+.* before"):
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
            with pytest.raises(OverloadedError, match=r"the queue is full: 2\d tokens") as error:
                engine.submit(polite, "a plot")
            assert error.value.wait > 0
            assert engine.counts["refused"] == 1
        assert [each.result(30) for each in futures]
        engine.submit(polite, "a plot").result(30)


def test_a_bad_request_fails_alone(engine, held, polite, tmp_path):
    good = engine.submit(polite, TEXTS[0])
    wrong = {
        engine.submit(polite, ["a plot", "a movie"]): (DataError, "a list of 2 inputs"),
        engine.submit(polite, {}): (DataError, "."),
        engine.submit(polite, 3): (DataError, "."),
        engine.submit(str(tmp_path / "none"), "a plot"): (FileError, "."),
        engine.submit("nobody@3", "a plot"): (RegistryError, "."),
    }
    held.set()
    assert good.result(30)
    for future, (error, words) in wrong.items():
        with pytest.raises(error, match=words):
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
            with pytest.raises(StoppedError, match="closed before" if is_loaded else None):
                each.result(30)


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


def test_the_bytes_of_an_adapter_are_those_that_leave_with_it(engine, backbone, tmp_path):
    compacter = write_adapter(backbone, tmp_path / "wide", "compacter(size=8, n=4)")
    engine.pin(compacter)
    adapters = {each.reference: each for each in engine.adapters._by_name.values()}
    served = adapters[compacter]
    own = sum(t.nbytes for t in ah.adapters(served.model.model)[served.name].tensors().values())
    assert served.bytes > 2 * own  # its weights are written out in the banks
