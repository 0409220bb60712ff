"""Predictions on Parquet files: all columns, each row by its adapter, strict about the input."""

from __future__ import annotations

import json

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError, DataError, OutputError
from adapterhub.inference import table_job
from adapterhub.inference.open import open_adapter
from adapterhub.inference.table_job import ONLY, TableJob, TableOutput, TableWorker, plan_table
from tests.kit.runs import TABLE_ROWS, routed, write_table


def test_each_row_is_predicted_by_the_adapter_that_it_names(two_adapters, tmp_path):
    planned = plan_table(routed(two_adapters, write_table(tmp_path)))
    assert sum(part.rows for part in planned.parts) == TABLE_ROWS
    assert len(planned.parts) == 4 + 6
    worker = TableWorker(planned.job)
    rows = pa.concat_tables([worker.predict(part) for part in planned.parts]).to_pylist()
    assert [row["id"] for row in rows] == list(range(TABLE_ROWS))
    assert list(rows[0]) == ["id", "text", "adapter", "prediction"]
    for name, source in two_adapters.items():
        own = [row for row in rows if row["adapter"] == name]
        alone = open_adapter(source.reference).predict([Example(row["text"]) for row in own])
        for row, prediction in zip(own, alone, strict=True):
            found, expected = json.loads(row["prediction"]), prediction.as_dict()
            assert found["label"] == expected["label"]
            assert found["scores"] == pytest.approx(expected["scores"], abs=1e-5)


def test_what_is_wrong_with_the_input_is_told(two_adapters, tmp_path):
    source = write_table(tmp_path)
    with pytest.raises(DataError, match="not given") as error:
        plan_table(routed({"mood": two_adapters["mood"]}, source))
    assert error.value.offenders == ("'thing': 30 rows",)
    with pytest.raises(DataError, match="no column 'who'"):
        plan_table(TableJob(source, two_adapters, route="who"))
    with pytest.raises(DataError, match="has a column 'text' already"):
        plan_table(TableJob(source, {ONLY: two_adapters["mood"]}, into="text"))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="other columns"):
        plan_table(routed(two_adapters, source))
    (tmp_path / "c.parquet").write_text("no")
    with pytest.raises(DataError, match="not a Parquet file"):
        plan_table(routed(two_adapters, source))


def test_an_invalid_row_and_a_node_with_another_release_are_refused(two_adapters, tmp_path):
    """By one adapter for all rows, with other names of the columns."""
    table = pa.table({"review": ["the film was bad", "a great movie", None]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=2)
    job = TableJob(str(tmp_path / "rows.parquet"), {ONLY: two_adapters["mood"]}, into="mood")
    planned = plan_table(job, text="review")
    worker = TableWorker(planned.job)
    for row in worker.predict(planned.parts[0]).to_pylist():
        assert json.loads(row["mood"])["label"] in ("neg", "pos")
    with pytest.raises(DataError) as error:
        worker.predict(planned.parts[1])
    assert error.value.offenders == ("row 1 of group 1: 'review' is missing",)
    with pytest.raises(ConfigError, match=r"started with 0\.0\.0"):
        TableWorker(job, 1, ("0.0.0", "."))


@pytest.fixture
def planned(two_adapters, tmp_path) -> table_job.PlannedTable:
    return plan_table(routed(two_adapters, write_table(tmp_path / "rows")))


def test_another_job_and_other_files_are_refused(two_adapters, planned, tmp_path):
    """One of other adapters, and one of other parts of the rows."""
    source = str(tmp_path / "rows" / "*.parquet")
    for _ in range(2):
        TableOutput(str(tmp_path / "out"), plan_table(routed(two_adapters, source)))
    swapped = dict(zip(two_adapters, reversed(two_adapters.values()), strict=True))
    others = [plan_table(routed(swapped, source))]
    write_table(tmp_path / "rows", group=7)
    for other in (*others, plan_table(routed(two_adapters, source))):
        with pytest.raises(OutputError, match="another job"):
            TableOutput(str(tmp_path / "out"), other)
    with pytest.raises(OutputError, match="not empty"):
        TableOutput(str(tmp_path / "rows"), planned)
    with pytest.raises(OutputError, match="one file in a bucket"):
        TableOutput("memory://bucket/out.parquet", planned)


def test_a_url(planned):
    memory = fsspec.filesystem("memory")
    try:
        output = TableOutput("memory://jobs/out", planned)
        output.write(planned.parts[1], pa.table({"id": [1] * planned.parts[1].rows}))
        again = TableOutput("memory://jobs/out", planned)
        assert planned.parts[1] not in again.missing
        assert len(again.missing) == len(planned.parts) - 1
        assert memory.exists("/jobs/out/part-000001.parquet")
    finally:
        memory.rm("/jobs", recursive=True)
