"""OpenAI's client, unmodified: chats and texts, whole and as streams; vectors and errors."""

from pathlib import Path

import pytest

import adapterhub as ah
from adapterhub.backbones.find import remember_folder
from adapterhub.files.native import Saved
from adapterhub.serving.adapter_cache import BareBackbone
from adapterhub.serving.http.request import AsyncGeneration
from adapterhub.web.errors import StoppedError
from tests.kit import server as kit
from tests.kit.server import BACKBONE, NAMED, TEXTS, same_answer
from tests.kit.session import wait_until

openai = pytest.importorskip("openai", reason='pip install "adapterhub[clients]"')
TOKENS = 8  # that the adapters of `writing` write
GREEDY = {"max_tokens": TOKENS, "temperature": 0}
CHAT = [{"role": "user", "content": TEXTS[0]}]
PICTURE = [{"type": "image_url", "image_url": {"url": "data:,"}}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(autouse=True)
def known_llama(writing, backbones):
    """Let `open_adapter` find the backbone from the home of each test."""
    remember_folder(Saved.at(Path(writing[1]["writer"])).manifest.backbone.id, backbones("llama"))


@pytest.fixture
def client(writing):
    with openai.OpenAI(base_url=f"{writing[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_texts_are_those_of_generate(writing, client):
    """Of a text, of several, and of tokens; whole and in pieces."""
    _, folders, service = writing
    tokenizer = service.engine.adapters.find(BareBackbone.TEXTS).result().predictor.tokenizer
    ids = [tokenizer(text)["input_ids"] for text in TEXTS[:3]]
    for name in ("writer", "other"):
        written = [kit.written_alone(folders[name], text, TOKENS) for text in TEXTS[:3]]
        texts = [tokenizer.decode(each, skip_special_tokens=True).strip() for each in written]
        for prompts, count in ((TEXTS[0], 1), (list(TEXTS[:3]), 3), (ids, 3)):
            asked = {"model": name, "prompt": prompts, **GREEDY}
            found = client.completions.create(**asked)
            assert [each.index for each in found.choices] == list(range(count))
            assert [each.text.strip() for each in found.choices] == texts[:count]
            assert {each.finish_reason for each in found.choices} <= {"stop", "length"}
            assert found.model == name
            assert found.usage.completion_tokens <= count * TOKENS
            assert found.usage.total_tokens > found.usage.completion_tokens > 0
            parts = [""] * count
            for chunk in client.completions.create(**asked, stream=True):
                parts[chunk.choices[0].index] += chunk.choices[0].text
            assert parts == [each.text for each in found.choices]
    bare = client.completions.create(model=BACKBONE, prompt="a plot", **GREEDY)
    assert (bare.model, bool(bare.choices[0].text)) == (BACKBONE, True)


def test_options_of_a_text(client):
    def text(**options):
        asked = {"prompt": "the movie", "max_tokens": 12, "temperature": 1.5, **options}
        return client.completions.create(model="writer", **asked).choices[0].text

    assert text(seed=3) == text(seed=3)
    assert len({text(seed=seed) for seed in range(6)}) > 1
    assert text(top_p=1e-6) == text(top_p=1e-6, seed=5) == text(temperature=0)
    whole = client.completions.create(model="writer", prompt=TEXTS[0], **GREEDY).choices[0].text
    word = whole.split()[2]
    for stop in (word, [word, "nowhere"]):
        found = client.completions.create(model="writer", prompt=TEXTS[0], stop=stop, **GREEDY)
        assert found.choices[0].text == whole[: whole.index(word)]
        assert found.choices[0].finish_reason == "stop"
    for name in ("max_tokens", "max_completion_tokens"):
        limit = {"temperature": 0, name: 2}
        found = client.chat.completions.create(model="writer", messages=CHAT, **limit)
        assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (2, "length")


def test_a_stream_is_the_text_in_pieces(client):
    in_parts = [{"role": "user", "content": [{"type": "text", "text": TEXTS[0]}]}]
    asked = {"model": "writer", "messages": in_parts, **GREEDY}
    whole = client.chat.completions.create(**asked | {"messages": CHAT})
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked, **options))
    deltas = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    assert "".join(deltas) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 4
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert not chunks[-1].choices
    assert {each.model for each in chunks} == {"writer"}
    assert len({each.id for each in chunks}) == 1
    plain = client.chat.completions.create(**asked, stream=True)
    assert all(each.usage is None for each in plain)


def test_probabilities_of_tokens(client):
    asked = {"model": "writer", "messages": CHAT, **GREEDY}
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
    ("given", "named"),
    [
        ({"messages": CHAT, "n": 2}, "n"),
        ({"messages": CHAT, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"messages": CHAT, "presence_penalty": 0.5}, "presence_penalty"),
        ({"messages": CHAT, "tools": [TOOL]}, "tools"),
        ({"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": CHAT, "stop": ["a"] * 17}, "stop"),
        ({"messages": CHAT, "stop": ""}, "stop"),
        ({"messages": [{"role": "user", "content": PICTURE}]}, "image_url"),
        ({"prompt": TEXTS[0], "max_tokens": 0}, "max_tokens"),
        ({"prompt": TEXTS[0], "extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logp"),
        ({"prompt": [[1, 10**6]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(client, given, named):
    asked = client.chat.completions if "messages" in given else client.completions
    with pytest.raises(openai.BadRequestError) as error:
        asked.create(model="writer", **given)
    assert named in f"{error.value.param} {error.value}"


def test_wrong_adapters(writing, client):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="/classify"):
            client.chat.completions.create(model="classes", messages=CHAT, stream=stream)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nothing", messages=CHAT, stream=stream)
    with pytest.raises(openai.BadRequestError, match="/v1/chat/completions"):
        client.embeddings.create(model="writer", input="a plot")
    with pytest.raises(openai.BadRequestError, match="positions"):
        client.completions.create(model="writer", prompt="a plot " * 4000, stream=True)


def test_an_error_within_a_stream(client, monkeypatch):
    """The status was sent before: the error is the last event, which the client raises."""

    async def fail(text):
        raise StoppedError("the engine is closed")

    monkeypatch.setattr(AsyncGeneration, "result", fail)
    stream = client.chat.completions.create(model="writer", messages=CHAT, stream=True, **GREEDY)
    with pytest.raises(openai.APIError, match="does not compute now") as error:
        list(stream)
    assert error.value.code == "not_ready"


def test_a_client_that_leaves_a_stream(writing, client):
    """Its text is not written to its end."""
    engine = writing[2].engine
    before = engine.counts["generated_tokens"]
    stream = client.completions.create(
        model="writer", prompt="a", stream=True, max_tokens=100, temperature=0
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: engine.counts["cancelled"] == 1)
    assert engine.counts["generated_tokens"] - before < 90


# Vectors, lists of models, and classes of errors


@pytest.fixture
def of_vectors(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_vectors_are_those_of_predict(server, of_vectors, backbone):
    expected = [each["vector"] for each in server.expected("embedding", *TEXTS)]
    for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        found = of_vectors.embeddings.create(model="embedding", input=list(TEXTS), **encoding)
        vectors = [each.embedding for each in found.data]
        if encoding.get("encoding_format") != "base64":
            assert same_answer(vectors, expected)
        assert [each.index for each in found.data] == list(range(len(TEXTS)))
        assert found.model == "embedding"
    assert found.usage.prompt_tokens == found.usage.total_tokens > len(TEXTS)
    length = {"dimensions": len(expected[0])}
    one = of_vectors.embeddings.create(model="embedding", input=TEXTS[0], **length)
    assert same_answer([each.embedding for each in one.data], expected[:1])
    bare = of_vectors.embeddings.create(model=BACKBONE, input="a plot")
    alone = ah.embed(*ah.load_backbone(str(backbone)), ["a plot"])
    assert same_answer([each.embedding for each in bare.data], alone.tolist())
    assert bare.model == BACKBONE
    assert {each.id for each in of_vectors.models.list()} == {BACKBONE, *NAMED}
    found = of_vectors.models.retrieve("tagging")
    assert (found.id, found.parent) == ("tagging", BACKBONE)
    assert of_vectors.models.retrieve(BACKBONE).parent is None


def test_tokens_of_the_backbone(server, of_vectors):
    tokenizer = server.tokenizer
    ids = tokenizer(TEXTS[0])["input_ids"]
    found = of_vectors.embeddings.create(model="embedding", input=[ids, ids])
    expected = server.expected("embedding", TEXTS[0])[0]["vector"]
    assert same_answer([each.embedding for each in found.data], [expected] * 2)
    for foreign in ([10**6], [-1], [], [tokenizer.unk_token_id]):
        with pytest.raises(openai.BadRequestError, match=r"check_embedding_ctx_length|no input"):
            of_vectors.embeddings.create(model="embedding", input=[foreign, ids])


def test_errors_have_the_classes_of_the_client(server, of_vectors, monkeypatch):
    with pytest.raises(openai.NotFoundError, match="embedding"):
        of_vectors.embeddings.create(model="embeding", input="a plot")
    with pytest.raises(openai.NotFoundError):
        of_vectors.models.retrieve("../../etc")
    with pytest.raises(openai.UnprocessableEntityError) as error:
        of_vectors.embeddings.create(model="embedding", input={"a": 1})
    assert error.value.param.startswith("input")
    with pytest.raises(openai.BadRequestError) as error:
        of_vectors.embeddings.create(model="embedding", input="a plot", dimensions=2)
    assert error.value.param == "dimensions"
    monkeypatch.setattr(server.service.engine, "queue_tokens", 0)
    with pytest.raises(openai.RateLimitError) as error:
        of_vectors.embeddings.create(model="embedding", input="a plot")
    assert int(error.value.response.headers["retry-after"]) >= 1


def test_an_adapter_of_another_task_is_told_its_paths(of_vectors):
    for name, *paths in (
        ("classification", "/classify", "/predict"),
        ("reranking", "/v1/rerank", "/score"),
        ("tagging", "/models/{reference}", "/v2/models/{name}/infer"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            of_vectors.embeddings.create(model=name, input="a plot")
        assert all(path in str(error.value) for path in (*paths, "/v1/predict"))
        assert error.value.code == "wrong_shape"
