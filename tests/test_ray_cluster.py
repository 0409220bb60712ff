"""A Ray cluster is shared out among workers; what is missing is told."""

import sys
from typing import Any

import pytest

from adapterhub.errors import ConfigError
from adapterhub.ray_cluster import WorkerShare, connect_ray, import_ray, share_out


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="not installed") as error:
        import_ray()
    assert 'pip install "adapterhub[ray]"' in str(error.value)


def test_an_address_where_nothing_answers_is_told() -> None:
    with pytest.raises(ConfigError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        connect_ray(None, "127.0.0.1:1")


def node(name: str, cpus: float, gpus: float = 0, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": cpus, "GPU": gpus}}


@pytest.mark.parametrize(
    ("nodes", "workers", "expected"),
    [
        ([node("a", 1), node("b", 1)], None, [("a", 1, 0), ("b", 1, 0)]),
        ([node("a", 16), node("b", 2)], None, [("a", 4, 0)] * 4 + [("b", 2, 0)]),
        ([node("a", 16), node("b", 2)], 3, [("a", 5, 0)] * 3),
        ([node("a", 8), node("b", 8)], 2, [("a", 8, 0), ("b", 8, 0)]),
        ([node("a", 8), node("b", 8, alive=False)], 2, [("a", 4, 0)] * 2),
        ([node("a", 16, 2), node("b", 64)], None, [("a", 8, 1)] * 2),
        ([node("a", 16, 2)], 1, [("a", 16, 1)]),
        ([node("a", 0), node("b", 2)], None, [("b", 2, 0)]),
    ],
)
def test_a_cluster_is_shared_out(
    nodes: list[dict[str, Any]], workers: int | None, expected: list[tuple[str, int, int]]
) -> None:
    assert share_out(nodes, workers) == [WorkerShare(*each) for each in expected]


@pytest.mark.parametrize(("cpus", "workers"), [(2, 3), (2, 0), (0, None)])
def test_more_workers_than_cpus_are_refused(cpus: int, workers: int | None) -> None:
    with pytest.raises(ConfigError, match=f"with {cpus} CPUs"):
        share_out([node("a", cpus)], workers)
