"""OpenAI's client, unmodified: vectors, lists of models, and its classes of errors."""

import pytest

import adapterhub as ah
from tests.kit.server import BACKBONE, NAMED, TEXTS, same_answer

openai = pytest.importorskip("openai", reason='pip install "adapterhub[clients]"')


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_vectors_are_those_of_predict(server, client, backbone):
    expected = [each["vector"] for each in server.expected("embedding", *TEXTS)]
    for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        found = client.embeddings.create(model="embedding", input=list(TEXTS), **encoding)
        vectors = [each.embedding for each in found.data]
        if encoding.get("encoding_format") != "base64":
            assert same_answer(vectors, expected)
        assert [each.index for each in found.data] == list(range(len(TEXTS)))
        assert found.model == "embedding"
    assert found.usage.prompt_tokens == found.usage.total_tokens > len(TEXTS)
    length = {"dimensions": len(expected[0])}
    one = client.embeddings.create(model="embedding", input=TEXTS[0], **length)
    assert same_answer([each.embedding for each in one.data], expected[:1])
    bare = client.embeddings.create(model=BACKBONE, input="a plot")
    alone = ah.embed(*ah.load_backbone(str(backbone)), ["a plot"])
    assert same_answer([each.embedding for each in bare.data], alone.tolist())
    assert bare.model == BACKBONE
    assert {each.id for each in client.models.list()} == {BACKBONE, *NAMED}
    found = client.models.retrieve("tagging")
    assert (found.id, found.parent) == ("tagging", BACKBONE)
    assert client.models.retrieve(BACKBONE).parent is None


def test_tokens_of_the_backbone(server, client):
    tokenizer = server.tokenizer
    ids = tokenizer(TEXTS[0])["input_ids"]
    found = client.embeddings.create(model="embedding", input=[ids, ids])
    expected = server.expected("embedding", TEXTS[0])[0]["vector"]
    assert same_answer([each.embedding for each in found.data], [expected] * 2)
    for foreign in ([10**6], [-1], [], [tokenizer.unk_token_id]):
        with pytest.raises(openai.BadRequestError, match=r"check_embedding_ctx_length|no input"):
            client.embeddings.create(model="embedding", input=[foreign, ids])


def test_errors_have_the_classes_of_the_client(server, client, monkeypatch):
    with pytest.raises(openai.NotFoundError, match="embedding"):
        client.embeddings.create(model="embeding", input="a plot")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc")
    with pytest.raises(openai.UnprocessableEntityError) as error:
        client.embeddings.create(model="embedding", input={"a": 1})
    assert error.value.param.startswith("input")
    with pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(model="embedding", input="a plot", dimensions=2)
    assert error.value.param == "dimensions"
    monkeypatch.setattr(server.service.engine, "queue_tokens", 0)
    with pytest.raises(openai.RateLimitError) as error:
        client.embeddings.create(model="embedding", input="a plot")
    assert int(error.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("classification", ("/classify", "/predict")),
        ("reranking", ("/v1/rerank", "/score")),
        ("tagging", ("/models/{reference}",)),
        ("question-answering", ("/models/{reference}", "/v2/models/{name}/infer")),
    ],
)
def test_an_adapter_of_another_task_is_told_its_paths(client, name, paths):
    with pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(model=name, input="a plot")
    assert all(path in str(error.value) for path in (*paths, "/v1/predict"))
    assert error.value.code == "wrong_shape"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": "a"}])
