"""All shapes, tasks and methods together: examples, a fuzzer, and answers of mixed batches."""

import asyncio
import itertools
import json
import os
import random
from pathlib import Path

import pytest
from http_load import Load
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from requests import get, request

from adapterhub.errors import AdapterhubError
from adapterhub.methods import METHODS
from adapterhub.serving import Engine
from adapterhub.serving.http.lifecycle import ENDPOINTS
from tests.kit import server as kit
from tests.kit.matrix import example as spec_of
from tests.kit.selection import ALL, cases_of
from tests.kit.server import BACKBONE, EXAMPLES, NAMED

schemathesis = pytest.importorskip("schemathesis", reason='pip install "adapterhub[clients]"')
CASES = 20 if ALL else 3
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


# Every task and method over HTTP, in batches that they share: the answers are those of `predict`.


CLIENTS = 32
REQUESTS = int(os.environ.get("ADAPTERHUB_REQUESTS", "160"))
PAIRS = cases_of(itertools.product(sorted(METHODS), range(len(EXAMPLES))), 32, nightly=8)
GROWTH = 30e6  # bytes, from the first tenth of the requests on


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def folders(backbone, tmp_path_factory):
    """Save an adapter for each pair of a method and a task that fit."""
    folder = tmp_path_factory.mktemp("all")
    found = {}
    for method, n in PAIRS:
        name = f"{method}-{EXAMPLES[n].task}-{n}"
        try:
            found[name] = kit.write_adapter(
                backbone, folder / name, spec_of(method), EXAMPLES[n], seed=n
            )
        except AdapterhubError:
            continue  # such as a method of heads on a task without one
    return found


@pytest.mark.timeout(3600 if REQUESTS > 5000 else 300)
def test_answers_are_those_of_predict_in_mixed_batches(backbone, folders):
    assert len(folders) > len(PAIRS) * 0.8
    assert len({name.partition("-")[2] for name in folders}) >= len(EXAMPLES)
    inputs = {name: EXAMPLES[int(name.rsplit("-", 1)[1])].inputs for name in folders}
    expected = {name: kit.expected_answers(f, inputs[name]) for name, f in folders.items()}
    drawn = random.Random(0)
    with Engine(str(backbone)) as engine:
        engine.pin(*folders.values())
        with kit.running(kit.service_of(engine, folders)) as address:
            at_first = 0
            for part in range(10):
                asked = []
                for _ in range(max(REQUESTS // 10, 1)):
                    name = drawn.choice(list(folders))
                    asked.append((name, drawn.randrange(len(inputs[name]))))
                bodies = [json.dumps({"model": n, "inputs": [inputs[n][i]]}) for n, i in asked]
                load = Load(f"{address}/v1/predict", bodies, keep=True)
                answers = asyncio.run(load.closed(CLIENTS))
                assert answers.statuses == [200] * len(asked)
                wrong = [
                    (name, i, body)
                    for number, body in zip(answers.numbers, answers.bodies, strict=True)
                    for name, i in [asked[number]]
                    if not kit.same_answer(json.loads(body)["predictions"], [expected[name][i]])
                ]
                assert not wrong
                at_first = at_first or resident()
                if REQUESTS >= 10_000:
                    assert resident() < at_first + GROWTH, part
    shared = engine.counts["rows"] / engine.counts["batches"]
    assert shared > 1.5, shared
    assert engine.counts["tokens"] / engine.counts["positions"] > 0.75
