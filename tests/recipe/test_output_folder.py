"""The output folder of a run: refusals, lock and errors of writing."""

from __future__ import annotations

import errno
import os

import pytest

from adapterhub.errors import OutputError
from adapterhub.files.atomic import replace_file
from adapterhub.pages.page import PAGE
from adapterhub.recipe.output_folder import (
    LOCK,
    check_output,
    hold_output,
    new_output,
    writing,
)


def test_an_output_folder_is_checked_before_any_work(tmp_path, monkeypatch):
    check_output(tmp_path / "new" / "run", resume=False)
    check_output(tmp_path, resume=False)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is a file"):
        check_output(tmp_path / "file", resume=True)
    with pytest.raises(OutputError, match="exists") as error:
        check_output(tmp_path, resume=False)
    assert "--resume" in error.value.hint
    (tmp_path / "checkpoints" / "best").mkdir(parents=True)
    with pytest.raises(OutputError, match="no last checkpoint") as error:
        check_output(tmp_path, resume=True)
    assert error.value.offenders == ("checkpoints/best", "file")
    # An interrupted replacement, which the next read completes.
    (tmp_path / "checkpoints" / ".adapterhub-0123-old").mkdir()
    check_output(tmp_path, resume=True)
    (tmp_path / "checkpoints" / ".adapterhub-0123-old").rename(tmp_path / "checkpoints" / "last")
    check_output(tmp_path, resume=True)
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "file"]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OutputError, match="is not writable"):
        check_output(tmp_path / "new" / "run", resume=False)


@pytest.mark.parametrize(
    ("train", "recipe", "folder"),
    [
        ("a/rows.csv.gz", "", "runs/rows"),
        ("hf:imdb#500", "", "runs/hf-imdb"),
        (["b.csv", "c.csv"], "", "runs/b"),
        (None, "data: {train: [{path: d.jsonl, weight: 2}, e.csv]}", "runs/d"),
        (None, "data: f.csv", "runs/f"),
        (None, "seed: 3", "runs/recipe"),
        ("a.csv", "output: mine", None),
        ("../part-*.parquet", "", "runs/part"),
        ("/data/**/*.csv", "", "runs/data"),
        ("*.csv", "", None),
        ("_a-.csv", "", "runs/_a-"),
        ("..", "", None),
        (None, "", None),
    ],
)
def test_a_run_is_named_after_its_first_data(train, recipe, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    file = "recipe.yaml" if recipe else None
    assert new_output(file, (), train) == folder
    if folder:
        for name in (folder, f"{folder}-2"):
            (tmp_path / name).mkdir(parents=True)
        assert new_output(file, (), train) == f"{folder}-3"
        assert new_output(file, (), train, resume=True) == f"{folder}-2"
        assert new_output(file, ["output=other"], train) is None


def test_an_empty_folder_is_removed_if_this_run_created_it(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("mine", "new"):
        with hold_output(tmp_path / name, resume=False):
            assert os.listdir(tmp_path / name) == [LOCK]
    assert os.listdir(tmp_path) == ["mine"]


@pytest.mark.parametrize("name", [PAGE, "any thing"])
def test_a_file_that_a_killed_process_has_not_finished_is_removed(tmp_path, name, monkeypatch):
    leftover = f".{name}.0123abcd.new"
    for resume in (False, True):
        (tmp_path / leftover).write_bytes(b"{")
        check_output(tmp_path, resume)
        with hold_output(tmp_path, resume):
            assert os.listdir(tmp_path) == [LOCK]
    # One that a process writes now, such as `adapterhub report`, stays.
    replace = os.replace

    def hold(*places: object) -> None:
        with hold_output(tmp_path, resume=False):
            assert any(each.endswith(".new") for each in os.listdir(tmp_path))
        replace(*places)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", hold)
    replace_file(tmp_path / name, b"1")
    assert sorted(os.listdir(tmp_path)) == sorted([LOCK, name])


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.ENOSPC, "free some space, then run the same command with --resume"),
        (errno.EROFS, "make the folder writable, then run the same command with --resume"),
        (errno.ENOTDIR, "another --output"),
    ],
)
def test_an_error_of_writing_says_what_to_do(tmp_path, code, hint):
    problem = f"cannot be written: {os.strerror(code)}"
    with pytest.raises(OutputError, match=problem) as error, writing(tmp_path):
        raise OSError(code, os.strerror(code))
    assert error.value.hint == hint
