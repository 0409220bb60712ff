"""Every task and method over HTTP, in batches that they share: the answers are those of `predict`.

ADAPTERHUB_REQUESTS=100000 asks that often, and looks at the memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
from pathlib import Path

import pytest
from http_load import Load

from adapterhub.errors import AdapterhubError
from adapterhub.methods import METHODS
from adapterhub.serving import Engine
from tests.kit.matrix import example
from tests.kit.selection import cases_of
from tests.kit.server import (
    EXAMPLES,
    expected_answers,
    running,
    same_answer,
    service_of,
    write_adapter,
)

CLIENTS = 32
REQUESTS = int(os.environ.get("ADAPTERHUB_REQUESTS", "300"))
PAIRS = cases_of(itertools.product(sorted(METHODS), range(len(EXAMPLES))), 16, nightly=4)
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
            found[name] = write_adapter(
                backbone, folder / name, example(method), EXAMPLES[n], seed=n
            )
        except AdapterhubError:
            continue  # such as a method of heads on a task without one
    return found


@pytest.mark.timeout(3600 if REQUESTS > 5000 else 300)
def test_answers_are_those_of_predict_in_mixed_batches(backbone, folders):
    assert len(folders) > len(PAIRS) * 0.8
    assert len({name.partition("-")[2] for name in folders}) >= len(EXAMPLES)
    inputs = {name: EXAMPLES[int(name.rsplit("-", 1)[1])].inputs for name in folders}
    expected = {name: expected_answers(f, inputs[name]) for name, f in folders.items()}
    drawn = random.Random(0)
    with Engine(str(backbone)) as engine:
        engine.pin(*folders.values())
        with running(service_of(engine, folders)) as address:
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
                    if not same_answer(json.loads(body)["predictions"], [expected[name][i]])
                ]
                assert not wrong
                at_first = at_first or resident()
                if REQUESTS >= 10_000:
                    assert resident() < at_first + GROWTH, part
    shared = engine.counts["rows"] / engine.counts["batches"]
    assert shared > 1.5, shared
    assert engine.counts["tokens"] / engine.counts["positions"] > 0.75
