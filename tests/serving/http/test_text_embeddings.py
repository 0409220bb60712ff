"""What clients of text-embeddings-inference send, and what they read."""

from __future__ import annotations

import math

import pytest
from requests import get, post

from adapterhub.serving import Engine
from tests.kit.server import (
    CONTEXT,
    NAMED,
    PAIRS,
    TEXTS,
    TaskExample,
    expected_answers,
    running,
    same_answer,
    service_of,
    write_adapter,
)


@pytest.fixture(scope="module")
def two(server, backbone, tmp_path_factory):
    """Serve one adapter for vectors, and one for classes; and another, for longer vectors."""
    folder = tmp_path_factory.mktemp("long") / "vectors"
    task = "embedding(normalize=false, query_prefix='a ')"
    long = write_adapter(backbone, folder, example=TaskExample(task, "embedding"))
    with Engine(str(backbone)) as engine:
        folders = {n: server.folders[n] for n in ("embedding", "classification")}
        services = service_of(engine, folders), service_of(engine, {"long": long})
        with running(services[0]) as url, running(services[1]) as other:
            yield url, other, long


def ask(url, body, status=200, **headers):
    answer = post(url, json=body, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_the_only_adapter_that_fits_answers(server, two):
    expected = [each["vector"] for each in server.expected("embedding", *TEXTS)]
    found = ask(f"{two[0]}/embed", {"inputs": list(TEXTS), "truncate": True, "normalize": True})
    assert same_answer(found, expected)
    assert same_answer(ask(f"{two[0]}/embed", {"inputs": TEXTS[0]}), expected[:1])
    classes = ask(f"{two[0]}/predict", {"inputs": TEXTS[0]})
    scores = server.expected("classification", TEXTS[0])[0]["scores"]
    assert {each["label"]: each["score"] for each in classes} == pytest.approx(scores, abs=1e-5)
    left = {"truncate": True, "truncation_direction": "left"}
    for wrong in ({"dimensions": 3}, {"normalize": False}, left):  # another vector
        ask(f"{two[0]}/embed", {"inputs": "a plot", **wrong}, 400)


def test_several_that_fit_are_named(server, monkeypatch):
    found = ask(f"{server.url}/predict", {"inputs": "a plot"}, 400)
    assert "classification" in found["error"]
    assert "tagging" not in found["error"]
    assert "x-adapter" in found["error"]
    answer = post(f"{server.url}/predict", json={"inputs": "a"}, headers={"x-adapter": "many"})
    assert answer.headers["x-adapter-version"] == "many"
    assert len(answer.json()) == len(NAMED["many"].labels)
    engine, asked = server.service.engine, []
    monkeypatch.setattr(engine.adapters, "find", asked.append)
    with running(service_of(engine, {f"n{n}": f"missing-{n}" for n in range(40)})) as url:
        assert "n0, n1" in ask(f"{url}/embed", {"inputs": "a"}, 400)["error"]
    assert not asked  # of very many none is loaded to find one that fits


def test_texts_pairs_and_batches(server):
    url, expected = f"{server.url}/predict", server.expected("entailment")
    single = ask(url, {"model": "entailment", "inputs": list(PAIRS[0])})
    batch = ask(url, {"model": "entailment", "inputs": [list(each) for each in PAIRS]})
    assert same_answer(batch[0], single)
    for found, answer in zip(batch, expected, strict=True):
        scores = sorted(answer["scores"].values(), reverse=True)
        assert same_answer([each["score"] for each in found], scores)
    texts = ask(url, {"model": "multi-label", "inputs": [[each] for each in TEXTS]})
    assert len(texts) == len(TEXTS)
    (number,) = ask(url, {"model": "regression", "inputs": "a plot"})
    assert same_answer(number["score"], server.expected("regression", "a plot")[0]["value"])
    ask(url, {"model": "classification", "inputs": ["a", "b"]}, 400)  # a pair
    ask(url, {"model": "entailment", "inputs": [["a", "b", "c"]]}, 400)
    ask(url, {"model": "classification", "inputs": []}, 400)


def test_length_and_prefix_of_vectors(two):
    _, url, folder = two
    vector = expected_answers(folder, (CONTEXT,))[0]["vector"]
    size = math.hypot(*vector)
    assert abs(size - 1) > 0.1
    for name in (None, "query"):
        body = {"inputs": CONTEXT, "prompt_name": name}
        assert same_answer(ask(f"{url}/embed", body)[0], vector)
    assert same_answer(ask(f"{url}/embed", {"inputs": CONTEXT, "normalize": False})[0], vector)
    (short,) = ask(f"{url}/embed", {"inputs": CONTEXT, "normalize": True})
    assert same_answer(short, [value / size for value in vector])
    ask(f"{url}/embed", {"inputs": CONTEXT, "prompt_name": "passage"}, 400)


def test_info_and_health(server, two):
    assert get(f"{two[0]}/health", timeout=60).status_code == 200
    assert get(f"{two[1]}/info", timeout=60).json()["model_id"] == "long"
    found = get(f"{server.url}/info", headers={"x-adapter": "many"}, timeout=60).json()
    assert list(found["model_type"]) == ["classifier"]
    assert found["model_type"]["classifier"]["label2id"]["b"] == 1
    assert found["max_input_length"] > 1
    assert get(f"{server.url}/info", timeout=60).status_code == 400
