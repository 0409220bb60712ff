"""Cells on a real local Ray of two nodes: the same records as in one process (test_on_ray.py)."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from adapterhub._version import __version__
from adapterhub.bench import ray_engine
from adapterhub.bench.cells import Cell
from adapterhub.bench.conduct import run_study
from adapterhub.bench.ray_engine import BenchWorker, RayEngine
from adapterhub.bench.records import CellRecord
from adapterhub.errors import BackboneError, TrainingError
from tests.kit.studies import facts, planned

CELLS = [Cell("a", "lora", 10, 5, 1e-3, seed, "final") for seed in range(4)]


def light_worker(folder: Path) -> type:
    """Return a worker without torch, whose cells with the files `dies-SEED` end its process.

    A class in a function travels to the workers by value: they cannot import tests. What it returns
    in place of a record is built in, for a record imports torch, in each worker.
    """

    class Light:
        def __init__(self, *_: object) -> None:
            pass

        def problem(self) -> str:
            path = folder / "problem"
            return path.read_text() if path.exists() else ""

        def run(self, cell: Cell) -> tuple[int, int]:
            deaths = folder / f"dies-{cell.seed}"
            if deaths.exists() and (left := int(deaths.read_text())):
                deaths.write_text(str(left - 1))
                os._exit(1)
            return cell.seed, os.getpid()

    return Light


@pytest.fixture
def light(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "BenchWorker", light_worker(tmp_path))
    return RayEngine({}, tmp_path / "work", address=cluster)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_nodes_give_the_records_of_one_process_though_a_worker_dies(
    study, tmp_path, cluster, capfd, monkeypatch
):
    methods = ("head", "lora(rank=2)", "lora(sites=[nowhere])")
    study = replace(study, bench=replace(study.bench, methods=methods, rates=1))
    plan, folder, local = planned(study, tmp_path)
    expected = [facts(record) for record in run_study(plan, folder, local).records]
    plan, folder, _ = planned(study, tmp_path / "ray")
    died = tmp_path / "died"

    class Dying(BenchWorker):
        def run(self, cell: Cell) -> CellRecord:
            if cell.stage == "final" and not died.exists():
                died.touch()
                os._exit(1)
            return BenchWorker.run(self, cell)

    monkeypatch.setattr(ray_engine, "BenchWorker", Dying)
    capfd.readouterr()
    with RayEngine(plan.contexts, tmp_path / "ray" / "study" / "work", address=cluster) as engine:
        assert [share.cpus for share in engine.actors.values()] == [1, 1]
        state = run_study(plan, folder, engine)
    assert died.exists()
    assert [facts(record) for record in state.records] == expected
    assert all("1 threads" in r.origin["device"] and r.origin["node"] for r in state.records)
    assert capfd.readouterr() == ("", ""), "Ray's messages do not reach the user"
    assert not list((tmp_path / "ray" / "study" / "work").iterdir())


def test_a_cell_whose_worker_dies_is_run_again_and_no_worker_is_left(light, tmp_path):
    """Nor is one after Ctrl-C, which the last record is followed by."""
    (tmp_path / "dies-1").write_text("2")
    records = []

    def stopped() -> None:
        with light:
            records.extend(light.run(CELLS))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert sorted(seed for seed, _ in records) == [0, 1, 2, 3]
    until = time.monotonic() + 20
    pids = {pid for _, pid in records}
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(is_alive, pids))
    assert not light.ray.is_initialized()


def test_a_cell_that_kills_every_worker_is_named_once_the_others_are_done(
    light, tmp_path, monkeypatch
):
    monkeypatch.setattr(ray_engine, "MOST_TRIES", 2)
    (tmp_path / "dies-1").write_text("99")
    records = []
    with light, pytest.raises(TrainingError, match="2 times each") as error:
        records.extend(seed for seed, _ in light.run(CELLS))
    assert sorted(records) == [0, 2, 3]
    assert CELLS[1].describe() in str(error.value)


def test_a_node_that_cannot_run_the_study_is_refused(light, tmp_path):
    (tmp_path / "problem").write_text("no backbone 'x'")
    with light, pytest.raises(BackboneError, match="no backbone 'x'"):
        list(light.run(CELLS))


def test_a_worker_compares_release_and_weights(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contexts = planned(study, tmp_path)[0].contexts
    here = (__version__, str(tmp_path))
    assert BenchWorker(contexts, tmp_path, 1, here).problem() == ""
    other = BenchWorker(contexts, tmp_path, 1, ("0.0.1", str(tmp_path)))
    assert "0.0.1" in other.problem()
    weights = {name: replace(each, backbone="other") for name, each in contexts.items()}
    assert "other weights" in BenchWorker(weights, tmp_path, 1, here).problem()
    recipe = replace(contexts["train"].recipe, backbone="./nowhere")
    missing = {"train": replace(contexts["train"], recipe=recipe)}
    assert "./nowhere" in BenchWorker(missing, tmp_path, 1, here).problem()
