"""`huggingface_hub.InferenceClient`, unmodified, with the address of an adapter as its model."""

import math
from dataclasses import replace

import huggingface_hub
import pytest
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, ValidationError
from requests import get, post

from adapterhub.inference.open import open_adapter, open_backbone
from adapterhub.serving import Engine
from adapterhub.tasks import parse_task
from tests.kit import own_models
from tests.kit import server as kit
from tests.kit.server import BACKBONE, CONTEXT, NAMED, PAIRS, TEXTS, same_answer


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
    names = ("answer", "start", "end")
    assert [found[name] for name in names] == [expected[name] for name in names]
    assert same_answer(found.score, 1 / (1 + math.exp(-expected["score"])))


def test_zero_shot_classification(server, client):
    """By entailment, or among the labels of an adapter."""
    template, labels = "the film is {} .", ["good", "bad", "dull"]
    pairs = [(CONTEXT, template.replace("{}", label)) for label in labels]
    expected = [each["scores"] for each in server.expected("entailment", *pairs)]
    asked = {"text": CONTEXT, "candidate_labels": labels, "hypothesis_template": template}
    found = client("entailment").zero_shot_classification(**asked)
    total = sum(each["entailment"] for each in expected)
    shares = {name: e["entailment"] / total for name, e in zip(labels, expected, strict=True)}
    assert scores_of(found) == pytest.approx(shares, abs=1e-5)
    several = client("entailment").zero_shot_classification(**asked, multi_label=True)
    alone = {
        name: e["entailment"] / (e["entailment"] + e["contradiction"])
        for name, e in zip(labels, expected, strict=True)
    }
    assert scores_of(several) == pytest.approx(alone, abs=1e-5)
    # Among the labels of an adapter
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
        return post(f"{server.url}/models/{name}", json={"inputs": inputs}, timeout=60).json()

    found = ask("entailment", [{"text": a, "text_pair": b} for a, b in PAIRS])
    for each, expected in zip(found, server.expected("entailment"), strict=True):
        assert {e["label"]: e["score"] for e in each} == pytest.approx(expected["scores"], abs=1e-5)
    assert len(ask("tagging", [CONTEXT, CONTEXT])) == 2
    for wrong in ([], 5, {"question": "a"}):
        assert "error" in ask("tagging", wrong)
    assert "error" in ask("embedding", {"source_sentence": CONTEXT, "sentences": []})


# Texts, summaries, translations and chats, whole and as streams


MESSAGES = [{"role": "user", "content": TEXTS[0]}]
TOKENS = 8  # that the adapters of `writing` write


@pytest.fixture(scope="module")
def texts(writing, backbones, tmp_path_factory):
    """Serve an adapter for summaries too; return each's address, and the first text of each."""
    example = kit.TaskExample(f"seq2seq(metric=rouge, new_tokens={TOKENS})", "seq2seq")
    folder = tmp_path_factory.mktemp("hf-texts")
    summary = kit.write_wordy(backbones("t5"), folder, example, least=1)
    folders = {"writer": writing[1]["writer"], "summary": summary}
    with Engine(str(backbones("t5"))) as engine:
        expected = {
            n: kit.expected_answers(f, TEXTS[:1])[0]["generated"] for n, f in folders.items()
        }
        with kit.running(kit.service_of(engine, {"summary": summary})) as url:
            yield {"writer": writing[0], "summary": url}, expected


@pytest.fixture
def writer_of(texts):
    def client(name):
        return huggingface_hub.InferenceClient(f"{texts[0][name]}/models/{name}")

    return client


def test_texts_are_those_of_predict(writer_of, texts):
    client, writer, written = writer_of, writer_of("writer"), texts[1]
    assert writer.text_generation(TEXTS[0]) == written["writer"]
    limited = writer.text_generation(TEXTS[0], max_new_tokens=TOKENS)
    assert limited.strip() == written["writer"].strip()
    assert client("summary").summarization(TEXTS[0]).summary_text == written["summary"]
    limits = {"max_new_tokens": 2}
    short = client("summary").summarization(TEXTS[0], generate_parameters=limits).summary_text
    assert written["summary"].startswith(short)
    assert client("summary").translation(TEXTS[0]).translation_text == written["summary"]
    word = written["writer"].split()[1]
    assert word not in writer.text_generation(TEXTS[0], stop=[word])
    sampling = {"max_new_tokens": 12, "temperature": 1.5}
    assert len({writer.text_generation(TEXTS[0], seed=n, **sampling) for n in (3, 3, 3)}) == 1
    assert len({writer.text_generation(TEXTS[0], seed=n, **sampling) for n in range(6)}) > 1
    full = writer.text_generation(TEXTS[0], return_full_text=True)
    assert full == TEXTS[0] + written["writer"]


def test_a_stream_is_the_text_in_tokens(writer_of):
    writer, limit = writer_of("writer"), {"max_new_tokens": TOKENS}
    whole = writer.text_generation(TEXTS[0], **limit)
    assert "".join(writer.text_generation(TEXTS[0], stream=True)).startswith(whole)
    parts = list(writer.text_generation(TEXTS[0], **limit, stream=True))
    assert "".join(parts) == whole
    assert len(parts) > 3
    detailed = list(writer.text_generation(TEXTS[0], **limit, stream=True, details=True))
    assert detailed[-1].generated_text == whole
    assert detailed[-1].details.finish_reason in ("length", "eos_token")
    assert detailed[0].token.logprob <= 0


def test_chats(texts, writer_of):
    """At the address of an adapter, where the client names no model, and at that of the server."""
    server = huggingface_hub.InferenceClient(base_url=f"{texts[0]['writer']}/v1")
    options = {"max_tokens": TOKENS, "temperature": 0}
    answer = server.chat_completion(MESSAGES, model="writer", **options)
    assert answer.model == "writer"
    writer = writer_of("writer")
    chunks = writer.chat_completion(MESSAGES, stream=True, **options)
    written = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert answer.choices[0].message.content == written != ""


def test_what_no_text_can_be_written_with_is_refused(writer_of, texts):
    writer = writer_of("writer")
    with pytest.raises(ValidationError, match="repetition_penalty"):
        writer.text_generation(TEXTS[0], repetition_penalty=1.5)
    for wrong in ({"temperature": -1.0}, {"max_new_tokens": 0}, {"top_p": 3.0}, {"seed": "x"}):
        with pytest.raises(BadRequestError, match=next(iter(wrong))):
            writer.summarization(TEXTS[0], generate_parameters=wrong)
    two = {"text": "a", "text_pair": "b"}
    for inputs, more, words in (
        ([*TEXTS], {"stream": True}, "a stream of several texts"),
        (TEXTS[0], {"parameters": {"generate_parameters": 5}}, "not an object"),
        (TEXTS[0], {"parameters": {"stop": 5, "seed": 1}}, "list of texts"),
        (TEXTS[0], {"parameters": {"truncate": 100}}, "truncate"),
        (two, {"parameters": {"seed": 1}}, "two texts, and options"),
    ):
        answer = post(writer.model, json={"inputs": inputs, **more}, timeout=60)
        assert answer.status_code == 400
        assert words in answer.json()["error"]
    assert len(post(writer.model, json={"inputs": [*TEXTS]}, timeout=60).json()) == len(TEXTS)
    for name in ("writer", "summary"):  # adapters of one language
        body = {"model": name, "prompt": "a", "tgt_lang": "de_DE"}
        answer = post(f"{texts[0][name]}/v1/completions", json=body, timeout=60)
        assert (answer.status_code, "tgt_lang" in answer.text) == (400, True)
    body = {"model": "summary", "prompt": TEXTS[0], "echo": True, "logprobs": 1}
    answer = post(f"{texts[0]['summary']}/v1/completions", json=body, timeout=60)
    assert (answer.status_code, "encoder-decoder" in answer.text) == (400, True)


def test_languages_are_fields_of_a_request(tmp_path):
    """Of an adapter for one pair, and of a backbone for several; without them, or with others."""
    backbone, text = own_models.save_translator("mbart50", tmp_path), "the cat sleeps"
    spec = "seq2seq(src_lang=en_XX, tgt_lang=de_DE, new_tokens=4)"
    example = kit.TaskExample(spec, "seq2seq")
    folder = kit.write_adapter(backbone, tmp_path / "german", example=example)
    own = {"german": open_adapter(folder)}
    own[BACKBONE] = open_backbone(str(backbone), parse_task(spec))
    chat, known = [{"role": "user", "content": text}], "af_ZA ar_AR"

    def expected(opened, target):
        task = opened.task.between(("en_XX", target))
        return replace(opened, task=task).predict(text).text

    def asked(path, **body):
        options = {} if path.startswith("/models") else {"max_tokens": 4, "temperature": 0}
        return post(url + path, json=options | body, timeout=60)

    with (
        Engine(str(backbone)) as engine,
        kit.running(kit.service_of(engine, {"german": folder})) as url,
    ):
        client = huggingface_hub.InferenceClient(f"{url}/models/german")
        for name, opened in own.items():
            texts = {target: expected(opened, target) for target in ("de_DE", "fr_XX")}
            assert texts["de_DE"] != texts["fr_XX"]
            for target, wanted in texts.items():
                body = {"model": name, "src_lang": "en_XX", "tgt_lang": target}
                (one,) = asked("/v1/completions", prompt=text, **body).json()["choices"]
                (other,) = asked("/v1/chat/completions", messages=chat, **body).json()["choices"]
                assert one["text"] == other["message"]["content"] == wanted
                if name == "german":  # the path of a backbone is for vectors
                    found = client.translation(text, src_lang="en_XX", tgt_lang=target)
                    assert found.translation_text == wanted
            wrong = {"src_lang": "en_XX", "tgt_lang": "german"}
            for answer in (
                asked("/v1/completions", model=name, prompt=text, **wrong),
                asked("/models/german", inputs=text, parameters=wrong),
            ):
                assert (answer.status_code, known in answer.text) == (400, True)
                assert "'german', which the tokenizer" in answer.text
        plain = asked("/v1/completions", model="german", prompt=text)
        assert plain.json()["choices"][0]["text"] == expected(own["german"], "de_DE")
        plain = asked("/v1/completions", model=BACKBONE, prompt=text)
        assert (plain.status_code, known in plain.text) == (400, True)
        assert "src_lang is not given" in plain.text
        schemas = get(f"{url}/openapi.json", timeout=60).json()["components"]["schemas"]
        for shape in ("CompletionRequest", "ChatRequest"):
            assert "tgt_lang" in schemas[shape]["properties"]


def test_what_there_is_and_what_there_is_not(server, client):
    direct = huggingface_hub.InferenceClient(f"{server.url}/models/many", provider="hf-inference")
    assert direct.health_check()
    assert direct.get_endpoint_info()["model_id"] == "many"
    with pytest.raises(HfHubHTTPError) as error:
        client("nothing").text_classification("a")
    assert error.value.response.status_code == 404
    with pytest.raises(BadRequestError, match="/v1/predict"):
        client("choices").text_classification("a")
