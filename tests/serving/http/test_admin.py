"""The paths for those who run a server: numbers, a description, and names given meanwhile."""

import json
import re
from importlib import resources

import pytest
from prometheus_client.parser import text_string_to_metric_families
from requests import get, post

from adapterhub.errors import ConfigError
from adapterhub.inference.open import AdapterSource
from adapterhub.registry.local import LocalRegistry
from adapterhub.serving import Engine
from adapterhub.serving.http.access import AllowedAdapters
from adapterhub.serving.http.admin import operations
from adapterhub.serving.http.lifecycle import ENDPOINTS, HttpServer, served_endpoints
from adapterhub.serving.http.request import Service
from adapterhub.serving.options import ServeOptions, read_serve_options
from adapterhub.web.tokens import TokenFile
from tests.kit.server import TEXTS, expected_answers, running, same_answer, service_of
from tests.kit.web_servers import ask, predict


@pytest.fixture
def service(server):
    with Engine() as engine:
        names = ("classification", "reranking", "tagging")
        named = {name: AdapterSource(server.folders[name]) for name in names}
        engine.pin(*named.values())
        yield Service(engine, AllowedAdapters(named, folders=frozenset(named)))


def numbers(url):
    """Return the samples of /metrics by name and labels."""
    families = text_string_to_metric_families(ask(url, "/metrics").data.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def total(found, name, **labels):
    return sum(
        value
        for (known, pairs), value in found.items()
        if known == f"adapterhub_{name}" and labels.items() <= dict(pairs).items()
    )


def test_metrics_add_up(url):
    for _ in range(3):
        predict(url, "classification", *TEXTS)
    predict(url, "tagging", TEXTS[0])
    predict(url, "tagging", 3)
    predict(url, "nothing", "a")
    found = numbers(url)
    mine = {"path": "/v1/predict"}
    assert total(found, "requests_total", **mine) == 6
    assert total(found, "requests_total", adapter="classification", task="classification") == 3
    assert total(found, "inputs_total", adapter="classification") == 3 * len(TEXTS)
    assert total(found, "errors_total", **mine) == 2
    assert total(found, "errors_total", status="400", adapter="tagging") == 1
    assert total(found, "errors_total", status="404", adapter="") == 1
    assert total(found, "request_seconds_count", **mine) == 6
    assert total(found, "batch_rows_sum") == 3 * len(TEXTS) + 1
    assert total(found, "forward_seconds_count") == total(found, "batches_total")
    assert total(found, "adapters_in_memory") == 3
    assert total(found, "adapter_bytes") > 0
    assert total(found, "adapter_loads_total") == 3
    assert total(found, "adapter_load_seconds_total") > 0
    assert total(found, "queue_tokens") == total(found, "queue_requests") == 0
    assert total(found, "up") == 1


def test_the_dashboard_asks_for_numbers_that_there_are(url, service):
    predict(url, "classification", TEXTS[0])
    file = resources.files("adapterhub.serving.http").joinpath("grafana.json")
    dashboard = json.loads(file.read_text(encoding="utf-8"))
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    asked = {name for query in queries for name in re.findall(r"adapterhub_\w+", query)}
    text = ask(url, "/metrics").data.decode()
    known = set(re.findall(r"^(?:# TYPE )?(adapterhub_\w+)", text, re.MULTILINE))
    known |= {f"{name}_bucket" for name in known}
    assert len(asked) > 15
    assert asked <= known
    for name in ("resident_memory_bytes", "open_fds", "start_time_seconds"):
        assert re.search(rf"^process_{name} [1-9]", text, re.MULTILINE)
    for name in ("generated_tokens_total", "texts_running", "cache_tokens_used", "cache_tokens"):
        assert re.search(rf"^adapterhub_{name} 0.0$", text, re.MULTILINE)
    infos = [line for line in text.splitlines() if line.startswith("adapterhub_adapter_info{")]
    assert len(infos) == 3
    for each in service.engine.adapters.in_memory():
        assert any(f'digest="{each.digest[:12]}"' in line for line in infos)


def test_the_description_has_all_paths_and_an_example_for_each_adapter(url):
    description = ask(url, "/openapi.json").json
    schemas = description["components"]["schemas"]
    described = {
        (method.upper(), path) for path, of in description["paths"].items() for method in of
    }
    known = {(e.methods, re.sub(r":\w+}", "}", e.path)) for e in (*ENDPOINTS, *operations())}
    assert described == known
    body = description["paths"]["/v1/predict"]["post"]["requestBody"]
    examples = body["content"]["application/json"]["examples"]
    assert examples.keys() == {"classification", "reranking", "tagging"}
    for example in examples.values():
        assert ask(url, "/v1/predict", example["value"]).status == 200
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(description)))
    assert references <= schemas.keys()
    ids = [of["operationId"] for path in description["paths"].values() for of in path.values()]
    assert len(ids) == len({*ids})
    for path, body in (("/v1/predict", {"model": "no", "inputs": ["a"]}), ("/embed", {})):
        answers = description["paths"][path]["post"]["responses"]
        name = answers["404"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        found = ask(url, path, body)
        assert found.status >= 400
        assert found.json.keys() == schemas[name]["properties"].keys()


def test_the_documentation_asks_nobody_else(url):
    page = ask(url, "/docs")
    text = page.data.decode()
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")
    assert not re.findall(r"""(?:src|href)=["']?(?!#)""", text.replace("<!doctype", ""))
    assert "/v1/predict" in text
    assert f"curl {url}/v1/predict" in text


def test_what_there_is_not_is_counted_and_logged(url, caplog):
    assert ask(url, "/admin/refresh", {}).json == {"moved": 0}
    for method, path, status in (("GET", "/nothing", 404), ("DELETE", "/v1/predict", 405)):
        with caplog.at_level("INFO", "adapterhub.requests"):
            assert ask(url, path, method=method).status == status
        line = json.loads(caplog.records[-1].message)
        assert line.pop("ms") >= 0
        assert line == {"method": method, "path": "unknown", "status": status}
        assert total(numbers(url), "errors_total", path="other", status=str(status)) == 1


def test_the_root_names_the_paths_which_options_switch_off(url, service):
    found = ask(url, "/").json
    assert found["documentation"] == "/docs"
    assert {"/v1/predict", "/v2/models/{name}/infer"} <= found["paths"].keys()
    shown = ask(url, "/", headers={"accept": "text/html,*/*;q=0.8"}).data
    assert b"<code>POST /v1/predict</code>" in shown
    for options, missing in (
        (ServeOptions(metrics="off", try_page=True), {"/metrics"}),
        (ServeOptions(metrics="admin", admin=False), {"/admin/refresh"}),
        (ServeOptions(metrics="open"), set()),
    ):
        paths = [each.path for each in served_endpoints(options, service)]
        assert paths.count("/") == 1
        assert {each.path for each in operations()} - {*paths} == missing


def test_pages_of_allowed_origins_may_ask(service):
    page = {"origin": "https://app.example.org"}
    wanted = {**page, "access-control-request-method": "POST"}
    for origins, status in ((frozenset(), 403), (frozenset({page["origin"]}), 200)):
        service.origins = origins
        with running(service) as url:
            asked = ask(url, "/v1/predict", method="OPTIONS", headers=wanted)
            answer = ask(url, "/v1/predict", {"model": "tagging", "inputs": [TEXTS[0]]}, page)
            other = ask(url, "/healthz", headers={"origin": "https://evil.example.org"})
        assert answer.status == status
        allowed = [each.headers.get("access-control-allow-origin") for each in (asked, answer)]
        assert allowed == [page["origin"] if origins else None] * 2
        assert other.headers.get("access-control-allow-origin") is None
        assert other.status == 403
    for wrong in ("*", "app.example.org", "https://a.org/path"):
        with pytest.raises(ConfigError, match="is not an origin"):
            read_serve_options(None, {"allow_origin": (wrong,)})


def test_the_description_names_no_adapter_to_strangers(service, tmp_path):
    file = TokenFile(tmp_path / "tokens.json")
    token = file.create("one", adapters=["tag*"])
    service.tokens = file
    with running(service) as url:
        assert "tagging" not in ask(url, "/openapi.json").data.decode()
        mine = ask(url, "/openapi.json", headers={"authorization": f"Bearer {token}"}).json
    body = mine["paths"]["/v1/predict"]["post"]["requestBody"]["content"]["application/json"]
    assert body["examples"].keys() == {"tagging"}
    assert mine["paths"]["/v1/predict"]["post"]["security"] == [{"token": []}]


# Names that are given while the server runs, in vLLM's shape, and versions in every shape.


@pytest.fixture
def digests(published, tmp_path):
    store = LocalRegistry(tmp_path / "registry")
    return [store.resolve("polite", version).digest for version in ("v1", "v2")]


@pytest.fixture
def changing(backbone, published, tmp_path):
    """The address of a server of a registry with two versions of one name."""
    with (
        Engine(str(backbone), registry=tmp_path / "registry") as engine,
        running(service_of(engine, {}, polite="polite")) as url,
    ):
        yield url


def classify(url, model):
    return post(f"{url}/classify", json={"model": model, "input": TEXTS[0]}, timeout=60)


def test_every_shape_says_which_version_answers(changing, published, digests):
    url = changing
    text = TEXTS[0]
    tensor = {"inputs": [{"name": "t", "datatype": "BYTES", "shape": [1], "data": [text]}]}
    for model, version in (("polite", 2), ("polite@1", 1), ("polite@stable", 1)):
        for path, body in (
            ("/classify", {"model": model, "input": text}),
            ("/pooling", {"model": model, "input": text}),
            ("/predict", {"model": model, "inputs": text}),
            (f"/models/{model}", {"inputs": text}),
            (f"/v2/models/{model}/infer", tensor),
        ):
            answer = post(url + path, json=body, timeout=60)
            assert answer.headers["x-adapter-version"] == f"polite@v{version}"
            assert answer.headers["x-adapter-digest"] == digests[version - 1]
        assert classify(url, model).json()["model"] == f"polite@v{version}"
    found = post(f"{url}/v2/models/polite/versions/1/infer", json=tensor, timeout=60).json()
    assert found["model_version"] == "v1"
    (expected,) = expected_answers(published[0], (text,))
    (scores,) = [each["data"] for each in found["outputs"] if each["name"] == "scores"]
    assert same_answer(scores, [*expected["scores"].values()])
    assert get(f"{url}/v2/models/polite", timeout=60).json()["versions"] == ["v2"]
    assert get(f"{url}/v1/models/polite@stable", timeout=60).json()["root"] == "polite@v1"


def test_a_name_is_given_and_taken(changing):
    url = changing

    def change(verb, **body):
        return post(f"{url}/v1/{verb}_lora_adapter", json={"lora_name": "mine", **body}, timeout=60)

    assert classify(url, "mine").status_code == 404
    answer = change("load", lora_path="polite@1")
    assert answer.text == "Success: LoRA adapter 'mine' added successfully."
    assert classify(url, "mine").json()["model"] == "polite@v1"
    assert change("load", lora_path="polite@1").status_code == 400
    assert change("load", lora_path="polite@2", load_inplace=True).status_code == 200
    assert classify(url, "mine").json()["model"] == "polite@v2"
    assert change("unload").text == "Success: LoRA adapter 'mine' removed successfully."
    assert classify(url, "mine").status_code == 404
    assert change("unload").status_code == 404


def test_a_path_or_another_hub_is_no_adapter(changing, published, tmp_path, backbone):
    url = changing
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
