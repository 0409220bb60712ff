"""Files as people have them, given bare: the task, the columns and the labels, or what to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapterhub.errors import DataError
from adapterhub.recipe.recipe import read
from adapterhub.training.run_data import read_data
from tests.kit.data import ODD_FILES, OddFile


@pytest.mark.parametrize("odd", ODD_FILES, ids=lambda odd: odd.name)
def test_a_bare_file_is_read_right_or_refused_with_what_to_do(odd: OddFile, tmp_path: Path) -> None:
    if odd.name.endswith(".xlsx"):
        pytest.importorskip("openpyxl")
    odd.write(tmp_path / odd.name)
    recipe = read(None, flags={"data": {"train": str(tmp_path / odd.name)}, "output": "out"})
    if odd.refused:
        with pytest.raises(DataError) as refusal:
            read_data(recipe)
        assert [word for word in odd.refused if word not in str(refusal.value)] == []
        return
    data = read_data(recipe)
    assert data.task.name == odd.task
    assert {name: getattr(data.options, name) for name in odd.columns} == odd.columns
    assert not odd.labels or data.labels == odd.labels
    notes = "\n".join(data.notes)
    assert [word for word in odd.said if word not in notes] == []
    told = "\n".join(data.chosen)
    assert "--backbone ID" in told
    assert (f"task: {odd.task}, for " in told) == (odd.task != "classification")
    assert len(data.train) + len(data.evaluation) > 30
