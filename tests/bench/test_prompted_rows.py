"""Predictions by a prompt, and their file."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapterhub.bench.prompted_rows import (
    ZERO_SHOT,
    PromptedRows,
    read_prompted,
    write_prompted,
)
from adapterhub.bench.records import PredictedRows
from adapterhub.errors import FileError

COLUMNS = {"label": ["a", "b"], "prediction": ["a", "a"], "score": [0.9, 0.6]}


def test_they_are_compared_on_the_same_rows_alone() -> None:
    mine = PromptedRows("key", COLUMNS)
    same = PredictedRows("classes", {**COLUMNS, "prediction": ["b", "b"]})
    assert mine.rows(same) == PredictedRows("classes", COLUMNS)
    assert mine.rows(PredictedRows("classes", {**COLUMNS, "label": ["b", "b"]})) is None
    assert mine.rows(PredictedRows("numbers", COLUMNS)) is None
    assert PromptedRows("key").rows(same) is None


def test_they_are_kept(tmp_path: Path) -> None:
    assert read_prompted(tmp_path) == {}
    found = {"one": PromptedRows("key", COLUMNS), "two": PromptedRows("other", note="too long")}
    write_prompted(tmp_path, found)
    assert read_prompted(tmp_path) == found
    (tmp_path / ZERO_SHOT).write_text("[1]")
    with pytest.raises(FileError, match="delete"):
        read_prompted(tmp_path)
