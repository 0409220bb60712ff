"""Files that are examples: from folders, tables and bytes, decoded once while they are read."""

from __future__ import annotations

import dataclasses
import os

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from adapterhub.data.columns import WANTS
from adapterhub.data.examples import content_of, data_hash
from adapterhub.data.media import open_media, read_media
from adapterhub.data.media_formats import open_picture
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from tests.kit import media
from tests.kit.data import write_json_lines, write_tsv


@pytest.fixture
def folder(tmp_path):
    return media.write_digits(tmp_path / "digits", classes=2, each=3)


def read(source, labelled=True, **options):
    data = DataOptions(**options)
    return read_media(str(source), data, "train", WANTS["images"], open_picture, labelled=labelled)


def told(source, **options):
    with pytest.raises(DataError) as error:
        read(source, **options)
    return str(error.value)


def test_a_folder_a_table_and_data_sets_are_the_same_data(folder, tmp_path, monkeypatch):
    files = read(folder)
    assert [f.label for f in files] == ["0"] * 3 + ["1"] * 3
    assert [f.name for f in files][:2] == ["0/0.png", "0/1.png"]
    rows = [(f.name, f.label) for f in files]
    table = read(write_tsv(folder / "all.tsv", rows, "image\tlabel"))
    assert table == files
    assert data_hash(table) == data_hash(files)
    cells = [{"bytes": (folder / f.name).read_bytes(), "path": f.name} for f in files]
    columns = {"image": cells, "label": [f.label for f in files]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "all.parquet")
    packed = read(tmp_path / "all.parquet")
    assert packed == files
    assert packed[0].decoded(open_picture).size == files[0].decoded(open_picture).size == (8, 8)
    columns = {"image": cells, "label": [int(f.label) for f in files]}
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["0", "1"])}
    data = datasets.Dataset.from_dict(columns, datasets.Features(features))
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: data)
    assert read("ylecun/mnist") == files


def test_what_a_file_is_compared_by(folder, tmp_path):
    first = read(folder)[0]
    moved = tmp_path / "elsewhere.png"
    os.rename(folder / first.name, moved)
    again = open_media(str(moved), open_picture)
    assert again.label is None
    again = again.with_label("0")
    assert again == first
    assert content_of(again) == content_of(first) == (first.sha256,)
    assert dataclasses.replace(first, label="1") != first
    with pytest.raises(DataError, match="no such file"):
        open_media("missing.png", open_picture)


def test_a_column_of_captions_is_not_the_files(folder):
    rows = [
        {"text": f"a picture of number {i % 2}", "photo": f"{i % 2}/1.png", "label": str(i % 2)}
        for i in range(4)
    ]
    files = read(write_json_lines(folder / "all.jsonl", rows))
    assert [f.name for f in files] == ["0/1.png", "1/1.png", "0/1.png", "1/1.png"]


def test_every_invalid_file_is_told(folder):
    (folder / "1/0.png").write_bytes(b"not a picture")
    (folder / "1/1.png").write_bytes((folder / "1/1.png").read_bytes()[:60])
    names = ["0/0.png", "0/O.png", "1/0.png", "1/1.png", "https://host/a.png", ""]
    rows = [{"image": name, "label": "a"} for name in names]
    error = told(write_json_lines(folder / "all.jsonl", rows))
    lines = [line for line in error.splitlines() if "line " in line]
    assert [line.partition(":")[0].strip(" -") for line in lines] == [
        f"line {n}" for n in range(2, 7)
    ]
    for reason in ("no such file", "is not an image", "is broken", "download it", "missing"):
        assert reason in error


def test_a_picture_outside_of_the_folders_has_no_label(folder):
    (folder / "0/0.png").rename(folder / "loose.png")
    assert "file 6: the label is empty" in told(folder)
    assert [f.name for f in read(folder, labelled=False)][-1] == "loose.png"
    assert len(read(folder, skip_empty=True)) == 5
    os.symlink(folder / "gone.png", folder / "0/9.png")
    assert "no such file" in told(folder)


def test_names_that_are_no_unicode(folder):
    try:
        (folder / "0/0.png").rename(os.fsdecode(os.fsencode(folder) + b"/0/\xff.png"))
    except OSError:
        pytest.skip("this file system refuses such names")
    assert "is not Unicode: rename the file" in told(folder)


def test_a_file_that_changes_after_it_was_read(folder):
    first, second = read(folder)[:2]
    (folder / first.name).unlink()
    with pytest.raises(DataError, match="no such file"):
        first.decoded(open_picture)
    (folder / second.name).write_bytes(b"")
    with pytest.raises(DataError, match=r"0/1.png is not an image"):
        second.decoded(open_picture)
