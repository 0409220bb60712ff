"""Classes, scores and ranks as vLLM, Cohere, Jina and text-embeddings-inference shape them."""

import math

import pytest
from requests import post

from adapterhub.serving import Engine
from tests.kit import server as kit
from tests.kit.server import CONTEXT, NAMED, PAIRS, TEXTS, same_answer

QUERY = "good film"
DOCUMENTS = ["a plot", CONTEXT, "fine", "the actor was awful"]


def ask(url, body, status=200, **headers):
    answer = post(url, json=body, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("name", ["classification", "many", "multi-label", "entailment"])
def test_classes(server, name):
    inputs = [list(i) if isinstance(i, tuple) else i for i in NAMED[name].inputs]
    found = ask(f"{server.url}/classify", {"model": name, "input": inputs})
    for item, expected in zip(found["data"], server.expected(name), strict=True):
        scores = expected["scores"]
        assert same_answer(item["probs"], [scores[label] for label in NAMED[name].labels])
        assert item["label"] == max(scores, key=scores.get)
        assert item["num_classes"] == len(scores)
    assert [item["index"] for item in found["data"]] == list(range(len(inputs)))
    assert found["usage"]["prompt_tokens"] > len(inputs)
    assert found["model"] == name


def test_scores_of_pairs(server):
    expected = server.expected("reranking", *[(QUERY, each) for each in DOCUMENTS])
    found = ask(f"{server.url}/score", {"model": "reranking", "text_1": QUERY, "text_2": DOCUMENTS})
    assert same_answer([i["score"] for i in found["data"]], [e["value"] for e in expected])
    for same in (
        {"text_1": [QUERY] * len(DOCUMENTS), "text_2": DOCUMENTS},
        {"queries": QUERY, "documents": DOCUMENTS},
    ):
        again = ask(f"{server.url}/score", {"model": "reranking", **same})
        assert same_answer(again["data"], found["data"])
    body = {"model": "reranking", "text_1": [QUERY] * 3, "text_2": DOCUMENTS}
    ask(f"{server.url}/score", body, 400)
    expected = server.expected("embedding", *[(QUERY, each) for each in DOCUMENTS])
    found = ask(f"{server.url}/score", {"model": "embedding", "text_1": QUERY, "text_2": DOCUMENTS})
    assert same_answer([i["score"] for i in found["data"]], [e["similarity"] for e in expected])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
@pytest.mark.parametrize("name", ["reranking", "embedding"])
def test_ranks(server, path, name):
    key = "value" if name == "reranking" else "similarity"
    expected = [e[key] for e in server.expected(name, *[(QUERY, each) for each in DOCUMENTS])]
    order = sorted(range(len(DOCUMENTS)), key=lambda n: -expected[n])
    body = {"model": name, "query": QUERY, "documents": DOCUMENTS}
    found = ask(server.url + path, body)
    assert [each["index"] for each in found["results"]] == order
    values = [each["relevance_score"] for each in found["results"]]
    assert same_answer(values, [expected[n] for n in order])
    texts = [each["document"] and each["document"]["text"] for each in found["results"]]
    assert texts == [None if path == "/v2/rerank" else DOCUMENTS[n] for n in order]
    body |= {"documents": [{"text": each} for each in DOCUMENTS], "top_n": 2}
    some = ask(server.url + path, {**body, "return_documents": True})["results"]
    assert [each["document"]["text"] for each in some] == [DOCUMENTS[n] for n in order[:2]]


def test_ranks_of_texts(server):
    expected = [e["value"] for e in server.expected("reranking", *[(QUERY, d) for d in DOCUMENTS])]
    body = {"query": QUERY, "texts": DOCUMENTS, "truncate": True, "raw_scores": False}
    found = ask(f"{server.url}/rerank", {"model": "reranking", **body})
    assert same_answer([each["score"] for each in found], sorted(expected, reverse=True))
    assert "text" not in found[0]
    texts = ask(f"{server.url}/rerank", {**body, "return_text": True}, **{"x-adapter": "reranking"})
    assert [each["text"] for each in texts] == [DOCUMENTS[each["index"]] for each in found]


def test_what_cannot_be_ranked(server):
    body = {"model": "reranking", "query": QUERY}
    for wrong in ({}, {"texts": []}, {"documents": []}, {"texts": ["a"], "documents": ["a"]}):
        ask(f"{server.url}/rerank", {**body, **wrong}, 400)
    ask(f"{server.url}/rerank", {**body, "texts": DOCUMENTS, "raw_scores": True}, 400)
    found = ask(f"{server.url}/rerank", {**body, "model": "tagging", "documents": DOCUMENTS}, 400)
    assert "/models/{reference}" in found["error"]
    assert (found["error_type"], found["code"]) == ("Validation", "wrong_shape")


def test_pooling(server):
    for name in ("embedding", "classification", "regression"):
        found = ask(f"{server.url}/pooling", {"model": name, "input": list(TEXTS)})
        for item, expected in zip(found["data"], server.expected(name, *TEXTS), strict=True):
            scores = expected.get("scores", {"": expected.get("value")})
            assert same_answer(item["data"], expected.get("vector") or [*scores.values()])
    found = ask(f"{server.url}/pooling", {"model": name, "input": "a", "encoding_format": "base64"})
    assert isinstance(found["data"][0]["data"], str)
    long = "the movie was good " * 500
    body = {"model": "classification", "input": ["a plot", long]}
    assert "input 1" in ask(f"{server.url}/classify", body, 400)["error"]["message"]
    assert ask(f"{server.url}/classify", {**body, "truncate": True})["truncated"] == [1]


# What clients of text-embeddings-inference send, and what they read


@pytest.fixture(scope="module")
def two(server, backbone, tmp_path_factory):
    """Serve one adapter for vectors, and one for classes; and another, for longer vectors."""
    folder = tmp_path_factory.mktemp("long") / "vectors"
    task = "embedding(normalize=false, query_prefix='a ')"
    long = kit.write_adapter(backbone, folder, example=kit.TaskExample(task, "embedding"))
    with Engine(str(backbone)) as engine:
        folders = {n: server.folders[n] for n in ("embedding", "classification")}
        services = kit.service_of(engine, folders), kit.service_of(engine, {"long": long})
        with kit.running(services[0]) as url, kit.running(services[1]) as other:
            yield url, other, long


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
    with kit.running(kit.service_of(engine, {f"n{n}": f"missing-{n}" for n in range(40)})) as url:
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
    vector = kit.expected_answers(folder, (CONTEXT,))[0]["vector"]
    size = math.hypot(*vector)
    assert abs(size - 1) > 0.1
    for name in (None, "query"):
        body = {"inputs": CONTEXT, "prompt_name": name}
        assert same_answer(ask(f"{url}/embed", body)[0], vector)
    assert same_answer(ask(f"{url}/embed", {"inputs": CONTEXT, "normalize": False})[0], vector)
    (short,) = ask(f"{url}/embed", {"inputs": CONTEXT, "normalize": True})
    assert same_answer(short, [value / size for value in vector])
    ask(f"{url}/embed", {"inputs": CONTEXT, "prompt_name": "passage"}, 400)
