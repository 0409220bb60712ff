"""What a server answers when something is wrong: of the request, an adapter, the registry, itself.

Each row of the table of required answers is here, over HTTP.
"""

import json
import os
import shutil
import socket
import threading
from urllib.parse import urlsplit

import pytest

import adapterhub as ah
from adapterhub.inference.open import AdapterSource
from adapterhub.registry.local import LocalRegistry
from adapterhub.serving import Engine
from adapterhub.serving.http import lifecycle as http_server
from adapterhub.serving.http.access import AllowedAdapters
from adapterhub.serving.http.request import Service
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
    names = (("v1", "team-polite"), ("v2", "team-polite"), ("s", "secret"))
    for seed, (own, name) in enumerate(names, 1):
        ah.publish(write_adapter(backbone, folder / own, seed=seed), name, registry=root)
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
    signed = Engine(registry=registry.root, signed=True)
    with signed, running(Service(signed, AllowedAdapters({}, ("*",)))) as url:
        answer = predict(url, "secret", TEXT)
    assert (answer.status, answer.message) == (502, "the adapter has no valid signature")


def test_another_backbone_names_both_fingerprints(url, registry, backbone, tmp_path):
    """Where one was named, and where an adapter has loaded it and the other one is not here."""
    other = tmp_path / "other-backbone"
    tiny_models.model("bert", "features", seed=7).save_pretrained(other)
    for file in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(backbone / file, other / file)
    ah.publish(write_adapter(other, tmp_path / "o"), "team-other", registry=registry.root)
    service = Service(Engine(str(backbone), registry=registry.root), AllowedAdapters({}, ("*",)))
    with service.engine, running(service) as named:
        answers = [predict(named, "team-other", TEXT)]
    shutil.rmtree(other)
    alone = predict(url, "team-other", TEXT)
    assert (alone.status, alone.json["error"]["code"]) == (502, "backbone_not_loaded")
    assert predict(url, "team-polite", TEXT).status == 200
    answers.append(predict(url, "team-other", TEXT))
    for answer in answers:
        assert answer.status == 409
        for name in ("secret", "team-other"):
            assert registry.resolve(name).fingerprint in answer.message
        assert str(backbone) not in answer.message


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


def test_requests_that_are_not_valid(url):
    for body, status, said in (
        (b"[" * 100_000, 422, "malformed"),
        (b'{"model": "team-polite", "inputs": "a"}', 422, "inputs: "),
        (b'{"model": "team-polite", "inputs": ["a"], "trunc": 1}', 422, "trunc: "),
        (b'{"model": 3, "inputs": ["a"]}', 422, "model: "),
        (b"", 422, "malformed"),
        (b'{"model": "team-polite", "inputs": ["\xff"]}', 422, "malformed"),
        (b'{"model": "team-polite", "inputs": []}', 400, "without inputs"),
        (b" " * (5 << 20), 413, "at most 4,194,304 bytes"),
        (b'{"model": "team-polite", "inputs": [%s""]}' % (b'"",' * 10**6), 413, "at most 1,024"),
    ):
        answer = ask(url, "/v1/predict", body)
        assert (answer.status, said in answer.data.decode()) == (status, True), said


def test_a_body_that_is_endless_or_does_not_come(url, monkeypatch):
    head = b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\n"
    address = "127.0.0.1", urlsplit(url).port
    with socket.create_connection(address) as client:
        client.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(70):
            client.sendall(chunk)
        assert b" 413 " in client.recv(1000)
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.2)
    for begun in (b"", b'{"model": '):
        with socket.create_connection(address, timeout=10) as client:
            client.sendall(head + b"content-length: 99\r\n\r\n" + begun)
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


def test_an_input_without_a_text_is_refused_by_its_number_or_kept(url):
    for nothing in ("", " \n", "\u3000", None):
        refused = predict(url, "team-polite", TEXT, nothing, TEXT)
        assert refused.status == 400
        assert refused.message.startswith("input 1: the input has no text")
        kept = predict(url, "team-polite", TEXT, nothing, TEXT, keep_empty=True)
        assert kept.status == 200
        found = kept.json["predictions"]
        assert [each.get("empty", False) for each in found] == [False, True, False]
        assert found[0]["label"]


def test_a_server_that_is_not_ready(url, service):
    predict(url, "team-polite", TEXT)
    assert ask(url, "/readyz").json == {"status": "ready"}
    service.is_ready = False
    for path, body in (("/readyz", None), ("/v1/predict", {"model": "a", "inputs": ["b"]})):
        answer = ask(url, path, body)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert ask(url, "/healthz").status == 200


def test_versions_move_under_load_and_no_row_is_of_another_one(url, registry, service, published):
    """Forty times with ADAPTERHUB_TESTS=all, or ADAPTERHUB_RELOADS times."""
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
    moves = int(os.environ.get("ADAPTERHUB_RELOADS", 40 if ALL else 6))
    for number in range(moves):
        registry.tag(registry.resolve("team-polite", f"v{2 - number % 2}"), "stable")
        service.refresh()
    stop.set()
    for each in threads:
        each.join(60)
    assert not wrong
    assert service.engine.adapters.counts["refreshes"] == moves
    assert service.engine.counts["errors"] == 0
