"""Names that are given while the server runs, in vLLM's shape, and versions in every shape."""

import pytest
from requests import get, post

from adapterhub.registry.local import LocalRegistry
from adapterhub.serving import Engine
from adapterhub.serving.http.lifecycle import HttpServer
from adapterhub.serving.options import ServeOptions
from tests.kit.server import (
    TEXTS,
    expected_answers,
    running,
    same_answer,
    service_of,
)


@pytest.fixture
def digests(published, tmp_path):
    store = LocalRegistry(tmp_path / "registry")
    return [store.resolve("polite", version).digest for version in ("v1", "v2")]


@pytest.fixture
def url(backbone, published, tmp_path):
    with (
        Engine(str(backbone), registry=tmp_path / "registry") as engine,
        running(service_of(engine, {}, polite="polite")) as url,
    ):
        yield url


def classify(url, model):
    return post(f"{url}/classify", json={"model": model, "input": TEXTS[0]}, timeout=60)


def test_every_shape_says_which_version_answers(url, published, digests):
    asked = [
        ("/classify", {"model": "MODEL", "input": TEXTS[0]}),
        ("/pooling", {"model": "MODEL", "input": TEXTS[0]}),
        ("/predict", {"model": "MODEL", "inputs": TEXTS[0]}),
        ("/models/MODEL", {"inputs": TEXTS[0]}),
        (
            "/v2/models/MODEL/infer",
            {"inputs": [{"name": "t", "datatype": "BYTES", "shape": [1], "data": [TEXTS[0]]}]},
        ),
    ]
    for model, version in (("polite", 2), ("polite@1", 1), ("polite@stable", 1)):
        for path, body in asked:
            body = {k: model if v == "MODEL" else v for k, v in body.items()}
            answer = post(url + path.replace("MODEL", model), json=body, timeout=60)
            assert answer.headers["x-adapter-version"] == f"polite@v{version}"
            assert answer.headers["x-adapter-digest"] == digests[version - 1]
        assert classify(url, model).json()["model"] == f"polite@v{version}"
    found = post(f"{url}/v2/models/polite/versions/1/infer", json=asked[-1][1], timeout=60).json()
    assert found["model_version"] == "v1"
    (expected,) = expected_answers(published[0], (TEXTS[0],))
    (scores,) = [each["data"] for each in found["outputs"] if each["name"] == "scores"]
    assert same_answer(scores, [*expected["scores"].values()])
    assert get(f"{url}/v2/models/polite", timeout=60).json()["versions"] == ["v2"]
    assert get(f"{url}/v1/models/polite@stable", timeout=60).json()["root"] == "polite@v1"


def test_a_name_is_given_and_taken(url, tmp_path):
    load = {"lora_name": "mine", "lora_path": "polite@1"}
    assert classify(url, "mine").status_code == 404
    answer = post(f"{url}/v1/load_lora_adapter", json=load, timeout=60)
    assert answer.text == "Success: LoRA adapter 'mine' added successfully."
    assert classify(url, "mine").json()["model"] == "polite@v1"
    assert post(f"{url}/v1/load_lora_adapter", json=load, timeout=60).status_code == 400
    again = {**load, "lora_path": "polite@2", "load_inplace": True}
    assert post(f"{url}/v1/load_lora_adapter", json=again, timeout=60).status_code == 200
    assert classify(url, "mine").json()["model"] == "polite@v2"
    unload = {"lora_name": "mine"}
    answer = post(f"{url}/v1/unload_lora_adapter", json=unload, timeout=60)
    assert answer.text == "Success: LoRA adapter 'mine' removed successfully."
    assert classify(url, "mine").status_code == 404
    assert post(f"{url}/v1/unload_lora_adapter", json=unload, timeout=60).status_code == 404


def test_a_path_or_another_hub_is_no_adapter(url, published, tmp_path, backbone):
    for path in (published[0], "/etc", "../v1", "hf:owner/name", "https://127.0.0.1/a/b", "no"):
        body = {"lora_name": "mine", "lora_path": path}
        answer = post(f"{url}/v1/load_lora_adapter", json=body, timeout=60)
        assert answer.status_code == 404
        assert str(tmp_path) not in answer.text.replace(repr(path)[1:-1], "")
    for name in ("polite", "the-backbone", "../up", "a/b"):
        body = {"lora_name": name, "lora_path": "polite@1"}
        assert post(f"{url}/v1/load_lora_adapter", json=body, timeout=60).status_code == 400
    assert classify(url, "polite").json()["model"] == "polite@v2"
    with Engine(str(backbone)) as engine:  # a server may have no paths that change it
        service = service_of(engine, {})
        HttpServer(service, ServeOptions(admin=False), print)
        assert service.endpoints
        assert "admin" not in {each.role for each in service.endpoints}
