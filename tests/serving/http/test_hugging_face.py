"""`huggingface_hub.InferenceClient`, unmodified, with the address of an adapter as its model."""

from __future__ import annotations

import math

import huggingface_hub
import pytest
import requests
from huggingface_hub.errors import BadRequestError, HfHubHTTPError

from tests.kit.server import CONTEXT, NAMED, PAIRS, TEXTS, same_answer


@pytest.fixture(autouse=True)
def online(monkeypatch):
    """Let the client ask the loopback where the environment keeps it from all hubs."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def client(server):
    def client(name):
        return huggingface_hub.InferenceClient(f"{server.url}/models/{name}")

    return client


def scores_of(found):
    return {each.label: each.score for each in found}


@pytest.mark.parametrize("name", ["classification", "many", "multi-label"])
def test_text_classification(server, client, name):
    scores = server.expected(name, TEXTS[0])[0]["scores"]
    found = client(name).text_classification(TEXTS[0])
    assert scores_of(found) == pytest.approx(scores, abs=1e-5)
    assert [each.score for each in found] == sorted((e.score for e in found), reverse=True)
    assert len(client(name).text_classification(TEXTS[0], top_k=1)) == 1
    own, other = ("sigmoid", "softmax") if name == "multi-label" else ("softmax", "sigmoid")
    client(name).text_classification(TEXTS[0], function_to_apply=own)
    with pytest.raises(BadRequestError, match="function_to_apply"):
        client(name).text_classification(TEXTS[0], function_to_apply=other)
    (found,) = client("regression").text_classification(TEXTS[0])
    assert same_answer(found.score, server.expected("regression", TEXTS[0])[0]["value"])


def test_token_classification(server, client):
    count = 0
    for text in (*TEXTS, CONTEXT):
        found = client("tagging").token_classification(text, aggregation_strategy="simple")
        expected = server.expected("tagging", text)[0]["entities"]
        assert [(e.entity_group, e.word, e.start, e.end) for e in found] == [
            (e["kind"], e["text"], e["start"], e["end"]) for e in expected
        ]
        assert same_answer([e.score for e in found], [e["score"] for e in expected])
        assert all(0 < each.score < 1 for each in found)
        count += len(found)
    assert count
    assert client("tagging").token_classification(CONTEXT, ignore_labels=["x"]) == []
    with pytest.raises(BadRequestError, match="aggregation_strategy"):
        client("tagging").token_classification(CONTEXT, aggregation_strategy="none")


def test_question_answering(server, client):
    question = "the end was"
    found = client("question-answering").question_answering(question, CONTEXT)
    (expected,) = server.expected("question-answering", (question, CONTEXT))
    assert (found.answer, found.start, found.end) == tuple(
        expected[name] for name in ("answer", "start", "end")
    )
    assert same_answer(found.score, 1 / (1 + math.exp(-expected["score"])))


def test_zero_shot_classification_by_entailment(server, client):
    template, labels = "the film is {} .", ["good", "bad", "dull"]
    pairs = [(CONTEXT, template.replace("{}", label)) for label in labels]
    expected = [each["scores"] for each in server.expected("entailment", *pairs)]
    found = client("entailment").zero_shot_classification(
        CONTEXT, labels, hypothesis_template=template
    )
    total = sum(each["entailment"] for each in expected)
    shares = {name: e["entailment"] / total for name, e in zip(labels, expected, strict=True)}
    assert scores_of(found) == pytest.approx(shares, abs=1e-5)
    several = client("entailment").zero_shot_classification(
        CONTEXT, labels, hypothesis_template=template, multi_label=True
    )
    alone = {
        name: e["entailment"] / (e["entailment"] + e["contradiction"])
        for name, e in zip(labels, expected, strict=True)
    }
    assert scores_of(several) == pytest.approx(alone, abs=1e-5)


def test_zero_shot_classification_among_the_labels_of_an_adapter(server, client):
    scores = server.expected("many", CONTEXT)[0]["scores"]
    found = client("many").zero_shot_classification(CONTEXT, ["b", "d"])
    both = scores["b"] + scores["d"]
    assert scores_of(found) == pytest.approx({n: scores[n] / both for n in "bd"}, abs=1e-5)
    with pytest.raises(BadRequestError, match="not trained for the label"):
        client("many").zero_shot_classification(CONTEXT, ["b", "new"])


def test_feature_extraction_and_sentence_similarity(server, client):
    expected = [each["vector"] for each in server.expected("embedding", *TEXTS)]
    assert same_answer(client("embedding").feature_extraction(TEXTS[0]).tolist(), expected[0])
    many = client("embedding").feature_extraction(list(TEXTS), normalize=True, truncate=True)
    assert same_answer(many.tolist(), expected)
    with pytest.raises(BadRequestError, match="dimensions"):
        client("embedding").feature_extraction(TEXTS[0], dimensions=2)
    found = client("embedding").sentence_similarity(CONTEXT, other_sentences=list(TEXTS))
    expected = server.expected("embedding", *[(CONTEXT, text) for text in TEXTS])
    assert same_answer(found, [each["similarity"] for each in expected])


def test_fill_mask(server, client):
    text, several = NAMED["masked"].inputs
    tokenizer = server.tokenizer
    one, two = (each["fills"] for each in server.expected("masked"))
    found = client("masked").fill_mask(text)
    assert {e.token_str: e.score for e in found} == pytest.approx(one[0], abs=1e-5)
    for each in found:  # numbers without a token of the tokenizer have the text ""
        assert each.sequence == text.replace("[MASK]", each.token_str)
        assert each.token is None or tokenizer.decode([each.token]) == each.token_str
    assert any(each.token is not None for each in found)
    assert len(client("masked").fill_mask(text, top_k=2)) == 2
    lists = client("masked").fill_mask(several)
    assert [[e["token_str"] for e in each] for each in lists] == [[*each] for each in two]
    assert lists[1][0]["sequence"] == f"a [MASK] {lists[1][0]['token_str']}"
    with pytest.raises(BadRequestError, match="top_k"):
        client("masked").fill_mask(text, top_k=1000)


def test_pairs_and_lists(server):
    def ask(name, inputs):
        return requests.post(
            f"{server.url}/models/{name}", json={"inputs": inputs}, timeout=60
        ).json()

    rows = [{"text": a, "text_pair": b} for a, b in PAIRS]
    found = ask("entailment", rows)
    for each, expected in zip(found, server.expected("entailment"), strict=True):
        assert {e["label"]: e["score"] for e in each} == pytest.approx(expected["scores"], abs=1e-5)
    assert len(ask("tagging", [CONTEXT, CONTEXT])) == 2
    assert "error" in ask("tagging", [])
    assert "error" in ask("tagging", 5)
    assert "error" in ask("tagging", {"question": "a"})
    assert "error" in ask("embedding", {"source_sentence": CONTEXT, "sentences": []})


def test_what_there_is_and_what_there_is_not(server, client):
    direct = huggingface_hub.InferenceClient(f"{server.url}/models/many", provider="hf-inference")
    assert direct.health_check()
    assert direct.get_endpoint_info()["model_id"] == "many"
    with pytest.raises(HfHubHTTPError) as error:
        client("nothing").text_classification("a")
    assert error.value.response.status_code == 404
    with pytest.raises(BadRequestError, match="/v1/predict"):
        client("choices").text_classification("a")
