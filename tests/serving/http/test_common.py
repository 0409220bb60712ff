"""All shapes together: examples, requests that a fuzzer makes, and which adapter fits which."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from requests import get, request

from adapterhub.serving.http.lifecycle import ENDPOINTS
from adapterhub.tasks import TASKS, parse_task
from tests.kit.selection import ALL
from tests.kit.server import BACKBONE, NAMED

schemathesis = pytest.importorskip("schemathesis", reason='pip install "adapterhub[clients]"')
CASES = 60 if ALL else 4
PATHS = [(each.methods, each.shown) for each in ENDPOINTS]
ANSWERS = {each.shown: each.response for each in ENDPOINTS}
MEANT = 503  # the only status of 500 and more that a request may lead to: a server that leaves


def examples_at(url):
    """Yield what the description has an example of: method, path, adapter and body."""
    for path, methods in get(f"{url}/openapi.json", timeout=60).json()["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            examples = content.get("application/json", {}).get("examples", {})
            for model, example in examples.items():
                yield method, path, model, example["value"]


def test_every_example_is_answered(server, writing):
    writer, folders, _ = writing
    for name in (*NAMED, BACKBONE):  # loaded adapters have examples
        get(f"{server.url}/v1/models/{name}", timeout=60)
    for name in folders:
        get(f"{writer}/v1/models/{name}", timeout=60)
    seen = set()
    for url in (server.url, writer):
        for method, path, model, body in examples_at(url):
            names = {"{reference}": model, "{name}": model}
            shown = path
            for name, value in names.items():
                shown = shown.replace(name, value)
            answer = request(method, url + shown, json=body, timeout=60)
            assert answer.status_code == 200, (path, model, answer.text)
            seen.add((path, model))
            if (response := ANSWERS[path]) is not None:
                response.model_validate(answer.json())
    posts = {e.shown for e in ENDPOINTS if e.methods == "POST" and e.role != "admin"}
    posts -= {"/v2/models/{name}/versions/{version}/infer"}  # the same with a version
    posts -= {"/v2/repository/index"}  # takes no body
    assert {path for path, _ in seen} == posts
    assert {model for _, model in seen} == {*NAMED, BACKBONE, *folders}


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_no_request_of_a_fuzzer_is_an_error_of_the_server(server, writing, method, path):
    """Requests of the described form, of which most name an adapter that there is."""
    url, names = server.url, [*NAMED, BACKBONE]
    if "completions" in path:
        url, names = writing[0], ["writer", BACKBONE]
    operation = schemathesis.openapi.from_url(f"{url}/openapi.json")[path][method]

    @settings(
        max_examples=CASES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(), st.sampled_from(names), st.booleans())
    def check(case, name, is_named):
        body = case.body
        if is_named and isinstance(body, dict) and "model" in body:
            body = {**body, "model": name, **({"max_tokens": 3} if "completion" in path else {})}
            case.body = body
        if is_named:
            case.path_parameters = {key: name for key in case.path_parameters or {}}
        answer = case.call(timeout=60)
        assert answer.status_code < 500 or answer.status_code == MEANT, (case.body, answer.text)

    check()


def test_what_is_printed_has_the_declared_names(server):
    assert not [name for name, task in TASKS.items() if not task.printed_fields]
    for name, example in NAMED.items():
        task = parse_task(example.task)
        for answer in server.expected(name):
            declared = {*task.printed_fields, task.input_name}
            assert declared - {"similarity"} <= answer.keys() <= declared
