"""Folders of classes as tables: what is listed, and what is left out."""

from __future__ import annotations

import os
import sys

import pytest

from adapterhub.data.options import DataOptions
from adapterhub.data.tables import metadata_file, read_folder, read_table
from adapterhub.errors import DataError


def files(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return str(folder)


def rows(source):
    table = read_folder(source)
    return list(zip(table.column("file"), table.column("label"), strict=True))


def test_the_first_folder_is_the_class(tmp_path):
    source = files(tmp_path, "dog/b.png", "cat/inner/c.JPG", "cat/a.png", "d.webp")
    assert rows(source) == [
        ("cat/a.png", "cat"), ("cat/inner/c.JPG", "cat"), ("d.webp", None), ("dog/b.png", "dog"),
    ]  # fmt: skip


def test_hidden_files_are_left_out_and_others_counted(tmp_path):
    source = files(tmp_path, "cat/a.png", "cat/.b.png", ".git/c.png", "notes.txt", "cat/Thumbs.db")
    table = read_folder(source)
    assert table.column("file") == ["cat/a.png"]
    assert table.notes == ("2 other files are left out",)
    assert table.form == "1 folders"


def test_names_of_any_script(tmp_path):
    source = files(tmp_path, "Zürich/\u4f60\u597d.png", "\U0001f642/a b.png")
    assert rows(source) == [
        ("Zürich/\u4f60\u597d.png", "Zürich"), ("\U0001f642/a b.png", "\U0001f642"),
    ]  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights")
def test_links_are_followed_once(tmp_path):
    source = files(tmp_path / "photos", "cat/a.png")
    files(tmp_path / "elsewhere", "b.png")
    os.symlink(tmp_path / "elsewhere", tmp_path / "photos/dog")
    os.symlink(tmp_path / "photos/cat/a.png", tmp_path / "photos/dog/c.png")
    os.symlink(tmp_path / "photos", tmp_path / "photos/cat/loop")
    os.symlink(tmp_path / "missing.png", tmp_path / "photos/cat/gone.png")
    assert [name for name, _ in rows(source)] == [
        "cat/a.png", "cat/gone.png", "dog/b.png", "dog/c.png"
    ]  # fmt: skip


def test_the_table_that_describes_a_folder(tmp_path):
    source = files(tmp_path, "1.wav", "2.wav")
    assert metadata_file(source) is None
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "1.wav", "text": "one"}\n')
    assert metadata_file(source) == str(tmp_path / "metadata.jsonl")
    table = read_table(source, DataOptions(), "train")
    assert table.columns == ("file_name", "text")


def test_a_folder_without_pictures(tmp_path):
    with pytest.raises(DataError, match="has no images") as error:
        read_folder(files(tmp_path, "a.txt"))
    assert ".png" in str(error.value)
    assert "one folder for each class" in str(error.value)
