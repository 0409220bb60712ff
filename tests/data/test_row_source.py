"""Sources of streamed rows: files, patterns, folders, URLs; strict about what is there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adapterhub.data.options import DataOptions
from adapterhub.data.row_stream import RowSource, is_many_files, open_source
from adapterhub.errors import DataError
from tests.kit.data import write_shards

OPTIONS = DataOptions()


def rows_of(source: RowSource) -> list[dict[str, object]]:
    rows = []
    for shard in range(len(source.shards)):
        for table in source.tables(shard):
            columns = [source.values(table, name) for name in source.columns]
            rows += [
                dict(zip(source.columns, row, strict=True)) for row in zip(*columns, strict=True)
            ]
    return rows


def test_a_pattern_a_folder_and_one_file(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path)
    by_pattern = open_source(pattern, OPTIONS, "train")
    assert by_pattern.shards == ("part-0.parquet", "part-1.parquet", "part-2.parquet")
    assert by_pattern.columns == ("text", "label")
    by_folder = open_source(str(tmp_path), OPTIONS, "train")
    assert rows_of(by_folder) == rows_of(by_pattern)
    assert len(rows_of(by_pattern)) == 64
    one = open_source(str(tmp_path / "part-1.parquet"), OPTIONS, "train")
    assert rows_of(one) == rows_of(by_pattern)[20:33]
    assert by_folder.sha256 == by_pattern.sha256 != one.sha256


def test_the_digest_changes_with_the_files(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path)
    before = open_source(pattern, OPTIONS, "train").sha256
    table = pq.read_table(tmp_path / "part-2.parquet")
    labels = pa.array(["pos"] * table.num_rows)
    pq.write_table(table.set_column(1, "label", labels), tmp_path / "part-2.parquet")
    assert open_source(pattern, OPTIONS, "train").sha256 != before


def test_json_lines_gzipped_and_csv_keep_every_cell_as_it_is_written(tmp_path: Path) -> None:
    rows = [{"text": "NA", "label": "1"}, {"text": 'say "yes", twice', "label": "02"}]
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert rows_of(open_source(str(tmp_path / "rows.jsonl.gz"), OPTIONS, "train")) == rows
    (tmp_path / "rows.csv").write_text('text,label\nNA,1\n"say ""yes"", twice",02\n')
    assert rows_of(open_source(str(tmp_path / "rows.csv"), OPTIONS, "train")) == rows
    (tmp_path / "rows.tsv").write_text('text\tlabel\n"a\t1\nb"\t2\n')
    assert rows_of(open_source(str(tmp_path / "rows.tsv"), OPTIONS, "train")) == [
        {"text": '"a', "label": "1"},
        {"text": 'b"', "label": "2"},
    ]


def test_a_url(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    write_shards(tmp_path)
    for file in sorted(tmp_path.glob("*.parquet")):
        memory.pipe_file(f"/bucket/{file.name}", file.read_bytes())
    try:
        source = open_source("memory://bucket/part-*.parquet", OPTIONS, "train")
        local = open_source(str(tmp_path), OPTIONS, "train")
        assert source.shards == local.shards
        assert rows_of(source) == rows_of(local)
        assert source.sha256 == local.sha256, "wherever the files are"
    finally:
        memory.rm("/bucket", recursive=True)


def test_numbers_of_classes_become_their_names(tmp_path: Path) -> None:
    features = datasets.Features(
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["no", "yes"]),
        tags=datasets.Sequence(datasets.ClassLabel(names=["O", "B"])),
    )
    made = datasets.Dataset.from_dict(
        {"text": ["a", "b"], "label": [1, -1], "tags": [[0, 1], []]}, features=features
    )
    made.to_parquet(str(tmp_path / "rows.parquet"))
    found = rows_of(open_source(str(tmp_path / "rows.parquet"), OPTIONS, "train"))
    assert found == [
        {"text": "a", "label": "yes", "tags": ["O", "B"]},
        {"text": "b", "label": None, "tags": []},
    ]


def test_what_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no files at") as error:
        open_source(str(tmp_path / "*.parquet"), OPTIONS, "train")
    assert ".parquet" in error.value.expected
    (tmp_path / "a.csv").write_text("text\n1\n")
    (tmp_path / "b.txt").write_text("text\n")
    with pytest.raises(DataError, match="cannot be streamed") as error:
        open_source(str(tmp_path / "*.*"), OPTIONS, "train")
    assert set(error.value.offenders) == {".csv", ".txt"}
    with pytest.raises(DataError, match="names its columns"):
        open_source(str(tmp_path / "a.csv"), DataOptions(header=False), "train")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="cannot be read"):
        open_source(str(tmp_path / "broken.parquet"), OPTIONS, "train")


def test_a_data_set_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="cannot be streamed from the Hub"):
        open_source("no-one/nothing-of-the-kind", OPTIONS, "train")


def test_a_bucket_without_obstore_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.fsspec", None)
    with pytest.raises(DataError, match="needs obstore") as error:
        open_source("s3://bucket/rows.parquet", OPTIONS, "train")
    assert "adapterhub[buckets]" in error.value.hint


def test_files_that_only_a_stream_reads(tmp_path: Path) -> None:
    (tmp_path / "a[1].csv").write_text("text\n1\n")
    assert not is_many_files(str(tmp_path / "a[1].csv"))
    assert not is_many_files("glue")
    assert all(map(is_many_files, (str(tmp_path), f"{tmp_path}/*.csv", "s3://b/rows.parquet")))
