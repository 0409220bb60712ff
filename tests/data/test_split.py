"""Rows that are held out for evaluation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data.examples import Example, content_of, hold_out, strata_of
from adapterhub.data.options import DataOptions
from adapterhub.errors import DataError
from adapterhub.tasks import parse_task
from adapterhub.tasks.multi_label import LabelledText
from tests.kit.task_cases import CASES


def examples(counts: dict[str, int]) -> list[Example]:
    return [Example(f"{c} {i}", None, c) for c, n in counts.items() for i in range(n)]


def held(rows: list[Example], seed: int = 0) -> tuple[list[Example], list[Example]]:
    return hold_out(rows, seed, strata_of(rows))


@pytest.mark.parametrize(
    ("total", "expected"),
    [(10, 2), (50, 10), (100, 20), (200, 20), (1204, 120), (5000, 500), (101_000, 10_000)],
)
def test_a_tenth_is_held_out_and_more_of_small_data(total: int, expected: int) -> None:
    train, evaluation = held(examples({"a": total // 2, "b": total - total // 2}))
    assert len(evaluation) == expected
    assert len(train) == total - expected


def test_labels_have_the_same_shares() -> None:
    _, evaluation = held(examples({"a": 700, "b": 200, "c": 100}))
    assert Counter(e.label for e in evaluation) == {"a": 70, "b": 20, "c": 10}


def test_the_seed_determines_the_rows() -> None:
    rows = examples({"a": 100, "b": 100})
    assert held(rows, 3) == held(rows, 3) != held(rows, 4)


LABELS = st.sampled_from("abcdefghij")
ROWS = st.lists(st.builds(Example, st.sampled_from("xyzuvw12345678"), st.none(), LABELS))


@given(ROWS | st.lists(st.builds(Example, st.text(), st.none(), LABELS), min_size=10),
       st.integers(0, 99))  # fmt: skip
def test_a_split_is_fair_or_refused(rows: list[Example], seed: int) -> None:
    try:
        train, evaluation = held(rows, seed)
    except DataError:
        return
    assert Counter(train) + Counter(evaluation) == Counter(rows)
    assert {e.label for e in rows} == {e.label for e in train}
    assert not {e.text for e in train} & {e.text for e in evaluation}
    assert 0 < len(evaluation) <= max(0.21 * len(rows), 20)
    order = {id(e): i for i, e in enumerate(rows)}
    assert [order[id(e)] for e in train] == sorted(order[id(e)] for e in train)


def test_rows_of_a_numeric_label_are_one_group() -> None:
    rows = [Example(str(i), None, i / 7) for i in range(100)]
    assert set(strata_of(rows)) == {None}
    assert len(held(rows)[1]) == 20


@pytest.mark.parametrize("rows", [[], examples({"a": 9}), [Example("x", None, "a")] * 50])
def test_too_few_rows_are_refused_with_what_to_type(rows: list[Example]) -> None:
    with pytest.raises(DataError, match="too few to hold any out") as error:
        held(rows)
    assert "--eval none" in error.value.hint


def test_the_rarest_tag_is_the_stratum_of_a_sentence() -> None:
    @dataclass(frozen=True)
    class Tagged:
        text: str
        tags: tuple[str, ...]

    rows = [Tagged("a", ("O", "B-x", "I-x")), Tagged("b", ("B-x", "B-y")), Tagged("c", ("O",))]
    assert strata_of(rows) == ["x", "y", None]
    assert content_of(rows[0]) == ("a",)


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_labels_of_every_task_divide_its_rows(name: str, tmp_path: Path) -> None:
    """Whatever the examples of a task call them: no label is in the held-out rows alone."""
    task = parse_task(CASES[name].task)
    source = str(CASES[name].data(tmp_path))
    task, choice = task.fitted(source, DataOptions(), "train")
    rows = task.read(source, choice.options, "train")
    if not task.labels(rows):
        return
    assert len(set(strata_of(rows))) > 1
    train, evaluation = hold_out(rows, 0, strata_of(rows))
    assert set(task.labels(evaluation)) <= set(task.labels(train))


def test_a_label_of_one_row_stays_in_training() -> None:
    common = [LabelledText(f"text {i}", labels=("a", "b")[: i % 3]) for i in range(60)]
    for seed in range(20):
        rows = [*common, LabelledText("rare", labels=("a", "c"))]
        train, _ = hold_out(rows, seed, strata_of(rows))
        assert rows[-1] in train
