"""What columns contain."""

from __future__ import annotations

import pytest

from adapterhub.data.columns import ColumnProfile, profile_of
from adapterhub.data.table import Table

TEXTS = [f"this is the text number {i} of a few" for i in range(40)]
CLASSES = ["pos", "neg"] * 20


def profile(*values: object, name: str = "x") -> ColumnProfile:
    return ColumnProfile(name, tuple(values))


def test_empty_cells_are_left_out() -> None:
    column = [None, "", " ", "a", 3]
    table = Table("x", "row", ("a",), range(5), lambda name: column)
    assert profile_of(table, "a").values == ("a", 3)


KINDS = ("is_text", "is_class", "is_number", "is_words", "is_tags", "is_answers")
CELLS = {
    "texts": (TEXTS, {"is_text"}),
    "chinese": ([f"这部电影非常好看我很喜欢它的故事{i}" for i in range(30)], {"is_text"}),
    "classes": (CLASSES, {"is_class"}),
    "numbers of classes": (["0", "1"] * 20, {"is_class", "is_number"}),
    "numbers": ([f"{i / 7:.3f}" for i in range(40)], {"is_number"}),
    "decimal commas": ([f"{i},5" for i in range(40)], {"is_number"}),
    "words": ([["a", "b"], ["c"]], {"is_words"}),
    "tags": ([["O", "B-x"], ["O"]], {"is_words", "is_tags"}),
    "answers": ([{"text": ["a"], "answer_start": [0]}], {"is_answers"}),
    "ids": ([f"gj{i:04}" for i in range(40)], set()),
    "links": ([f"https://example.org/{i}" for i in range(40)], set()),
    "dates": ([f"2024-01-{i % 28 + 1:02} 10:00 UTC" for i in range(40)], set()),
    "one value": (["same"] * 40, set()),
    "nothing": ([], set()),
}


@pytest.mark.parametrize("case", CELLS)
def test_cells_are_recognized_by_their_look(case: str) -> None:
    values, expected = CELLS[case]
    found = profile(*values)
    assert {kind for kind in KINDS if getattr(found, kind)} == expected


@pytest.mark.parametrize("values", [TEXTS, CLASSES, list("0123456789") * 4])
def test_a_column_that_numbers_rows_is_nothing_to_learn(values: list[str]) -> None:
    found = profile(*values, name="doc_id")
    assert not any((found.is_text, found.is_class, found.is_number))


def test_a_label_of_few_rows_may_be_anything_short() -> None:
    assert profile("a", "b", "c").could_be_class
    assert not profile("word " * 60).could_be_class
    assert not profile(*map(str, range(40))).could_be_class
    assert profile(*(f"c{i % 15}" for i in range(40))).could_be_class
