"""A server in replicas on a real local Ray of two nodes. `tests/test_on_ray.py` runs these."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import adapterhub as ah
from adapterhub.backbones.find import remember_folder
from adapterhub.errors import ConfigError, ServingError
from adapterhub.files.native import Saved
from adapterhub.ray_cluster import connect_ray, import_serve
from adapterhub.serving.http.lifecycle import HttpServer
from adapterhub.serving.options import ServeOptions
from adapterhub.serving.ray_front import open_replicas
from adapterhub.web.tokens import TokenFile
from tests.kit import server as kit
from tests.kit.server import EXAMPLES, TEXTS, same_answer
from tests.kit.web_servers import HttpAnswer, ask

NAMES = tuple(f"polite-{number}" for number in range(8))
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # of Ray's own code
]


@dataclass
class Running:
    """A server with two replicas, the folder of its adapters, and a token for each client."""

    address: str
    engine: Any
    folder: Path
    tokens: dict[str, str]
    stop: Callable[[], None]

    def ask(self, path: str, body: Any = None, token: str = "all") -> HttpAnswer:
        """Send a request with a token; GET without a body."""
        headers = {"authorization": f"Bearer {self.tokens[token]}"} if token else {}
        return ask(self.address, path, body, headers, seconds=120)

    def predict(self, name: str, *inputs: Any, token: str = "all") -> HttpAnswer:
        """Request predictions with a token."""
        return self.ask("/v1/predict", {"model": name, "inputs": inputs}, token)

    def pids(self) -> list[int]:
        """Return the processes of the replicas."""
        return [int(pid) for pid, _ in self.engine.all("process")]


@pytest.fixture(scope="module")
def options(backbone, session_home, cluster, tmp_path_factory):
    """Publish adapters, and return what is served."""
    folder = tmp_path_factory.mktemp("replicas")
    for number, name in enumerate(NAMES):
        kit.write_adapter(backbone, folder / name, "lora(rank=2)", EXAMPLES[number % 2], number)
        ah.publish(folder / name, name, registry=folder / "registry")
    remember_folder(Saved.at(folder / NAMES[0]).manifest.backbone.id, backbone)
    return ServeOptions(
        adapters=(NAMES[0],),
        backbone=str(backbone),
        allow=("polite-*",),
        registry=str(folder / "registry"),
        port=0,
        refresh="off",
        ray=True,
        ray_address=cluster,
        workers=2,
    )


def test_an_adapter_that_cannot_be_loaded_is_told(options: ServeOptions) -> None:
    with pytest.raises(ServingError, match="the replicas cannot be started") as error:
        open_replicas(replace(options, adapters=("nobody@7",), workers=1))
    assert "nobody" in str(error.value)
    with pytest.raises(ConfigError, match="3 workers on a Ray cluster with 2 CPUs"):
        open_replicas(replace(options, workers=3))


@pytest.fixture(scope="module")
def server(options: ServeOptions) -> Iterator[Running]:
    """Start a server with two replicas on two nodes."""
    folder = Path(str(options.registry)).parent
    file = TokenFile(folder / "tokens.json")
    tokens = {
        "all": file.create("all", ("predict", "admin")),
        "one": file.create("one", adapters=(NAMES[1],)),
    }
    options = replace(options, tokens=str(file.path))
    service, endpoints = open_replicas(options)
    started: list[str] = []
    ready = threading.Event()

    def begin(where: str) -> None:
        started.append(where)
        ready.set()

    http = HttpServer(service, options, begin, endpoints)
    thread = threading.Thread(target=http.run)
    thread.start()

    def stop() -> None:
        http.stop()
        thread.join(60)

    try:
        assert ready.wait(240), "not ready"
        yield Running(started[0], service.engine, folder, tokens, stop)
    finally:
        stop()


def test_answers_are_those_of_one_machine(server: Running) -> None:
    for name in NAMES:
        answer = server.predict(name, *TEXTS)
        assert answer.status == 200, answer
        expected = kit.expected_answers(str(server.folder / name), TEXTS)
        assert same_answer(answer.json["predictions"], expected)
        assert answer.headers["x-adapter-version"].startswith(f"{name}@")


def test_two_nodes_compute(server: Running) -> None:
    nodes = {node for _, node in server.engine.all("process")}
    assert len(nodes) == 2
    with ThreadPoolExecutor(16) as pool:
        asked = ((NAMES[n % 8], TEXTS[n % 6]) for n in range(200))
        answers = list(pool.map(lambda each: server.predict(*each), asked))
    assert {answer.status for answer in answers} == {200}
    text = server.ask("/metrics").data.decode()
    lines = [line for line in text.splitlines() if line.startswith("adapterhub_batches_total{")]
    assert len(lines) == 2
    assert all(float(line.split()[-1]) > 0 for line in lines), lines
    assert text.count("# TYPE adapterhub_batches_total counter") == 1


def test_an_adapter_is_asked_of_a_replica_that_has_it(server: Running) -> None:
    def loaded() -> Counter[tuple[int, str]]:
        return Counter(
            (replica, use.reference)
            for replica, uses in enumerate(server.engine.all("models"))
            for use in uses
        )

    time.sleep(1)  # until the replicas have said what they have
    before = loaded()
    for name in NAMES[1:] * 10:
        assert server.predict(name, TEXTS[0]).status == 200
    assert loaded() == before, "no adapter was loaded a second time"


def test_tokens_limits_and_refusals_are_those_of_one_machine(server: Running) -> None:
    for name, given, token, status in (
        (NAMES[1], TEXTS[0], "", 401),
        (NAMES[1], TEXTS[0], "one", 200),
        (NAMES[2], TEXTS[0], "one", 404),
        ("impolite", TEXTS[0], "all", 404),
        (NAMES[1], 7, "all", 400),
    ):
        assert server.predict(name, given, token=token).status == status
    assert server.ask("/healthz", token="").status == 200
    assert server.ask("/openapi.json", token="").status == 200
    assert server.ask("/admin/refresh", {}, token="one").status == 403


def test_a_new_version_reaches_all_replicas(server, tmp_path, backbone):
    name = NAMES[3]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: server.predict(name, TEXTS[0]), range(40)))
    kit.write_adapter(backbone, tmp_path / "new", "lora(rank=2)", EXAMPLES[1], seed=99)
    entry = ah.publish(tmp_path / "new", name, registry=server.folder / "registry")
    assert server.ask("/admin/refresh", {}).json == {"moved": 1}
    expected = kit.expected_answers(str(tmp_path / "new"), TEXTS)

    def ask(_: int) -> tuple[str, bool]:
        answer = server.predict(name, *TEXTS)
        right = same_answer(answer.json["predictions"], expected)
        return answer.headers["x-adapter-digest"], right

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(40))) == {(entry.digest, True)}


def test_a_killed_replica_loses_no_request(server: Running) -> None:
    expected = {name: kit.expected_answers(str(server.folder / name), TEXTS) for name in NAMES[:3]}
    stop = threading.Event()

    def ask(number: int) -> list[tuple[int, bool]]:
        found = []
        while not stop.is_set():
            name = NAMES[number % 3]
            answer = server.predict(name, *TEXTS)
            same = answer.status == 200 and same_answer(answer.json["predictions"], expected[name])
            found.append((answer.status, same))
        return found

    first = server.pids()
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, number) for number in range(16)]
        time.sleep(1)
        os.kill(first[0], signal.SIGKILL)
        ends = time.monotonic() + 120
        time.sleep(2)
        while time.monotonic() < ends and not _has_two_others(server, first):
            time.sleep(0.5)
        stop.set()
        found = [each for future in asked for each in future.result()]
    assert len(found) > 100
    assert set(found) == {(200, True)}
    assert _has_two_others(server, first), "the replica was replaced"
    assert server.predict(NAMES[0], TEXTS[0]).status == 200


def _has_two_others(server: Running, first: list[int]) -> bool:
    try:
        now = server.pids()
    except Exception:  # of Ray, while a replica is being replaced
        return False
    return len(now) == 2 and first[0] not in now


def test_a_server_that_leaves_takes_its_replicas_along(server: Running, cluster: str) -> None:
    server.stop()
    ray, serve = import_serve()
    connect_ray(ray, cluster)
    assert serve.status().applications == {}
    ray.shutdown()
    assert not server.engine.is_alive
