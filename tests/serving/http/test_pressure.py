"""A server under pressure: wrong inputs, full queues, deadlines, its end, and a kill."""

import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

import adapterhub as ah
from adapterhub.serving import Engine
from adapterhub.serving.http import request as services
from adapterhub.serving.http.lifecycle import ENDPOINTS
from adapterhub.serving.http.request import RequestLimits
from adapterhub.serving.shared_backbone import ClassModel
from adapterhub.web.tokens import TokenFile
from tests.kit.server import EXAMPLES, TEXTS, busy, running, service_of, started, write_adapter
from tests.kit.session import wait_until
from tests.kit.web_servers import ask, predict

QUEUE = 60  # tokens


@pytest.fixture(scope="module")
def engine(backbones, llama_folders):
    """Start an engine with a small queue."""
    with Engine(str(backbones("llama")), queue_tokens=QUEUE) as engine:
        engine.pin(*llama_folders.values())
        yield engine


@pytest.fixture
def pressed(engine, llama_folders):
    """Serve with limits of its own; yield the address and the service."""
    service = service_of(engine, llama_folders)
    with running(service) as url:
        yield url, service


# Errors of one input


def test_no_input_is_an_error_of_the_server(pressed):
    bad_ones = ("", "\ud800", None, 5, [], {}, [""], ["a", "b", "c"], "\x00", ["a", "\udfff"])
    for name, bad in itertools.product(("writer", "vectors", "classes", "tags"), bad_ones):
        answer = predict(pressed[0], name, "a plot", bad, "fine")
        assert answer.status < 500, answer.data
        if answer.status == 400:
            assert "input 1" in answer.message or "rows" in answer.message, answer.message


# A queue that is full


def test_a_request_that_is_larger_than_the_queue_and_one_that_meets_a_full_one(
    pressed, monkeypatch
):
    url, service = pressed
    engine = service.engine
    texts = [f"{TEXTS[3]} {n}" for n in range(80)]
    found = predict(url, "classes", *texts)
    assert found.status == 200, found.data
    assert len(found.json["predictions"]) == len(texts)
    assert engine.queued_tokens == 0
    body = {"model": "writer", "prompt": texts[:20], "max_tokens": 2}
    written = ask(url, "/v1/completions", body)
    assert [each["index"] for each in written.json["choices"]] == list(range(20))
    service.limits = RequestLimits(deadline=7.0)
    with busy(engine):
        while engine.queued_tokens < QUEUE:
            engine.submit(service.allowed.named["classes"], TEXTS[3])
        monkeypatch.setattr(engine, "_rate", 1e-6)
        for answer in (
            predict(url, "classes", TEXTS[3]),
            ask(url, "/v1/completions", {"model": "writer", "prompt": "a", "max_tokens": 2}),
        ):
            assert answer.status == 429
            assert 0 < int(answer.headers["retry-after"]) <= 7  # below the deadline


# Deadlines


@pytest.mark.parametrize("inputs", [1, 80])
def test_a_deadline_is_told_when_it_passes(pressed, inputs):
    url, service = pressed
    service.limits = RequestLimits(deadline=0.4)
    with busy(service.engine):
        began = time.monotonic()
        answers = [
            predict(url, "classes", *[TEXTS[3]] * inputs),
            ask(url, "/v1/completions", {"model": "writer", "prompt": "a", "stream": True}),
        ]
        seconds = time.monotonic() - began
    assert [each.status for each in answers] in ([504, 504], [504, 429])
    assert seconds < 4


def test_a_text_that_is_begun_is_not_cut_by_the_deadline(pressed, monkeypatch):
    url, service = pressed
    service.limits = RequestLimits(deadline=0.5, generation_time=60)
    body = {"model": "writer", "prompt": "a plot", "max_tokens": 30, "temperature": 0}
    whole = ask(url, "/v1/completions", body)
    assert whole.json["usage"]["completion_tokens"] > 5
    slow = service.engine._generators.step

    def step():
        time.sleep(0.04)
        slow()

    monkeypatch.setattr(service.engine._generators, "step", step)
    for stream in (False, True):
        answer = ask(url, "/v1/completions", {**body, "stream": stream})
        assert answer.status == 200
        assert b"deadline" not in answer.data
    service.limits = RequestLimits(deadline=0.5, generation_time=0.3)
    assert b"deadline" in ask(url, "/v1/completions", {**body, "stream": True}).data
    assert ask(url, "/v1/completions", body).status == 504


# Health


def test_a_long_text_is_progress(pressed, monkeypatch):
    url, _ = pressed
    monkeypatch.setattr(services, "STUCK_SECONDS", 0.5)
    computed = ClassModel.compute

    def slowly(self, asked):
        model, passes = self.model, []

        def pause(*_):
            passes.append(time.sleep(0.2))

        with_pause = model.register_forward_hook(pause)
        try:
            return computed(self, asked)
        finally:
            with_pause.remove()
            assert len(passes) == 4

    monkeypatch.setattr(ClassModel, "compute", slowly)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(predict, url, "writer", "a plot")
        seen = []
        while not answer.done():
            seen.append(ask(url, "/healthz").status)
            time.sleep(0.02)
    assert answer.result().status == 200
    assert set(seen) == {200}
    assert len(seen) > 5


def test_a_thread_that_computes_nothing_is_stuck(pressed, monkeypatch):
    url, service = pressed
    monkeypatch.setattr(services, "STUCK_SECONDS", 0.2)
    with busy(service.engine):
        time.sleep(0.4)
        assert ask(url, "/healthz").status == 503
    assert predict(url, "classes", "a plot").status == 200
    assert ask(url, "/healthz").status == 200


def test_bodies_that_are_wrong_in_many_places_tell_of_few():
    """Each error costs; a list of 10,000 wrong items had some for each of its forms."""

    def errors(request, body):
        try:
            request.model_validate_json(body)
        except ValidationError as error:
            return error.error_count()
        return 0

    requests = [each.request for each in ENDPOINTS if each.request is not None]
    for item in ("null", "[]", "{}", "1", '1,"a"', "[null]", "true", "1.5"):
        items = f"[{','.join([item] * 2_000)}]"
        for request in requests:
            for name in request.model_fields:
                assert errors(request, f'{{"{name}": {items}}}') < 50, (item, request, name)


# The end


def test_what_was_read_is_answered_before_the_server_leaves(llama_folders, backbones):
    named = [f"{name}={folder}" for name, folder in llama_folders.items()]
    with started(adapters=tuple(named), backbone=str(backbones("llama"))) as (url, server, errors):
        opened = [http.client.HTTPConnection(urlsplit(url).netloc, timeout=30) for _ in range(4)]
        for each in opened:
            each.connect()
        body = json.dumps({"model": "classes", "inputs": ["a plot"]})
        kept = opened[0]
        kept.request("POST", "/v1/predict", body)
        first = kept.getresponse()
        assert (first.status, first.read() != b"") == (200, True)
        with busy(server.service.engine) as free:
            opened[1].request("POST", "/v1/predict", body)
            wait_until(lambda: server.service.engine.queued_tokens)
            server.stop()
            assert server.service.is_ready is False
            for each in (opened[0], opened[2]):  # kept alive, and without a request so far
                each.request("POST", "/v1/predict", body)
            time.sleep(0.3)
            free.set()
            answers = [each.getresponse() for each in opened[:3]]
            statuses = [(each.status, each.getheader("connection")) for each in answers]
        assert statuses == [(200, "close")] * 3
        host, port = urlsplit(url).netloc.split(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5)
        for each in (*answers, *opened):
            each.close()
    assert not errors


# A server as a process, under load: told to leave, killed, and started again.


# What a client sees of a connection that is closed before its request was read: the end comes
# after the request was sent, or before. An answer that is lost would be a RemoteDisconnected.
UNREAD = ("ConnectionResetError", "BrokenPipeError")


@pytest.fixture(scope="module")
def registry(backbone, tmp_path_factory):
    root = tmp_path_factory.mktemp("process")
    ah.publish(write_adapter(backbone, root / "a", example=EXAMPLES[0]), "polite",
               registry=root / "registry")  # fmt: skip
    return root / "registry"


@contextmanager
def process(registry, *flags):
    """Start a server; yield its address, when it is ready, and the process."""
    words = [sys.executable, "-m", "adapterhub", "serve", "polite", "--port", "0", *flags]
    words += ["--registry", str(registry)]
    pipe = subprocess.PIPE
    started = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True)
    try:
        for line in started.stdout:
            if found := re.search(r"ready: (http://\S+) ", line):
                break
        else:
            raise AssertionError(started.stderr.read())
        yield found[1], started
    finally:
        started.kill()
        started.communicate(timeout=30)


@contextmanager
def load(url, token):
    """Ask in four threads all the time; yield the status of each answer, or its error."""
    stop, found = threading.Event(), []

    def ask():
        while not stop.is_set():
            try:
                found.append(predict(url, "polite", *TEXTS, token=token).status)
            except (OSError, http.client.HTTPException) as error:
                found.append(type(error).__name__)
                time.sleep(0.02)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(ask)
        try:
            yield found
        finally:
            stop.set()


@pytest.mark.apart
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_server_that_is_killed_starts_again_and_finishes_when_it_is_told_to_leave(
    registry, tmp_path
):
    """No request is lost: each is answered, told that the server leaves, or not accepted."""
    file = TokenFile(tmp_path / "tokens.json")
    token = file.create("one")
    flags = ["--tokens", str(file.path), "--drain", "10s", "--no-log-requests"]
    with process(registry, *flags) as (url, server):
        with load(url, token) as found:
            wait_until(lambda: len(found) >= 20)
            server.kill()
            assert server.wait(20) == -signal.SIGKILL
        assert {each for each in found if isinstance(each, int)} == {200}
    with process(registry, *flags, "--port", url.rpartition(":")[2]) as (again, server):
        assert again == url
        with load(url, token) as found:
            wait_until(lambda: len(found) >= 50)
            began = time.monotonic()
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
            assert time.monotonic() - began < 11
        assert {*found} <= {200, 503, "ConnectionRefusedError", *UNREAD}
        assert found.count(200) >= 50
        assert sum(each in UNREAD for each in found) <= 4
        assert "Traceback" not in server.stderr.read()
    assert file.tokens()[0].used
