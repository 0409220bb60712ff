"""Triton's client over HTTP, unmodified: JSON and binary tensors."""

import json

import numpy as np
import pytest
from requests import get, post

from tests.kit.server import CONTEXT, NAMED, TEXTS, same_answer

triton = pytest.importorskip("tritonclient.http", reason='pip install "adapterhub[clients]"')
from tritonclient.utils import InferenceServerException  # noqa: E402


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


def tensor(texts, name="text", binary=True):
    array = np.array([each.encode() for each in texts], dtype=np.object_)
    given = triton.InferInput(name, [len(texts)], "BYTES")
    return given.set_data_from_numpy(array, binary_data=binary)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", [n for n, e in NAMED.items() if e.inputs == TEXTS])
def test_answers_are_those_of_predict(server, client, name, binary):
    outputs = None if binary else [triton.InferRequestedOutput("prediction", binary_data=False)]
    found = client.infer(name, [tensor(TEXTS, binary=binary)], outputs=outputs, request_id="7")
    expected = server.expected(name)
    printed = [json.loads(each) for each in found.as_numpy("prediction")]
    assert same_answer(printed, expected)
    assert found.get_response()["id"] == "7"
    if outputs is None and "scores" in expected[0]:
        rows = [[*each["scores"].values()] for each in expected]
        assert same_answer(found.as_numpy("scores").tolist(), rows)
    if outputs is None and "label" in expected[0]:
        labels = [each.decode() for each in found.as_numpy("label")]
        assert labels == [each["label"] for each in expected]


@pytest.mark.parametrize("binary", [True, False])
def test_pairs_are_two_tensors_or_rows_of_two(server, client, binary):
    pairs = NAMED["reranking"].inputs
    values = [each["value"] for each in server.expected("reranking")]
    columns = [list(each) for each in zip(*pairs, strict=True)]
    two = [tensor(columns[0], "text", binary), tensor(columns[1], "pair", binary)]
    assert same_answer(client.infer("reranking", two).as_numpy("value").tolist(), values)
    array = np.array([[t.encode() for t in each] for each in pairs], dtype=np.object_)
    rows = triton.InferInput("text", list(array.shape), "BYTES")
    rows.set_data_from_numpy(array, binary_data=binary)
    assert same_answer(client.infer("reranking", [rows]).as_numpy("value").tolist(), values)


def test_spans_and_vectors(server, client):
    (expected,) = server.expected("question-answering", ("the end was", CONTEXT))
    given = [tensor(["the end was"], "text"), tensor([CONTEXT], "pair")]
    found = client.infer("question-answering", given)
    assert found.as_numpy("answer").tolist() == [expected["answer"].encode()]
    assert found.as_numpy("start").tolist() == [expected["start"]]
    vectors = client.infer("embedding", [tensor(TEXTS)]).as_numpy("vector").tolist()
    assert same_answer(vectors, [e["vector"] for e in server.expected("embedding", *TEXTS)])


def test_server_and_models(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("many")
    assert not client.is_model_ready("nothing")
    assert client.get_server_metadata()["name"] == "adapterhub"
    found = client.get_model_metadata("reranking")
    assert [each["name"] for each in found["inputs"]] == ["text", "pair"]
    assert [each["name"] for each in found["outputs"]] == ["value", "prediction"]
    for name, example in NAMED.items():  # what is declared is what is answered
        declared = {e["name"]: e for e in client.get_model_metadata(name)["outputs"]}
        if example.inputs == TEXTS:
            answered = client.infer(name, [tensor(TEXTS)]).get_response()["outputs"]
            assert {e["name"] for e in answered} == declared.keys()
            assert all(e["datatype"] == declared[e["name"]]["datatype"] for e in answered)


def test_tensors_that_do_not_fit(server):
    for datatype, shape, data, words in (
        ("BYTES", [2], ["a"], "shape"), ("BYTES", [], ["a"], "shape"),
        ("FP32", [1], [1.0], "FP32"), ("BYTES", [1], [None], "text"),
        ("BYTES", [-1, -1], [], "shape"),
    ):  # fmt: skip
        given = {"name": "t", "datatype": datatype, "shape": shape, "data": data}
        answer = post(f"{server.url}/v2/models/many/infer", json={"inputs": [given]}, timeout=60)
        assert (answer.status_code, words in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("head", "tail", "length"),
    [
        (4, b"\x05\x00\x00\x00a", None),  # an element that is longer than the rest
        (6, b"\x01\x00\x00\x00a", None),  # fewer bytes than the head says
        (2**70, b"", None),
        (-1, b"", None),
        (5, b"\x01\x00\x00\x00\xff", None),  # no UTF-8
        (0, b"more", None),
        (5, b"\x01\x00\x00\x00a", "99999"),
        (5, b"\x01\x00\x00\x00a", "-3"),
        (5, b"\x01\x00\x00\x00a", "x"),
        (5, b"\x01\x00\x00\x00a", "9" * 900),
    ],
)
def test_broken_binary_tensors(server, head, tail, length):
    given = {"name": "t", "datatype": "BYTES", "shape": [1]}
    given["parameters"] = {"binary_data_size": head}
    text = json.dumps({"inputs": [given]}).encode()
    headers = {"Inference-Header-Content-Length": length or str(len(text))}
    url = f"{server.url}/v2/models/many/infer"
    answer = post(url, data=text + tail, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_unknown_outputs_and_models(server, client):
    outputs = [triton.InferRequestedOutput("nothing")]
    with pytest.raises(InferenceServerException, match="prediction"):
        client.infer("many", [tensor(TEXTS)], outputs=outputs)
    with pytest.raises(InferenceServerException, match="no adapter"):
        client.infer("manx", [tensor(TEXTS)])
    with pytest.raises(InferenceServerException, match="uncompressed"):
        client.infer("many", [tensor(TEXTS)], request_compression_algorithm="gzip")
    assert get(f"{server.url}/v2/models/many/versions/7", timeout=60).status_code == 404
