"""The paths for those who run a server: numbers that can be added up, and a description."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest
from http_client import ask, predict
from http_service import running
from prometheus_client.parser import text_string_to_metric_families
from served import EXAMPLES, TEXTS, write_adapter

from adapterhub.inference.open import AdapterSource
from adapterhub.serving import Engine
from adapterhub.serving.http.allowed import AllowedAdapters
from adapterhub.serving.http.app import ENDPOINTS, make_app
from adapterhub.serving.http.lifecycle import served_endpoints
from adapterhub.serving.http.operations import operations
from adapterhub.serving.http.service import Service
from adapterhub.serving.options import ServeOptions
from adapterhub.web.tokens import TokenFile


@pytest.fixture(scope="module")
def folders(backbone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("operations")
    return {
        example.task: write_adapter(backbone, folder / example.task, example=example)
        for example in (EXAMPLES[0], EXAMPLES[4], EXAMPLES[5])
    }


@pytest.fixture
def service(folders):
    with Engine() as engine:
        named = {name: AdapterSource(folder) for name, folder in folders.items()}
        engine.pin(*named.values())
        yield Service(engine, AllowedAdapters(named, folders=frozenset(named)))


@pytest.fixture
def url(service):
    with running(service) as url:
        yield url


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


def test_the_dashboard_asks_for_numbers_that_there_are(url):
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


def test_the_description_has_all_paths_and_an_example_for_each_adapter(url):
    description = ask(url, "/openapi.json").json
    described = {
        (method.upper(), path) for path, of in description["paths"].items() for method in of
    }
    known = {(e.method, re.sub(r":\w+}", "}", e.path)) for e in (*ENDPOINTS, *operations())}
    assert described == known
    body = description["paths"]["/v1/predict"]["post"]["requestBody"]
    examples = body["content"]["application/json"]["examples"]
    assert examples.keys() == {"classification", "reranking", "tagging"}
    for example in examples.values():
        assert ask(url, "/v1/predict", example["value"]).status == 200
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(description)))
    assert references <= description["components"]["schemas"].keys()
    ids = [of["operationId"] for path in description["paths"].values() for of in path.values()]
    assert len(ids) == len({*ids})


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


def test_refresh(url):
    assert ask(url, "/admin/refresh", {}).json == {"moved": 0}


@pytest.mark.parametrize(
    ("metrics", "admin", "missing"),
    [("off", True, {"/metrics"}), ("admin", False, {"/admin/refresh"}), ("open", True, set())],
)
def test_switches(service, metrics, admin, missing):
    options = ServeOptions(metrics=metrics, admin=admin)
    app = make_app(service, served_endpoints(options, service))
    paths = {route.path for route in app.routes}
    assert {each.path for each in operations()} - paths == missing
