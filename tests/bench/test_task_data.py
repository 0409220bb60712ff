"""The rows of a study: parts that do not overlap, the same for every run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adapterhub.bench.execute import TEST_SHARE, read_task_data
from adapterhub.errors import ConfigError
from adapterhub.recipe.recipe import Recipe, read_draft
from tests.kit.data import sentences, write_tsv


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    rows = [(f"{text} {n}", label) for n, (text, label) in enumerate(sentences(200))]
    source = write_tsv(tmp_path / "train.tsv", rows)
    return read_draft(None, (), {"data": {"train": str(source)}})


def texts(examples: list[object]) -> set[str]:
    return {example.text for example in examples}  # type: ignore[attr-defined]


def test_three_parts_of_one_file_do_not_overlap(recipe: Recipe) -> None:
    data = read_task_data(recipe, None, 1_000)
    parts = [data.run.train, data.run.evaluation, data.test]
    assert sum(map(len, parts)) == len(set().union(*map(texts, parts))) == 200
    assert len(data.test) == pytest.approx(TEST_SHARE * 180, abs=1)
    assert "144 rows train, 20 select, 36 test" in data.notes
    assert len(set(data.digests.values())) == 3


def test_all_runs_have_the_same_parts_whatever_the_seed(recipe: Recipe) -> None:
    first, second = (read_task_data(replace(recipe, seed=n), None, 1_000) for n in (0, 7))
    assert first.digests == second.digests


def test_labels_have_the_same_shares_in_the_test_rows(recipe: Recipe) -> None:
    data = read_task_data(recipe, None, 1_000)
    counts = [sum(example.label == "pos" for example in part) / len(part)
              for part in (data.run.train, data.test)]  # fmt: skip
    assert counts[0] == pytest.approx(counts[1], abs=0.03)


def test_given_test_data_are_used_whole_and_what_is_trained_as_well_is_told(
    recipe: Recipe, tmp_path: Path
) -> None:
    train = (tmp_path / "train.tsv").read_text().splitlines()
    (tmp_path / "test.tsv").write_text("\n".join([train[0], *train[1:31]]) + "\n")
    data = read_task_data(recipe, str(tmp_path / "test.tsv"), 10)
    assert len(data.test) == 30
    assert len(data.run.evaluation) == 10
    assert any("test rows" in note and "also training rows" in note for note in data.notes)


def test_a_run_has_its_own_draw_of_rows(recipe: Recipe) -> None:
    data = read_task_data(recipe, None, 1_000)
    one, same, other = data.of(20, 1), data.of(20, 1), data.of(20, 2)
    assert one.train == same.train != other.train
    assert len(one.train) == 20
    assert one.evaluation == data.run.evaluation
    assert data.of(10_000, 1).train == data.run.train


def test_no_evaluation_is_refused(recipe: Recipe) -> None:
    without = replace(recipe, data=replace(recipe.data, eval="none"))
    with pytest.raises(ConfigError, match="selects"):
        read_task_data(without, None, 1_000)


def test_test_rows_of_a_run_are_refused(recipe: Recipe) -> None:
    """Those of a study are an option of its own."""
    with pytest.raises(ConfigError, match=r"data\.test=0\.1 in a study"):
        read_task_data(replace(recipe, data=replace(recipe.data, test=0.1)), None, 10)
