"""Jobs on Parquet files, here and on a real local Ray of two nodes: the same rows, none lost.

`tests/test_on_ray.py` runs them.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from adapterhub.errors import DataError, TrainingError
from adapterhub.inference import table_job
from adapterhub.inference.table_job import (
    TablePart,
    plan_table,
    predict_here,
    predict_on_ray,
)
from tests.kit.runs import routed, write_table

pytestmark = pytest.mark.timeout(550)


def joined(found: Iterator[tuple[TablePart, pa.Table]]) -> pa.Table:
    tables = dict(found)
    return pa.concat_tables([tables[part] for part in sorted(tables, key=lambda p: p.number)])


def test_two_nodes_give_the_rows_of_one_process(cluster, two_adapters, tmp_path):
    planned = plan_table(routed(two_adapters, write_table(tmp_path)))
    here = joined(predict_here(planned.job, planned.parts)).to_pylist()
    there = joined(predict_on_ray(planned.job, planned.parts, address=cluster)).to_pylist()
    assert len(there) == len(here) == 46
    assert there == here


def light_worker(folder: Path) -> type:
    """Return a worker without torch, which dies while the file `deaths` has a number above 0.

    A class in a function travels to the workers by value: they cannot import tests. Its parts are
    numbers, for a part or a job imports torch, in each worker.
    """

    class Light:
        def __init__(self, *_: object) -> None:
            self.node = __import__("ray").get_runtime_context().get_node_id()

        def predict(self, part: int) -> tuple[int, str]:
            deaths = folder / "deaths"
            if part == 3 and deaths.exists() and (left := int(deaths.read_text())):
                deaths.write_text(str(left - 1))
                os.kill(os.getpid(), signal.SIGKILL)
            if (folder / "broken").exists():
                raise DataError("a broken row", hint="mend it")
            return part, self.node

    return Light


def test_a_killed_worker_is_started_again_and_its_part_is_not_lost(cluster, tmp_path, monkeypatch):
    """One that dies each time ends the job; its other errors are those of the user."""
    monkeypatch.setattr(table_job, "TableWorker", light_worker(tmp_path))
    deaths = tmp_path / "deaths"

    def predicted() -> dict[int, tuple[int, str]]:
        return dict(predict_on_ray(None, range(12), address=cluster))  # type: ignore[arg-type]

    deaths.write_text("2")
    found = predicted()
    assert sorted(number for number, _ in found.values()) == list(range(12))
    assert len({node for _, node in found.values()}) == 2
    assert deaths.read_text() == "0"
    deaths.write_text("99")
    with pytest.raises(TrainingError, match="died more than"):
        predicted()
    deaths.unlink()
    (tmp_path / "broken").touch()
    with pytest.raises(DataError) as error:
        predicted()
    assert error.value.hint == "mend it"
