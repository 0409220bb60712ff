"""The folder of a study, and the study that was begun in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adapterhub.bench.study import STUDY, Study, keep_study, read_study
from adapterhub.errors import OutputError


def test_the_folder_of_a_study_may_be_moved(study: Study, tmp_path: Path) -> None:
    keep_study(study, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    moved = replace(study, recipe=replace(study.recipe, output=str(tmp_path / "b")))
    keep_study(moved, tmp_path / "b")


def test_the_folder_of_another_study_is_refused(study: Study, tmp_path: Path) -> None:
    keep_study(study, tmp_path)
    keep_study(study, tmp_path)
    assert read_study(tmp_path / STUDY).to_yaml() == study.to_yaml()
    with pytest.raises(OutputError, match="another study"):
        keep_study(replace(study, bench=replace(study.bench, seeds=9)), tmp_path)


def test_the_recorded_methods_of_a_folder_stay(study: Study, tmp_path: Path) -> None:
    """A study that does not name them is the same study: they decide nothing that is run."""

    def naming(*names: str) -> Study:
        return replace(study, bench=replace(study.bench, recorded=names))

    keep_study(naming("a", "b"), tmp_path)
    assert keep_study(naming("c"), tmp_path).bench.recorded == ("a", "b", "c")
    assert keep_study(study, tmp_path).bench.recorded == ("a", "b", "c")
    assert read_study(tmp_path / STUDY).bench.recorded == ("a", "b", "c")
