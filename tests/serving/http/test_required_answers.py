"""What a server answers when something is wrong: of the request, an adapter, the registry, itself.

Each row of the table of required answers is here, over HTTP.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest
import torch

import adapterhub as ah
from adapterhub.inference.open import AdapterSource
from adapterhub.registry.local import LocalRegistry
from adapterhub.serving import Engine
from adapterhub.serving.http import lifecycle as http_server
from adapterhub.serving.http.access import AllowedAdapters
from adapterhub.serving.http.request import RequestLimits, Service
from adapterhub.serving.shared_backbone import SharedBody
from tests.kit import tiny_models
from tests.kit.selection import ALL
from tests.kit.server import TEXTS, busy, expected_answers, running, same_answer, write_adapter
from tests.kit.session import wait_until
from tests.kit.web_servers import ask, predict

TEXT = TEXTS[0]


@pytest.fixture(scope="module")
def published(backbone, tmp_path_factory):
    """Publish `team-polite`, twice, and `secret`; the tag `stable` is the first version."""
    folder = tmp_path_factory.mktemp("published")
    root = folder / "registry"
    for number in (1, 2):
        ah.publish(
            write_adapter(backbone, folder / f"v{number}", seed=number),
            "team-polite",
            registry=root,
        )
    ah.publish(write_adapter(backbone, folder / "s", seed=3), "secret", registry=root)
    store = LocalRegistry(root)
    store.tag(store.resolve("team-polite", "v1"), "stable")
    return folder


@pytest.fixture
def registry(published, tmp_path):
    """Copy the registry, for tests change it."""
    return LocalRegistry(shutil.copytree(published / "registry", tmp_path / "registry"))


@pytest.fixture
def service(registry):
    """Allow what matches team-*, and a hub on a private address that nobody named."""
    with Engine(registry=registry.root, batch_tokens=256) as engine:
        service = Service(engine, AllowedAdapters({}, ("team-*",)))
        service.list_published()
        yield service


def in_background(function, *args, **more):
    """Call a function in a thread; return what returns its result."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*args, **more)), daemon=True)
    thread.start()

    def result():
        thread.join(60)
        return found[0]

    return result


def test_unknown_and_not_allowed_have_the_same_words(url):
    unknown, near = predict(url, "nothing", TEXT), predict(url, "team-polit@3", TEXT)
    hidden, version = predict(url, "secret", TEXT), predict(url, "team-polite@9", TEXT)
    for answer in (unknown, near, hidden, version):
        assert answer.status == 404
        assert answer.json["error"]["code"] == "adapter_not_found"
        assert str(os.sep) not in answer.message.replace("GET /v1/models", "")
    assert near.message.endswith("try: team-polite")
    assert hidden.message == unknown.message.replace("'nothing'", "'secret'")


def test_a_yanked_version_is_gone(url, registry, service):
    assert predict(url, "team-polite@1", TEXT).status == 200
    registry.yank(registry.resolve("team-polite", "v1"), "trained on the test set")
    assert predict(url, "team-polite@v1", TEXT).status == 410  # not loaded under this name
    with pytest.warns(UserWarning, match="is not served any more"):
        service.refresh()
    gone = predict(url, "team-polite@1", TEXT)
    assert (gone.status, "trained on the test set" in gone.message) == (410, True)
    assert predict(url, "team-polite", TEXT).json["model"] == "team-polite@v2"
    registry.yank(registry.resolve("team-polite", "v2"), "wrong labels")
    with pytest.warns(UserWarning, match="is not served any more"):
        service.refresh()
    assert "wrong labels" in predict(url, "team-polite", TEXT).message


def test_altered_files_are_not_computed_and_the_loaded_version_goes_on(url, registry, service):
    before = predict(url, "team-polite@stable", TEXT)
    (file,) = registry.root.glob("**/team-polite/v2/adapter.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(bytes(data))
    wrong = predict(url, "team-polite@2", TEXT)
    assert (wrong.status, wrong.message) == (502, "the files of the adapter are not valid")
    registry.tag(registry.resolve("team-polite", "v2"), "stable")
    with pytest.warns(UserWarning, match="stays at team-polite@v1"):
        service.refresh()
    after = predict(url, "team-polite@stable", TEXT)
    assert (after.status, after.json) == (200, before.json)


def test_an_adapter_that_is_not_signed_is_not_computed(registry):
    with Engine(registry=registry.root, signed=True) as engine:
        service = Service(engine, AllowedAdapters({}, ("*",)))
        with running(service) as url:
            answer = predict(url, "secret", TEXT)
    assert (answer.status, answer.message) == (502, "the adapter has no valid signature")


def test_another_backbone_names_both_fingerprints(url, registry, backbone, tmp_path):
    other = tmp_path / "other-backbone"
    tiny_models.model("bert", "features", seed=7).save_pretrained(other)
    for file in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(backbone / file, other / file)
    ah.publish(write_adapter(other, tmp_path / "o"), "team-other", registry=registry.root)
    theirs = registry.resolve("team-other").fingerprint
    ours = registry.resolve("secret").fingerprint
    service = Service(Engine(str(backbone), registry=registry.root), AllowedAdapters({}, ("*",)))
    with service.engine, running(service) as url:
        answer = predict(url, "team-other", TEXT)
    assert answer.status == 409
    assert ours in answer.message
    assert theirs in answer.message
    assert str(backbone) not in answer.message


def test_a_backbone_that_is_not_here_names_both_fingerprints(url, registry, backbone, tmp_path):
    """The server has loaded a backbone of its own, and none is named."""
    other = tmp_path / "other-backbone"
    tiny_models.model("bert", "features", seed=7).save_pretrained(other)
    for file in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(backbone / file, other / file)
    ah.publish(write_adapter(other, tmp_path / "o"), "team-other", registry=registry.root)
    shutil.rmtree(other)
    alone = predict(url, "team-other", TEXT)
    assert (alone.status, alone.json["error"]["code"]) == (502, "backbone_not_loaded")
    assert predict(url, "team-polite", TEXT).status == 200
    answer = predict(url, "team-other", TEXT)
    assert answer.status == 409, answer.data
    assert registry.resolve("secret").fingerprint in answer.message
    assert registry.resolve("team-other").fingerprint in answer.message


def test_without_the_registry_loaded_adapters_go_on(url, registry, service):
    before = predict(url, "team-polite", TEXT)
    registry.root.rename(registry.root.with_name("away"))
    assert predict(url, "team-polite", TEXT).json == before.json
    with pytest.warns(UserWarning, match="the registry is not read|stays at"):
        service.refresh()
    assert predict(url, "team-polite", TEXT).json == before.json
    missing = predict(url, "team-polite@1", TEXT)
    assert (missing.status, missing.headers["retry-after"]) == (503, "1")
    assert missing.message == "the registry cannot be read"
    registry.root.with_name("away").rename(registry.root)
    assert predict(url, "team-polite@1", TEXT).status == 200


def test_one_bad_input_of_32_is_named_and_others_are_answered(url, service, published):
    predict(url, "team-polite", TEXT)
    inputs = [*[TEXT] * 20, 3, *[TEXT] * 11]
    with busy(service.engine):
        others = [in_background(predict, url, "team-polite", text) for text in TEXTS]
        wait_until(lambda: service.engine.queued_requests == len(TEXTS))
        bad = predict(url, "team-polite", *inputs)
    assert bad.status == 400
    assert bad.message.startswith("input 20: cannot predict on int")
    found = [each().json["predictions"][0] for each in others]
    assert same_answer(found, expected_answers(str(published / "v2"), TEXTS))


def test_nan_in_one_adapter_fails_its_rows_alone(url, service, published):
    predict(url, "team-polite@1", TEXT)
    predict(url, "team-polite@2", TEXT)
    adapters = service.engine.adapters
    broken = adapters.loaded()[AdapterSource("team-polite@1")]
    with torch.no_grad():
        for name, parameter in broken.model.model.named_parameters():
            if broken.name[:16] in name:
                parameter.fill_(float("nan"))
    ah.adapters(broken.model.model)[broken.name].hold()  # once more, as it has changed
    with busy(service.engine):
        wrong = in_background(predict, url, "team-polite@1", TEXT)
        right = in_background(predict, url, "team-polite@2", TEXT)
        wait_until(lambda: service.engine.queued_requests == 2)
    assert (wrong().status, wrong().json["error"]["code"]) == (500, "not_finite")
    assert same_answer(
        right().json["predictions"], expected_answers(str(published / "v2"), (TEXT,))
    )


def test_out_of_memory_halves_the_batch_and_names_what_does_not_fit_alone(
    url, service, monkeypatch
):
    predict(url, "team-polite", TEXT)
    compute, tried = SharedBody.compute, []

    def small(self, asked):
        tried.append(len(asked))
        if len(asked) > 2 or "scene" in str(asked[0][1].example):
            raise torch.OutOfMemoryError("no memory")
        return compute(self, asked)

    monkeypatch.setattr(SharedBody, "compute", small)
    with busy(service.engine):
        others = in_background(predict, url, "team-polite", *[TEXT] * 8)
        wait_until(lambda: service.engine.queued_requests == 8)
    assert others().status == 200
    assert tried[:3] == [8, 4, 2]
    large = predict(url, "team-polite", TEXTS[5])
    assert (large.status, "does not fit into memory alone" in large.message) == (507, True)


def test_a_client_that_leaves_is_not_computed_for(url, service):
    predict(url, "team-polite", TEXT)
    body = json.dumps({"model": "team-polite", "inputs": [TEXT]}).encode()
    head = f"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    rows = service.engine.counts["rows"]
    with busy(service.engine):
        with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as client:
            client.sendall(head.encode() + body)
            wait_until(lambda: service.engine.queued_requests == 1)
        wait_until(lambda: next(iter(service.engine._waiting)).future.cancelled())
    wait_until(lambda: service.engine.counts["cancelled"] == 1)
    assert service.engine.counts["rows"] == rows


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"[" * 100_000, 422, "malformed"),
        (b'{"model": "team-polite", "inputs": "a"}', 422, "inputs: "),
        (b'{"model": "team-polite", "inputs": ["a"], "trunc": 1}', 422, "trunc: "),
        (b'{"model": 3, "inputs": ["a"]}', 422, "model: "),
        (b"", 422, "malformed"),
        (b'{"model": "team-polite", "inputs": ["\xff"]}', 422, "malformed"),
        (b'{"model": "team-polite", "inputs": []}', 400, "without inputs"),
        (b" " * (5 << 20), 413, "at most 4,194,304 bytes"),
        (b'{"model": "team-polite", "inputs": [%s""]}' % (b'"",' * 10**6), 413, "at most 1,024"),
    ],
    ids=["deep", "type", "field", "model", "empty", "utf8", "none", "large", "many"],
)
def test_requests_that_are_not_valid(url, body, status, said):
    answer = ask(url, "/v1/predict", body)
    assert answer.status == status
    assert said in answer.data.decode()


def test_a_body_without_a_length_is_limited_too(url):
    with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as client:
        client.sendall(
            b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(70):
            client.sendall(chunk)
        assert b" 413 " in client.recv(1000)


@pytest.mark.parametrize("begun", [b"", b'{"model": '])
def test_a_body_that_does_not_come(url, begun, monkeypatch):
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as client:
        head = b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n"
        client.sendall(head + begun)
        client.settimeout(10)
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_an_input_that_is_too_long_is_cut_only_where_asked(url, service):
    predict(url, "team-polite", TEXT)
    loaded = service.engine.adapters.loaded()[AdapterSource("team-polite")]
    limit = loaded.predictor.max_length
    long = " ".join(["movie"] * (2 * limit))
    refused = predict(url, "team-polite", TEXT, long)
    assert refused.status == 400
    assert refused.message.startswith("input 1: the input is too long: ")
    cut = predict(url, "team-polite", TEXT, long, truncate=True)
    assert (cut.status, cut.json["truncated"]) == (200, [1])
    assert predict(url, "team-polite", " ".join(["movie"] * (limit - 2))).json["truncated"] == []


@pytest.mark.parametrize("nothing", ["", " \n", "\u3000", None])
def test_an_input_without_a_text_is_refused_by_its_number_or_kept(nothing, url):
    refused = predict(url, "team-polite", TEXT, nothing, TEXT)
    assert refused.status == 400
    assert refused.message.startswith("input 1: the input has no text")
    kept = predict(url, "team-polite", TEXT, nothing, TEXT, keep_empty=True)
    assert kept.status == 200
    assert [each.get("empty", False) for each in kept.json["predictions"]] == [False, True, False]
    assert kept.json["predictions"][0]["label"]


def test_a_full_queue_says_when_to_come_again(registry):
    with Engine(registry=registry.root, queue_tokens=20) as engine:
        service = Service(engine, AllowedAdapters({}, ("*",)))
        with running(service) as url:
            predict(url, "secret", TEXT)
            with busy(engine):
                waiting = in_background(predict, url, "secret", TEXTS[5], TEXTS[3])
                wait_until(lambda: engine.queued_tokens >= 20)
                full = predict(url, "secret", TEXT)  # while the others still wait
            assert full.status == 429
            assert int(full.headers["retry-after"]) >= 1
            assert waiting().status == 200


def test_a_deadline_that_passed_is_not_computed(registry):
    with Engine(registry=registry.root) as engine:
        limits = RequestLimits(deadline=0.3)
        service = Service(engine, AllowedAdapters({}, ("*",)), limits=limits)
        engine.pin("secret")
        with running(service) as url:
            with busy(engine):
                late = in_background(predict, url, "secret", TEXT)
                wait_until(lambda: engine.queued_requests)
                time.sleep(0.4)
            assert late().status == 504
            assert engine.counts["rows"] == 0


def test_a_server_that_is_not_ready(url, service):
    predict(url, "team-polite", TEXT)
    assert ask(url, "/readyz").json == {"status": "ready"}
    service.is_ready = False
    for path, body in (("/readyz", None), ("/v1/predict", {"model": "a", "inputs": ["b"]})):
        answer = ask(url, path, body)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert ask(url, "/healthz").status == 200


def test_a_dead_compute_thread_is_seen(url, service, monkeypatch):
    class Killed(BaseException):
        pass

    def die(self, asked):
        raise Killed("by a test")

    predict(url, "team-polite", TEXT)
    monkeypatch.setattr(SharedBody, "compute", die)
    assert predict(url, "team-polite", TEXT).status == 503
    assert predict(url, "team-polite", TEXT).status == 503
    assert ask(url, "/healthz").status == 503
    assert ask(url, "/readyz").status == 503
    assert b"adapterhub_up 0.0" in ask(url, "/metrics").data


def test_a_compute_thread_that_is_stuck_is_seen(url, service, monkeypatch):
    monkeypatch.setattr("adapterhub.serving.http.request.STUCK_SECONDS", 0.05)
    with busy(service.engine):
        wait_until(lambda: ask(url, "/healthz").status == 503)
    wait_until(lambda: ask(url, "/healthz").status == 200)


def test_versions_move_under_load_and_no_row_is_of_another_one(url, registry, service, published):
    """A hundred times with ADAPTERHUB_TESTS=all, or ADAPTERHUB_RELOADS times."""
    expected = {
        f"team-polite@v{n}": expected_answers(str(published / f"v{n}"), (TEXT,)) for n in (1, 2)
    }
    stop, wrong = threading.Event(), []

    def load():
        while not stop.is_set():
            answer = predict(url, "team-polite@stable", TEXT)
            right = answer.status == 200 and same_answer(
                answer.json["predictions"], expected[answer.json["model"]]
            )
            if not right or answer.headers["x-adapter-version"] != answer.json["model"]:
                wrong.append(answer)

    predict(url, "team-polite@stable", TEXT)
    threads = [threading.Thread(target=load) for _ in range(4)]
    for each in threads:
        each.start()
    moves = int(os.environ.get("ADAPTERHUB_RELOADS", 100 if ALL else 10))
    for number in range(moves):
        registry.tag(registry.resolve("team-polite", f"v{2 - number % 2}"), "stable")
        service.refresh()
    stop.set()
    for each in threads:
        each.join(60)
    assert not wrong
    assert service.engine.adapters.counts["refreshes"] == moves
    assert service.engine.counts["errors"] == 0
