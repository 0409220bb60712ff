"""OpenAI's client, unmodified: chats and texts, whole and as streams."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from adapterhub.backbones.find import remember_folder
from adapterhub.files.native import Saved
from adapterhub.serving import Engine
from adapterhub.serving.adapter_cache import BareBackbone
from adapterhub.serving.http.request import AsyncGeneration
from adapterhub.web.errors import StoppedError
from tests.kit.server import (
    BACKBONE,
    SEQ2SEQ,
    TEXTS,
    TaskExample,
    expected_answers,
    running,
    service_of,
    write_adapter,
    write_wordy,
    written_alone,
)

openai = pytest.importorskip("openai", reason='pip install "adapterhub[clients]"')
TOKENS = 8
SHORT = TaskExample(f"causal-lm(new_tokens={TOKENS})", "causal-lm")
GREEDY = {"max_tokens": TOKENS, "temperature": 0}


@pytest.fixture(scope="session")
def writing(backbones, tmp_path_factory):
    """Serve two adapters that write, and one that has classes; return address, folders, service."""
    backbone, folder = backbones("llama"), tmp_path_factory.mktemp("written")
    folders = {
        "writer": write_wordy(backbone, folder / "one", SHORT),
        "other": write_wordy(backbone, folder / "two", SHORT, "prefix(length=3)"),
        "classes": write_adapter(backbone, folder / "three"),
    }
    with Engine(str(backbone)) as engine:
        service = service_of(engine, folders)
        with running(service) as url:
            yield url, folders, service


@pytest.fixture(autouse=True)
def known_llama(writing, backbones):
    """Let `open_adapter` find the backbone from the home of each test."""
    remember_folder(Saved.at(Path(writing[1]["writer"])).manifest.backbone.id, backbones("llama"))


@pytest.fixture
def client(writing):
    with openai.OpenAI(base_url=f"{writing[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def text_of(writing):
    """Return a function from an adapter and a prompt to what `generate` writes alone."""
    _, folders, service = writing
    served = service.engine.adapters.find(BareBackbone.TEXTS).result()

    def text(name, prompt):
        ids = written_alone(folders[name], prompt, TOKENS)
        return served.predictor.tokenizer.decode(ids, skip_special_tokens=True)

    return text


def joined(chunks):
    return "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)


def test_texts_are_those_of_generate(client, text_of):
    for name in ("writer", "other"):
        for prompt in TEXTS[:3]:
            found = client.completions.create(model=name, prompt=prompt, **GREEDY)
            (choice,) = found.choices
            assert choice.text.strip() == text_of(name, prompt).strip()
            assert choice.finish_reason in ("stop", "length")
            assert found.model == name
            assert found.usage.completion_tokens <= TOKENS
            assert found.usage.total_tokens > found.usage.completion_tokens > 0


def test_several_prompts_and_tokens(writing, client, text_of):
    tokenizer = writing[2].engine.adapters.find(BareBackbone.TEXTS).result().predictor.tokenizer
    ids = [tokenizer(text)["input_ids"] for text in TEXTS[:2]]
    for prompts in (list(TEXTS[:2]), ids):
        found = client.completions.create(model="writer", prompt=prompts, **GREEDY)
        assert [each.index for each in found.choices] == [0, 1]
        assert [each.text.strip() for each in found.choices] == [
            text_of("writer", text).strip() for text in TEXTS[:2]
        ]
        stream = client.completions.create(model="writer", prompt=prompts, stream=True, **GREEDY)
        parts = {0: "", 1: ""}
        for chunk in stream:
            parts[chunk.choices[0].index] += chunk.choices[0].text
        assert [*parts.values()] == [each.text for each in found.choices]


def test_a_stream_is_the_text_in_pieces(client):
    asked = {"model": "writer", "messages": [{"role": "user", "content": TEXTS[0]}], **GREEDY}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert joined(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 4
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert not chunks[-1].choices
    assert {each.model for each in chunks} == {"writer"}
    assert len({each.id for each in chunks}) == 1
    plain = client.chat.completions.create(**asked, stream=True)
    assert all(each.usage is None for each in plain)


def test_seeds_and_temperatures(client):
    def text(**options):
        asked = {"prompt": "the movie", "max_tokens": 12, "temperature": 1.5, **options}
        return client.completions.create(model="writer", **asked).choices[0].text

    assert text(seed=3) == text(seed=3)
    assert len({text(seed=seed) for seed in range(6)}) > 1
    assert text(top_p=1e-6) == text(top_p=1e-6, seed=5) == text(temperature=0)


def test_stop_texts(client):
    whole = client.completions.create(model="writer", prompt=TEXTS[0], **GREEDY).choices[0].text
    word = whole.split()[2]
    for stop in (word, [word, "nowhere"]):
        found = client.completions.create(model="writer", prompt=TEXTS[0], stop=stop, **GREEDY)
        assert found.choices[0].text == whole[: whole.index(word)]
        assert found.choices[0].finish_reason == "stop"


def test_probabilities_of_tokens(client):
    asked = {"model": "writer", "messages": [{"role": "user", "content": TEXTS[0]}], **GREEDY}
    found = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    content = found.choices[0].logprobs.content
    assert len(content) >= found.usage.completion_tokens - 1
    for each in content:
        assert each.logprob <= 0
        assert bytes(each.bytes).decode() == each.token
        best = max(each.top_logprobs, key=lambda e: e.logprob)
        assert len(each.top_logprobs) == 3
        assert best.logprob == pytest.approx(each.logprob)
    stream = client.chat.completions.create(**asked, logprobs=True, stream=True)
    parts = [t for c in stream if c.choices and c.choices[0].logprobs
             for t in c.choices[0].logprobs.content]  # fmt: skip
    assert [each.token for each in parts] == [each.token for each in content]
    text = client.completions.create(model="writer", prompt="a plot", logprobs=2, **GREEDY)
    logprobs = text.choices[0].logprobs
    assert "".join(logprobs.tokens).startswith(text.choices[0].text)
    assert logprobs.text_offset[0] == 0
    assert all(each <= 0 for each in logprobs.token_logprobs)


def test_an_echo_has_the_prompt_with_its_probabilities(writing, client):
    """As OpenAI and vLLM shape them: lists of one length, null at first, places in the text."""
    served = writing[2].engine.adapters.find(BareBackbone.TEXTS).result()
    tokenizer = served.predictor.tokenizer
    ids = [tokenizer(text)["input_ids"] for text in TEXTS[:2]]
    for model, tokens in (("writer", 1), ("other", 3), (BACKBONE, 0)):
        asked = {"model": model, "max_tokens": tokens, "temperature": 0, "logprobs": 2}
        plain = client.completions.create(prompt=list(TEXTS[:2]), **asked | {"max_tokens": 3})
        for prompts in (list(TEXTS[:2]), ids):
            found = client.completions.create(
                prompt=prompts, echo=True, extra_body={"prompt_logprobs": 1}, **asked
            )
            for number, choice in enumerate(found.choices):
                own, of_text = choice.logprobs, plain.choices[number].logprobs
                names = [tokenizer.decode([i]) for i in ids[number]]
                count = len(names)
                assert choice.index == number
                assert [text.strip() for text in own.tokens[:count]] == names
                if prompts is not ids:
                    assert choice.text.startswith(TEXTS[number])
                assert own.tokens[count:] == of_text.tokens[:tokens]
                lists = (own.token_logprobs, own.top_logprobs, own.text_offset)
                assert {len(each) for each in lists} == {len(own.tokens)}
                assert (own.token_logprobs[0], own.top_logprobs[0]) == (None, None)
                for text, logprob, best, place in [*zip(own.tokens, *lists, strict=True)][1:]:
                    assert max(best.values()) >= logprob
                    assert choice.text[place:].startswith(text)
                assert all(best[t] == p for t, p, best, _ in
                           [*zip(own.tokens, *lists, strict=True)][1:count])  # fmt: skip
                assert all(2 <= len(each) <= 3 for each in own.top_logprobs[1:count])
                first, *others = choice.prompt_logprobs
                assert first is None
                for token, logprob, each in zip(
                    ids[number][1:], own.token_logprobs[1:], others, strict=False
                ):
                    assert each[str(token)]["logprob"] == logprob
                    assert min(v["rank"] for v in each.values()) == 1
                    assert 1 <= len(each) <= 2
            stream = client.completions.create(prompt=prompts, echo=True, stream=True, **asked)
            parts = [chunk.choices[0] for chunk in stream]
            for choice in found.choices:
                own = [part for part in parts if part.index == choice.index]
                assert "".join(part.text for part in own) == choice.text
                together = [t for part in own if part.logprobs for t in part.logprobs.tokens]
                assert together == choice.logprobs.tokens


@pytest.mark.parametrize(
    "option",
    [
        {"max_tokens": 0},
        {"prompt_logprobs": 1, "stream": True},
        {"prompt": [[1, 10**6]]},
        {"prompt": [[]]},
    ],
)
def test_what_no_completion_is(client, option):
    asked = {"model": "writer", "prompt": TEXTS[0], **option}
    more = {name: asked.pop(name) for name in ("prompt_logprobs",) if name in asked}
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**asked, extra_body=more)
    assert error.value.param in (*option, None)


def test_names_of_the_limit(client):
    message = [{"role": "user", "content": TEXTS[0]}]
    for name in ("max_tokens", "max_completion_tokens"):
        found = client.chat.completions.create(
            model="writer", messages=message, temperature=0, **{name: 2}
        )
        assert found.usage.completion_tokens == 2
        assert found.choices[0].finish_reason == "length"


def test_the_asynchronous_client(writing, client):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{writing[0]}/v1", api_key="none") as client:

            async def text(name):
                stream = await client.chat.completions.create(
                    model=name, messages=message, stream=True, **GREEDY
                )
                return joined([each async for each in stream])

            return await asyncio.gather(*map(text, ("writer", "other", "writer")))

    message = [{"role": "user", "content": [{"type": "text", "text": "a plot"}]}]
    found = asyncio.run(ask())
    assert found[0] == found[2] != found[1]


def test_the_backbone_alone_writes(client):
    found = client.completions.create(model=BACKBONE, prompt="a plot", **GREEDY)
    assert found.choices[0].text
    assert found.model == BACKBONE


@pytest.mark.parametrize(
    "option",
    [
        {"n": 2},
        {"logit_bias": {"5": 1}},
        {"presence_penalty": 0.5},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"response_format": {"type": "json_object"}},
        {"top_logprobs": 2},
        {"stop": ["a"] * 17},
        {"stop": ""},
    ],
)
def test_what_is_not_supported(client, option):
    message = [{"role": "user", "content": TEXTS[0]}]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="writer", messages=message, **option)
    assert error.value.param in option


def test_what_changes_nothing_is_accepted(client):
    client.chat.completions.create(
        model="writer",
        messages=[{"role": "user", "content": "a"}],
        n=1,
        presence_penalty=0,
        user="somebody",
        response_format={"type": "text"},
        tools=[],
        **GREEDY,
    )
    client.completions.create(
        model="writer", prompt="a plot", n=1, best_of=1, echo=False, user="somebody", **GREEDY
    )


def test_other_messages_than_texts_are_refused(client):
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(
            model="writer", messages=[{"role": "user", "content": [picture]}]
        )


def test_wrong_adapters(writing, client):
    message = [{"role": "user", "content": TEXTS[0]}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="/classify"):
            client.chat.completions.create(model="classes", messages=message, stream=stream)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nothing", messages=message, stream=stream)
    with pytest.raises(openai.BadRequestError, match="/v1/chat/completions"):
        client.embeddings.create(model="writer", input="a plot")
    with pytest.raises(openai.BadRequestError, match="positions"):
        client.completions.create(model="writer", prompt="a plot " * 4000, stream=True)


def test_an_error_within_a_stream(client, monkeypatch):
    """The status was sent before: the error is the last event, which the client raises."""

    async def fail(text):
        raise StoppedError("the engine is closed")

    monkeypatch.setattr(AsyncGeneration, "result", fail)
    message = [{"role": "user", "content": TEXTS[0]}]
    stream = client.chat.completions.create(model="writer", messages=message, stream=True, **GREEDY)
    chunks = []
    with pytest.raises(openai.APIError, match="does not compute now") as error:
        chunks.extend(stream)
    assert error.value.code == "not_ready"


def test_a_full_queue(writing, client, monkeypatch):
    monkeypatch.setattr(writing[2].engine, "queue_tokens", 0)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(model="writer", prompt="a", stream=stream)
        assert int(error.value.response.headers["retry-after"]) >= 1


def test_a_client_that_leaves_a_stream(writing, client):
    """Its text is not written to its end."""
    engine = writing[2].engine
    before = engine.counts["generated_tokens"]
    stream = client.completions.create(
        model="writer", prompt="a", stream=True, max_tokens=100, temperature=0
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 20
    while not engine.counts["cancelled"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.counts["cancelled"] == 1
    assert engine.counts["generated_tokens"] - before < 90


def test_an_encoder_decoder(backbones, tmp_path):
    folder = write_adapter(backbones("t5"), tmp_path / "t5", "lora(rank=2)", SEQ2SEQ)
    with Engine(str(backbones("t5"))) as engine, running(service_of(engine, {"t5": folder})) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        message = [{"role": "user", "content": TEXTS[0]}]
        found = client.chat.completions.create(model="t5", messages=message, temperature=0)
        with pytest.raises(openai.BadRequestError, match="encoder-decoder"):
            client.completions.create(model="t5", prompt=TEXTS[0], echo=True, logprobs=1)
        (expected,) = expected_answers(folder, (TEXTS[0],))
        assert found.choices[0].message.content.strip() == expected["generated"].strip()
