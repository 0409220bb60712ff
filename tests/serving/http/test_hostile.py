"""A client that means harm: paths, hubs, tokens of others, headers, labels, logs."""

import json
import logging
import socket
from urllib.parse import urlsplit

import pytest

import adapterhub as ah
from adapterhub.inference.open import AdapterSource
from adapterhub.serving import Engine
from adapterhub.serving.http.access import AllowedAdapters
from adapterhub.serving.http.request import RequestLimits, Service
from adapterhub.web.tokens import TokenFile
from tests.kit.server import EXAMPLES, TEXTS, running, service_of, write_adapter
from tests.kit.web_servers import ask, predict

TEXT = TEXTS[0]


@pytest.fixture(scope="module")
def registry(backbone, tmp_path_factory, request):
    """Publish adapters of two teams."""
    root = tmp_path_factory.mktemp("hostile")
    for seed, name in enumerate(("red-one", "blue-one"), 1):
        folder = write_adapter(backbone, root / name, seed=seed, example=EXAMPLES[seed - 1])
        ah.publish(folder, name, registry=root / "registry")
    return root / "registry"


@pytest.fixture
def tokens(tmp_path):
    """Two teams' tokens, one that has expired, and one of an administrator."""
    file = TokenFile(tmp_path / "tokens.json")
    return file, {
        "red": file.create("red", adapters=["red-*"]),
        "blue": file.create("blue", adapters=["blue-*"]),
        "old": file.create("old", seconds=1e-6),
        "admin": file.create("admin", roles=["admin", "predict"]),
    }


@pytest.fixture
def service(registry, tokens):
    """Allow all of the registry."""
    with Engine(registry=registry) as engine:
        service = Service(engine, AllowedAdapters({}, ("*",)), tokens=tokens[0], metric_adapters=1)
        service.list_published()
        yield service


@pytest.fixture
def local(registry, tmp_path, backbone, monkeypatch):
    """A server without tokens; a folder where it was started has the name of no adapter."""
    write_adapter(backbone, tmp_path / "stray", seed=9)
    monkeypatch.chdir(tmp_path)
    with Engine(registry=registry) as engine:
        service = Service(engine, AllowedAdapters({"red-one": AdapterSource("red-one")}, ("*",)))
        with running(service) as url:
            yield url, service, tmp_path


def test_a_clients_word_opens_nothing(local, monkeypatch):
    url, service, folder = local
    asked, look_up = set(), socket.getaddrinfo

    def seen(host, port, *args, **more):
        asked.add(f"http://{host}:{port}")
        return look_up(host, port, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", seen)
    for model in (
        str(folder / "stray"), "./stray", "stray", f"../{folder.name}/stray", "~/stray",
        f"file://{folder / 'stray'}", "hf:acme/polite", "http://127.0.0.1:9/acme/polite",
        "http://localhost:9/acme/polite", "https://169.254.169.254/latest/meta-data",
        "https://10.0.0.1/acme/polite", "https://user:secret@hub.example.org/a/b",
        "s3://bucket/prefix", "red-one@../../etc/passwd", "red-one\n", "red-one\x00",
        "RED-ONE/../red-one", "x" * 100_000, "red-one@" + "9" * 5000, "", "\u202ered-one",
    ):  # fmt: skip
        answer = predict(url, model, TEXT)
        assert answer.status == 404, model
        assert answer.json["error"]["code"] == "adapter_not_found"
        assert len(answer.data) < 600
    assert asked == {url}
    assert not service.engine.models()


def test_a_hub_or_a_version_is_asked_only_where_the_operator_named_it():
    patterns = ("hf:acme/*", "https://hub.example.org/acme/*")
    named = {"red-one@1": AdapterSource("red-one@1"), "blue-one": AdapterSource("blue-one")}
    allowed = AllowedAdapters(named, patterns)
    for model in ("hf:acme/polite@main", "https://hub.example.org/acme/polite", "blue-one@7"):
        assert allowed.find(model) == AdapterSource(model)
    for model in (
        "hf:other/polite", "green", "https://hub.example.org.evil.com/acme/polite",
        "http://127.0.0.1/acme/polite", "red-one", "red-one@2", "red-one@v1",
    ):  # fmt: skip
        with pytest.raises(ah.errors.AdapterhubError, match="is served"):
            allowed.find(model)


def test_a_request_needs_a_valid_token_and_a_role(url, tokens):
    good, admin = tokens[1]["red"], tokens[1]["admin"]
    bad = ["", "x", "ah_", good[:-1], good + "x", good.lower(), f"ah_{'A' * 43}", tokens[1]["old"]]
    for token in bad:
        answer = predict(url, "red-one", TEXT, token=token)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.message.startswith("no valid token")
    assert predict(url, "red-one", TEXT).status == 401
    assert ask(url, "/v1/predict", b"", {"authorization": f"Basic {good}"}).status == 401
    assert predict(url, "red-one", TEXT, token=good).status == 200
    for path, body, status in (("/admin/refresh", {}, 403), ("/metrics", None, 200)):
        for token, expected in ((good, status), (admin, 200)):
            answer = ask(url, path, body, {"authorization": f"Bearer {token}"})
            assert answer.status == expected
        assert ask(url, path, body).status == 401


def test_an_adapter_of_another_token_is_one_that_does_not_exist(url, tokens):
    """The words and the headers are the same, and so is the work: nothing is looked up."""
    red = tokens[1]["red"]
    blue = predict(url, "blue-one", TEXT, token=tokens[1]["blue"])
    assert blue.status == 200
    answers = {name: predict(url, name, TEXT, token=red) for name in ("blue-one", "glue-one")}
    for answer in answers.values():
        assert answer.status == 404
        assert "blue-one" not in answer.message.replace("no adapter 'blue-one'", "")
        assert "x-adapter-digest" not in answer.headers
    same = answers["glue-one"].data.replace(b"glue-one", b"blue-one")
    assert same == answers["blue-one"].data
    assert answers["blue-one"].headers.keys() == answers["glue-one"].headers.keys()


def test_each_token_has_its_own_rate(registry, tokens):
    with Engine(registry=registry) as engine:
        limits = RequestLimits(per_minute=2)
        service = Service(engine, AllowedAdapters({}, ("*",)), tokens=tokens[0], limits=limits)
        with running(service) as url:
            for name in ("red", "blue"):
                found = [predict(url, f"{name}-one", TEXT, token=tokens[1][name]) for _ in range(3)]
                assert [each.status for each in found] == [200, 200, 429]
                assert 1 <= int(found[2].headers["retry-after"]) <= 30
            assert ask(url, "/healthz").status == 200


def test_no_text_and_no_token_is_logged(url, tokens, caplog, monkeypatch):
    marked, token = "a secret sentence", tokens[1]["red"]
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with caplog.at_level(logging.DEBUG):
        headers = {"authorization": f"Bearer {token}", "traceparent": trace}
        body = {"model": "red-one", "inputs": [marked]}
        assert ask(url, "/v1/predict", body, headers).status == 200
        assert ask(url, f"/v1/{token}/{marked.replace(' ', '_')}").status == 404
        predict(url, marked, marked, token=token)
        predict(url, "red-one", {"text": marked, marked: marked}, 7, token=token)
        ask(url, "/v1/predict", marked.encode(), headers)

        def fail(*args, **more):
            raise KeyError(marked)

        monkeypatch.setattr("adapterhub.serving.http.lifecycle.rendered", fail)
        assert ask(url, "/v1/predict", body, headers).status == 500
    logged = caplog.text + "".join(str(record.__dict__) for record in caplog.records)
    assert "KeyError" in caplog.text
    assert not [text for text in (marked, marked.replace(" ", "_"), token) if text in logged]
    line, *_ = [json.loads(r.message) for r in caplog.records if r.name == "adapterhub.requests"]
    expected = {
        "adapter": "red-one@v1",
        "token": "red",
        "status": 200,
        "trace": trace.split("-")[1],
    }
    assert line.items() >= expected.items()


def test_labels_of_metrics_do_not_grow(url, tokens):
    admin = tokens[1]["admin"]
    predict(url, "red-one", TEXT, token=admin)
    predict(url, "blue-one", TEXT, token=admin)
    ask(url, "/v1/nothing")  # the first, with its histogram
    before = ask(url, "/metrics", headers={"authorization": f"Bearer {admin}"}).data.count(b"\n")
    for number in range(50):
        predict(url, f"unknown-{number}", TEXT, token=admin)
        ask(url, f"/v1/nothing/{number}")
        predict(url, "red-one@1", TEXT, token=admin)
    text = ask(url, "/metrics", headers={"authorization": f"Bearer {admin}"}).data.decode()
    assert text.count("\n") - before < 60  # the first 404, with its histogram
    assert 'adapter="red-one@v1"' in text
    assert 'adapter="other"' in text
    assert "blue-one" not in text
    assert "unknown" not in text


def raw(url, data, seconds=10.0):
    """Send bytes; return what comes until the server closes, or there is nothing for a second."""
    with socket.create_connection(("127.0.0.1", urlsplit(url).port), timeout=seconds) as client:
        client.sendall(data)
        client.settimeout(1.0)
        found = b""
        try:
            while more := client.recv(65536):
                found += more
        except TimeoutError:
            pass
        return found


def test_smuggled_requests(local):
    """Two lengths, or a length and chunks, are refused; the rest is never a second request."""
    url, _, _ = local
    inner = b"GET /admin HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for heads in (
        b"content-length: 4\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 4\r\ncontent-length: 40\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
        b"transfer-encoding : chunked\r\n",
        b"content-length: +4\r\n",
        b"content-length: 4\r\n content-length: 40\r\n",
    ):
        head = b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\n" + heads + b"\r\n"
        found = raw(url, head + b"0\r\n\r\n" + inner)
        assert found.count(b"HTTP/1.1 ") <= 1, heads
        assert b" 200 " not in found
    large = {"x-large": "a" * 40_000}
    assert ask(url, "/healthz", headers=large).status == 431
    assert ask(url, "/healthz", headers={f"x-{n}": "a" * 100 for n in range(90)}).status == 200


def test_pages_of_others_do_not_reach_a_server_without_tokens(local):
    """A name that resolves to this machine, or a request across origins."""
    url, _, _ = local
    body = {"model": "red-one", "inputs": [TEXT]}
    hosts = ("evil.example.org", "localhost.evil.example.org", "[::ffff:1.2.3.4]", "][")
    origins = ("https://evil.example.org", "null")
    for headers in (*({"host": each} for each in hosts), *({"origin": each} for each in origins)):
        assert ask(url, "/v1/predict", body, headers).status == 403, headers
        assert ask(url, "/admin/refresh", {}, headers).status == 403
    assert ask(url, "/healthz", headers={"origin": url, "host": "localhost"}).status == 200


def test_every_answer_is_of_its_type_and_is_not_kept(local):
    url, _, _ = local
    for path in ("/healthz", "/docs", "/openapi.json", "/v1/nothing", "/v1/predict"):
        headers = ask(url, path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
    answer = ask(url, "/healthz", method="HEAD")
    assert (answer.status, answer.data) == (200, b"")


def test_the_same_bytes_under_two_names_have_the_name_that_was_asked_for(
    backbone, polite, tmp_path, no_home
):
    """Neither the folder of an adapter nor the name that another client may ask for is told."""
    ah.publish(polite, "team-one", registry=tmp_path / "registry")
    ah.publish(polite, "team-two", registry=tmp_path / "registry")
    with Engine(str(backbone), registry=tmp_path / "registry") as engine:
        names = {"team-one": "team-one", "team-two": "team-two"}
        with running(service_of(engine, {"mine": polite}, **names)) as url:
            found = [predict(url, name, TEXTS[0]) for name in ("mine", "team-one", "team-two")]
    assert [each.json["model"] for each in found] == ["mine", "team-one@v1", "team-two@v1"]
    assert len({str(each.json["predictions"]) for each in found}) == 1
    assert len({each.headers["x-adapter-digest"] for each in found}) == 1
