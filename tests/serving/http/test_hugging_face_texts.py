"""`InferenceClient`, unmodified: texts, summaries, translations and chats, whole and as streams."""

from __future__ import annotations

from dataclasses import replace

import huggingface_hub
import pytest
from huggingface_hub.errors import BadRequestError, ValidationError
from requests import get, post

from adapterhub.inference.open import open_adapter, open_backbone
from adapterhub.serving import Engine
from adapterhub.tasks import parse_task
from tests.kit import own_models
from tests.kit.server import (
    BACKBONE,
    TEXTS,
    TaskExample,
    expected_answers,
    running,
    service_of,
    write_adapter,
    write_wordy,
)

MESSAGES = [{"role": "user", "content": TEXTS[0]}]
TOKENS = 6


@pytest.fixture(autouse=True)
def online(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def writing(backbones, tmp_path_factory):
    """Serve an adapter that writes, and one for summaries; return each's address and folder."""
    folder, found = tmp_path_factory.mktemp("hf-texts"), {}
    kinds = {
        "writer": ("llama", TaskExample(f"causal-lm(new_tokens={TOKENS})", "causal-lm"), 3),
        "summary": ("t5", TaskExample(f"seq2seq(metric=rouge, new_tokens={TOKENS})", "seq2seq"), 1),
    }
    for name, (kind, example, least) in kinds.items():
        found[name] = write_wordy(backbones(kind), folder / name, example, least=least)
    with (
        Engine(str(backbones("llama"))) as one,
        Engine(str(backbones("t5"))) as other,
        running(service_of(one, {"writer": found["writer"]})) as first,
        running(service_of(other, {"summary": found["summary"]})) as second,
    ):
        expected = {name: expected_answers(f, TEXTS[:2]) for name, f in found.items()}
        yield {"writer": first, "summary": second}, expected


@pytest.fixture
def client(writing):
    def client(name):
        return huggingface_hub.InferenceClient(f"{writing[0][name]}/models/{name}")

    return client


@pytest.fixture
def written(writing):
    return {name: answers[0]["generated"] for name, answers in writing[1].items()}


def test_texts_are_those_of_predict(client, written):
    writer = client("writer")
    assert writer.text_generation(TEXTS[0]) == written["writer"]
    limited = writer.text_generation(TEXTS[0], max_new_tokens=TOKENS)
    assert limited.strip() == written["writer"].strip()
    assert client("summary").summarization(TEXTS[0]).summary_text == written["summary"]
    limits = {"max_new_tokens": 2}
    short = client("summary").summarization(TEXTS[0], generate_parameters=limits).summary_text
    assert written["summary"].startswith(short)
    assert client("summary").translation(TEXTS[0]).translation_text == written["summary"]
    full = writer.text_generation(TEXTS[0], return_full_text=True)
    assert full == TEXTS[0] + written["writer"]


def test_a_stream_is_the_text_in_tokens(client):
    writer = client("writer")
    whole = writer.text_generation(TEXTS[0], max_new_tokens=TOKENS)
    assert "".join(writer.text_generation(TEXTS[0], stream=True)).startswith(whole)
    parts = list(writer.text_generation(TEXTS[0], max_new_tokens=TOKENS, stream=True))
    assert "".join(parts) == whole
    assert len(parts) > 3
    detailed = list(
        writer.text_generation(TEXTS[0], max_new_tokens=TOKENS, stream=True, details=True)
    )
    assert detailed[-1].generated_text == whole
    assert detailed[-1].details.finish_reason in ("length", "eos_token")
    assert detailed[0].token.logprob <= 0


def test_details_and_sampling(client):
    writer = client("writer")
    found = writer.text_generation(TEXTS[0], max_new_tokens=TOKENS, details=True, seed=1)
    assert found.details.generated_tokens == len(found.details.tokens) <= TOKENS
    assert all(token.logprob <= 0 for token in found.details.tokens)

    def sampled(**options):
        return writer.text_generation(TEXTS[0], max_new_tokens=12, temperature=1.5, **options)

    assert sampled(seed=3) == sampled(seed=3)
    assert len({sampled(seed=seed) for seed in range(6)}) > 1
    word = found.generated_text.split()[1]
    stopped = writer.text_generation(TEXTS[0], max_new_tokens=TOKENS, stop=[word])
    assert found.generated_text.startswith(stopped)
    assert word not in stopped


@pytest.mark.parametrize("streamed", [True, False])
def test_chats(writing, client, streamed):
    """At the address of an adapter, where the client names no model, and at that of the server."""
    server = huggingface_hub.InferenceClient(base_url=f"{writing[0]['writer']}/v1")
    found = []
    for each, model in ((client("writer"), None), (server, "writer")):
        answer = each.chat_completion(
            MESSAGES, model=model, max_tokens=TOKENS, temperature=0, stream=streamed
        )
        if streamed:
            found.append("".join(c.choices[0].delta.content or "" for c in answer if c.choices))
        else:
            assert answer.model == "writer"
            found.append(answer.choices[0].message.content)
    assert found[0] == found[1]
    assert found[0]


def test_what_is_refused(client, writing):
    writer = client("writer")
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
        answer = post(f"{writing[0][name]}/v1/completions", json=body, timeout=60)
        assert (answer.status_code, "tgt_lang" in answer.text) == (400, True)
    body = {"model": "summary", "prompt": TEXTS[0], "echo": True, "logprobs": 1}
    answer = post(f"{writing[0]['summary']}/v1/completions", json=body, timeout=60)
    assert (answer.status_code, "encoder-decoder" in answer.text) == (400, True)


def test_languages_are_fields_of_a_request(tmp_path):
    """Of an adapter for one pair, and of a backbone for several; without them, or with others."""
    backbone, text = own_models.save_translator("mbart50", tmp_path), "the cat sleeps"
    spec = "seq2seq(src_lang=en_XX, tgt_lang=de_DE, new_tokens=4)"
    folder = write_adapter(
        backbone, tmp_path / "german", "lora(rank=2)", TaskExample(spec, "seq2seq")
    )
    own = {
        "german": open_adapter(folder),
        BACKBONE: open_backbone(str(backbone), parse_task(spec)),
    }

    def expected(opened, target):
        task = opened.task.between(("en_XX", target))
        return replace(opened, task=task).predict(text).text

    def asked(path, **body):
        options = {} if path.startswith("/models") else {"max_tokens": 4, "temperature": 0}
        return post(url + path, json=options | body, timeout=60)

    with Engine(str(backbone)) as engine, running(service_of(engine, {"german": folder})) as url:
        for name, opened in own.items():
            texts = [expected(opened, target) for target in ("de_DE", "fr_XX")]
            assert texts[0] != texts[1]
            for target, wanted in zip(("de_DE", "fr_XX"), texts, strict=True):
                body = {"model": name, "src_lang": "en_XX", "tgt_lang": target}
                (one,) = asked("/v1/completions", prompt=text, **body).json()["choices"]
                chat = [{"role": "user", "content": text}]
                (other,) = asked("/v1/chat/completions", messages=chat, **body).json()["choices"]
                assert one["text"] == other["message"]["content"] == wanted
                if name == "german":  # the path of a backbone is for vectors
                    client = huggingface_hub.InferenceClient(f"{url}/models/{name}")
                    languages = {"src_lang": "en_XX", "tgt_lang": target}
                    assert client.translation(text, **languages).translation_text == wanted
            wrong = {"src_lang": "en_XX", "tgt_lang": "german"}
            for answer in (
                asked("/v1/completions", model=name, prompt=text, **wrong),
                asked("/models/german", inputs=text, parameters=wrong),
            ):
                assert answer.status_code == 400
                assert "'german', which the tokenizer" in answer.text
                assert "af_ZA ar_AR" in answer.text
        plain = asked("/v1/completions", model="german", prompt=text)
        assert plain.json()["choices"][0]["text"] == expected(own["german"], "de_DE")
        plain = asked("/v1/completions", model=BACKBONE, prompt=text)
        assert plain.status_code == 400
        assert "src_lang is not given" in plain.text
        assert "af_ZA ar_AR" in plain.text
        schemas = get(f"{url}/openapi.json", timeout=60).json()["components"]["schemas"]
        for shape in ("CompletionRequest", "ChatRequest"):
            assert "tgt_lang" in schemas[shape]["properties"]
