"""Streamed examples: read by every task, with labels that are found or given."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fixtures import write_json_lines
from streamed import write_shards
from task_cases import CASES

from adapterhub.data.examples import data_hash
from adapterhub.data.options import DataOptions
from adapterhub.data.row_stream import BlockReader, Cursor
from adapterhub.data.tables import read_table
from adapterhub.errors import DataError
from adapterhub.tasks import parse_task
from adapterhub.training.stream import open_examples

ANSWERED = [
    {"question": "what", "context": "so it was", "answers": {"text": ["so"], "answer_start": [0]}}
] * 25
MEDIA = {
    "image-classification",
    "audio-classification",
    "speech-recognition",
    "image-text-to-text",
}
CLASSES = parse_task("classification")


def test_it_reads_what_is_read_without_a_stream(tmp_path: Path) -> None:
    write_shards(tmp_path)
    file = str(tmp_path / "part-2.parquet")
    stream, notes = open_examples(file, DataOptions(), CLASSES)
    assert list(stream) == CLASSES.read(file, stream.options, "train")
    assert notes == (f"{file}: streamed from 1 shard; columns: text, label",)
    assert stream[:3] == list(stream)[:3]
    assert data_hash(stream) == stream.sha256


@pytest.mark.parametrize("name", sorted(CASES.keys() - MEDIA))
def test_every_task_reads_a_stream(name: str, tmp_path: Path) -> None:
    """All tasks but those on files, whose names are relative to the folder of their table."""
    task, file = parse_task(CASES[name].task), str(CASES[name].data(tmp_path))
    if name == "question-answering":  # its case is a SQuAD file, which is one value of JSON
        file = str(write_json_lines(tmp_path / "rows.jsonl", ANSWERED))
    table = read_table(file, DataOptions(), "train")
    columns = {column: pa.array(list(table.column(column))) for column in table.columns}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=5)
    source = str(tmp_path / "rows.parquet")
    stream, _ = open_examples(source, DataOptions(), task)
    whole = stream.task.read(source, stream.options, "train")
    blocks = stream.blocks(BlockReader(10), Cursor())
    found: list[object] = []
    while len(found) < len(whole):
        found += next(blocks)[1]
    assert found == whole
    assert stream.labels() == stream.task.labels(whole)


def test_labels_that_appear_late_are_found(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": str(n // 500)} for n in range(6000)]
    stream, _ = open_examples(
        str(write_json_lines(tmp_path / "rows.jsonl", rows)), DataOptions(), CLASSES
    )
    assert stream.labels() == tuple(str(n) for n in range(12))


def test_an_invalid_row_is_named_by_its_shard_and_place(tmp_path: Path) -> None:
    table = pa.table({"text": ["good"] * 300, "label": ["a"] * 299 + [None]})
    pq.write_table(table, tmp_path / "rows.parquet")
    stream, _ = open_examples(str(tmp_path / "rows.parquet"), DataOptions(), CLASSES)
    with pytest.raises(DataError) as error:
        list(stream)
    assert error.value.offenders == ("row 300 of rows.parquet: the label is empty",)


def test_empty_rows_are_skipped_also_a_whole_block_of_them(tmp_path: Path) -> None:
    texts = ["good"] * 10 + [""] * 20 + ["bad"] * 3
    rows = [{"text": text, "label": "a"} for text in texts]
    file = str(write_json_lines(tmp_path / "rows.jsonl", rows))
    stream, _ = open_examples(file, DataOptions(skip_empty=True), CLASSES)
    blocks = stream.blocks(BlockReader(10), Cursor())
    assert [len(next(blocks)[1]) for _ in range(5)] == [10, 0, 0, 3, 10]
    with pytest.raises(DataError, match="invalid rows"):
        list(open_examples(file, DataOptions(), CLASSES)[0])


def test_the_first_rows_of_many_files_to_evaluate_on(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path)
    stream, _ = open_examples(pattern, DataOptions(), CLASSES, "eval")
    assert len(list(islice(stream, 7))) == 7
    assert len(list(stream)) == 64
