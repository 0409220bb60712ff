"""Classes, scores and ranks, in the shapes of vLLM, Cohere, Jina and text-embeddings-inference."""

from __future__ import annotations

import pytest
from requests import post

from tests.kit.server import CONTEXT, NAMED, TEXTS, same_answer

QUERY = "good film"
DOCUMENTS = ["a plot", CONTEXT, "fine", "the actor was awful"]


@pytest.fixture
def ask(server):
    def ask(path, body, status=200, **headers):
        answer = post(server.url + path, json=body, headers=headers, timeout=60)
        assert answer.status_code == status, answer.text
        return answer.json()

    return ask


@pytest.mark.parametrize("name", ["classification", "many", "multi-label", "entailment"])
def test_classes(server, ask, name):
    inputs = [list(i) if isinstance(i, tuple) else i for i in NAMED[name].inputs]
    found = ask("/classify", {"model": name, "input": inputs})
    for item, expected in zip(found["data"], server.expected(name), strict=True):
        scores = expected["scores"]
        assert same_answer(item["probs"], [scores[label] for label in NAMED[name].labels])
        assert item["label"] == max(scores, key=scores.get)
        assert item["num_classes"] == len(scores)
    assert [item["index"] for item in found["data"]] == list(range(len(inputs)))
    assert found["usage"]["prompt_tokens"] > len(inputs)
    assert found["model"] == name


def test_scores_of_pairs(server, ask):
    expected = server.expected("reranking", *[(QUERY, each) for each in DOCUMENTS])
    found = ask("/score", {"model": "reranking", "text_1": QUERY, "text_2": DOCUMENTS})
    assert same_answer([i["score"] for i in found["data"]], [e["value"] for e in expected])
    for same in (
        {"text_1": [QUERY] * len(DOCUMENTS), "text_2": DOCUMENTS},
        {"queries": QUERY, "documents": DOCUMENTS},
    ):
        assert same_answer(ask("/score", {"model": "reranking", **same})["data"], found["data"])
    ask("/score", {"model": "reranking", "text_1": [QUERY] * 3, "text_2": DOCUMENTS}, 400)
    expected = server.expected("embedding", *[(QUERY, each) for each in DOCUMENTS])
    found = ask("/score", {"model": "embedding", "text_1": QUERY, "text_2": DOCUMENTS})
    assert same_answer([i["score"] for i in found["data"]], [e["similarity"] for e in expected])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
@pytest.mark.parametrize("name", ["reranking", "embedding"])
def test_ranks(server, ask, path, name):
    key = "value" if name == "reranking" else "similarity"
    expected = [e[key] for e in server.expected(name, *[(QUERY, each) for each in DOCUMENTS])]
    order = sorted(range(len(DOCUMENTS)), key=lambda n: -expected[n])
    body = {"model": name, "query": QUERY, "documents": DOCUMENTS}
    found = ask(path, body)
    assert [each["index"] for each in found["results"]] == order
    values = [each["relevance_score"] for each in found["results"]]
    assert same_answer(values, [expected[n] for n in order])
    texts = [each["document"] and each["document"]["text"] for each in found["results"]]
    assert texts == [None if path == "/v2/rerank" else DOCUMENTS[n] for n in order]
    objects = [{"text": each} for each in DOCUMENTS]
    some = ask(path, {**body, "documents": objects, "top_n": 2, "return_documents": True})
    assert [each["document"]["text"] for each in some["results"]] == [
        DOCUMENTS[n] for n in order[:2]
    ]


def test_ranks_of_texts(server, ask):
    expected = [e["value"] for e in server.expected("reranking", *[(QUERY, d) for d in DOCUMENTS])]
    body = {"query": QUERY, "texts": DOCUMENTS, "truncate": True, "raw_scores": False}
    found = ask("/rerank", {"model": "reranking", **body})
    assert same_answer([each["score"] for each in found], sorted(expected, reverse=True))
    assert "text" not in found[0]
    texts = ask("/rerank", {**body, "return_text": True}, **{"x-adapter": "reranking"})
    assert [each["text"] for each in texts] == [DOCUMENTS[each["index"]] for each in found]


def test_what_cannot_be_ranked(ask):
    body = {"model": "reranking", "query": QUERY}
    for wrong in ({}, {"texts": []}, {"documents": []}, {"texts": ["a"], "documents": ["a"]}):
        ask("/rerank", {**body, **wrong}, 400)
    ask("/rerank", {**body, "texts": DOCUMENTS, "raw_scores": True}, 400)
    found = ask("/rerank", {**body, "model": "tagging", "documents": DOCUMENTS}, 400)
    assert "/models/{reference}" in found["error"]
    assert (found["error_type"], found["code"]) == ("Validation", "wrong_shape")


def test_pooling(server, ask):
    for name in ("embedding", "classification", "regression"):
        found = ask("/pooling", {"model": name, "input": list(TEXTS)})
        for item, expected in zip(found["data"], server.expected(name, *TEXTS), strict=True):
            scores = expected.get("scores", {"": expected.get("value")})
            assert same_answer(item["data"], expected.get("vector") or [*scores.values()])
    found = ask("/pooling", {"model": name, "input": "a", "encoding_format": "base64"})
    assert isinstance(found["data"][0]["data"], str)
    long = "the movie was good " * 500
    body = {"model": "classification", "input": ["a plot", long]}
    assert "input 1" in ask("/classify", body, 400)["error"]["message"]
    assert ask("/classify", {**body, "truncate": True})["truncated"] == [1]
