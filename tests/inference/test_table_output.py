"""The output of a job: parts that appear whole, continued by the same job only."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adapterhub.errors import OutputError
from adapterhub.inference.open import AdapterSource
from adapterhub.inference.table_job import JOB, PlannedTable, TableOutput, plan_table
from tests.kit.runs import TABLE_ROWS, routed, write_table


@pytest.fixture
def planned(two_adapters: dict[str, AdapterSource], tmp_path: Path) -> PlannedTable:
    return plan_table(routed(two_adapters, write_table(tmp_path / "rows")))


def rows_of(planned: PlannedTable, number: int) -> pa.Table:
    return pa.table({"id": [number] * planned.parts[number].rows})


def test_parts_that_are_there_are_not_missing(planned: PlannedTable, tmp_path: Path) -> None:
    output = TableOutput(str(tmp_path / "out"), planned)
    assert output.missing == list(planned.parts)
    for number in (0, 3):
        output.write(planned.parts[number], rows_of(planned, number))
    again = TableOutput(str(tmp_path / "out"), planned)
    assert [part.number for part in again.missing] == [1, 2, *range(4, 10)]
    names = {"part-000000.parquet", "part-000003.parquet", JOB}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert pq.read_table(tmp_path / "out" / "part-000003.parquet").num_rows == 5


def test_one_file_is_joined_in_order_when_all_parts_are_there(
    planned: PlannedTable, tmp_path: Path
) -> None:
    output = TableOutput(str(tmp_path / "out.parquet"), planned)
    for part in reversed(planned.parts):
        assert not (tmp_path / "out.parquet").exists()
        output.write(part, rows_of(planned, part.number))
    output.finish()
    ids = pq.read_table(tmp_path / "out.parquet")["id"].to_pylist()
    assert len(ids) == TABLE_ROWS
    assert ids == sorted(ids)
    assert not (tmp_path / "out.parquet.parts").exists()
    with pytest.raises(OutputError, match="already there"):
        TableOutput(str(tmp_path / "out.parquet"), planned)


def test_another_job_and_other_files_are_refused(
    two_adapters: dict[str, AdapterSource], planned: PlannedTable, tmp_path: Path
) -> None:
    TableOutput(str(tmp_path / "out"), planned)
    other = plan_table(routed(two_adapters, write_table(tmp_path / "rows", group=7)))
    with pytest.raises(OutputError, match="another job"):
        TableOutput(str(tmp_path / "out"), other)
    with pytest.raises(OutputError, match="not empty"):
        TableOutput(str(tmp_path / "rows"), planned)
    with pytest.raises(OutputError, match="one file in a bucket"):
        TableOutput("memory://bucket/out.parquet", planned)


def test_a_url(planned: PlannedTable) -> None:
    memory = fsspec.filesystem("memory")
    try:
        output = TableOutput("memory://jobs/out", planned)
        output.write(planned.parts[1], rows_of(planned, 1))
        again = TableOutput("memory://jobs/out", planned)
        assert planned.parts[1] not in again.missing
        assert len(again.missing) == len(planned.parts) - 1
        assert memory.exists("/jobs/out/part-000001.parquet")
    finally:
        memory.rm("/jobs", recursive=True)
