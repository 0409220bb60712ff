"""Records of cells: read as written, whole or not at all."""

import gzip
import json
import math
from dataclasses import asdict, replace

import pytest
from pack import packed

from adapterhub.bench.cells import Cell
from adapterhub.bench.records import CellRecord, Costs, PredictedRows, RecordFolder, predicted_rows
from adapterhub.errors import FileError
from adapterhub.pages.row_scores import is_right

CELL = Cell("sst2", "lora(rank=4)", 1_000, 200, 1e-3, 1, "final")
RECORD = CellRecord(
    key="0" * 32,
    cell=CELL,
    status="done",
    metric="accuracy",
    selected={"accuracy": 0.8},
    tested={"accuracy": 0.75},
    rows=PredictedRows("classes", {"label": ["a", "b"], "prediction": ["a", "a"]}),
    costs=Costs(trained=10),
    origin={"versions": {"torch": "2"}},
)


def test_a_record_is_read_as_written(tmp_path):
    folder = RecordFolder(tmp_path / "records")
    assert folder.read(RECORD.key) is None
    folder.write(RECORD)
    assert folder.read(RECORD.key) == RECORD
    assert list(folder.all()) == [RECORD]
    folder.write(replace(RECORD, selected={"accuracy": math.nan}))
    assert folder.read(RECORD.key).selected == {"accuracy": None}, "what JSON lacks is null"


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"format": 99}', b"\xff", b"null"])
def test_a_broken_record_is_refused_with_its_path(tmp_path, content):
    folder = RecordFolder(tmp_path)
    folder.path("a" * 32).write_bytes(content)
    with pytest.raises(FileError, match="is not the record of a run") as error:
        folder.read("a" * 32)
    assert str(folder.path("a" * 32)) in str(error.value)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("status", "fine"),
        ("metric", 3),
        ("cell", {**asdict(CELL), "seed": "1"}),
        ("cell", {**asdict(CELL), "rate": None}),
        ("selected", {"accuracy": "0.8"}),
        ("tested", [0.75]),
        ("rows", {"kind": "classes", "columns": {"label": "ab"}}),
        ("costs", {**asdict(RECORD.costs), "trained": "10"}),
        ("origin", []),
        ("new", 1),
    ],
)
def test_a_field_of_another_type_is_refused(tmp_path, part, value):
    folder = RecordFolder(tmp_path)
    path = folder.path(RECORD.key)
    path.write_text(json.dumps({**json.loads(RECORD.to_json()), part: value}), encoding="utf-8")
    with pytest.raises(FileError, match="is not the record of a run") as error:
        folder.read(RECORD.key)
    assert part in str(error.value)


def test_a_renamed_record_is_refused(tmp_path):
    folder = RecordFolder(tmp_path)
    folder.write(RECORD)
    folder.path(RECORD.key).rename(folder.path("b" * 32))
    with pytest.raises(FileError):
        folder.read("b" * 32)


OUTCOMES = {
    "classes": {"texts": ["secret"], "label": "a", "prediction": "b", "score": 1 / 3},
    "choices": {"texts": ["secret"], "label": "secret", "prediction": "secret",
                "right": True, "score": 0.5},
    "texts": {"texts": ["secret"], "label": "secret", "prediction": "secret", "score": 0.5},
    "numbers": {"texts": ["secret"], "label": 1.0, "prediction": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", OUTCOMES)
def test_no_text_of_the_user_is_kept(kind):
    rows = predicted_rows(kind, [{"id": 0, **OUTCOMES[kind]}] * 2)
    assert "secret" not in str(rows)
    assert len(rows.outcomes()) == 2
    if kind in ("classes", "choices"):
        assert is_right(rows.outcomes()[0]) == (kind == "choices")


def test_a_pack_has_the_same_records_as_its_files(tmp_path):
    folder = RecordFolder(tmp_path)
    others = [replace(RECORD, key=digit * 32) for digit in "213"]
    for record in (RECORD, *others):
        folder.write(record)
    before = list(folder.all())
    pack = packed(tmp_path, "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl.gz"]
    again = RecordFolder(tmp_path)
    assert list(again.all()) == before
    assert again.read("2" * 32) == others[0]
    assert again.read("4" * 32) is None
    data = pack.read_bytes()
    later = replace(RECORD, key="4" * 32)
    again.write(later)
    assert packed(tmp_path, "all") == tmp_path / "all.jsonl.gz"
    assert [path.name for path in tmp_path.iterdir()] == ["all.jsonl.gz"]
    assert list(RecordFolder(tmp_path).all()) == [*before, later]
    (tmp_path / "all.jsonl.gz").unlink()
    for record in before:
        again.write(record)
    assert packed(tmp_path, "mine").read_bytes() == data


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", gzip.compress(b"{}"), gzip.compress(b"x")[:-3]],
    ids=["empty", "unpacked", "no record", "cut short"],  # gzip's bytes have the time in them
)
def test_a_broken_pack_is_refused_with_its_path(tmp_path, content):
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(FileError, match="is not the record of a run") as error:
        list(RecordFolder(tmp_path).all())
    assert str(path) in str(error.value)
