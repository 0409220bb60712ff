"""JSON as a table: lines, a list, an object with a list, an object of columns."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data.tables import read_json
from adapterhub.errors import DataError

ROWS = [{"text": "a", "label": "1"}, {"text": "b", "label": "0"}]
FORMS = {
    "list": json.dumps(ROWS),
    "indented": json.dumps(ROWS, indent=2),
    "data": json.dumps({"version": 1, "data": ROWS}),
    "one list": json.dumps({"reviews": ROWS}, indent=1),
    "columns": json.dumps({"text": ["a", "b"], "label": ["1", "0"]}),
    "pandas": json.dumps({"text": {"0": "a", "1": "b"}, "label": {"0": "1", "1": "0"}}),
    "lines": "\n".join(map(json.dumps, ROWS)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_table(form):
    table = read_json("a.json", FORMS[form])
    assert table.columns == ("text", "label")
    assert [list(column) for column in table.take(["label", "text"])] == [["1", "0"], ["a", "b"]]
    assert list(table.lines) == [1, 2]
    assert table.form


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.text(), min_size=1), min_size=1))
def test_a_list_and_lines_are_equal(rows):
    one = read_json("a.json", json.dumps(rows, indent=1))
    other = read_json("a.jsonl", "\n".join(map(json.dumps, rows)))
    assert one.columns == other.columns
    for name in one.columns:
        assert one.column(name) == other.column(name) == [row.get(name) for row in rows]


def test_one_line_of_lists_is_a_row_in_a_file_of_lines_only():
    line = json.dumps({"tokens": ["a", "b"], "tags": ["O", "O"]})
    assert len(read_json("a.jsonl", line).lines) == 1
    assert len(read_json("a.json", line).lines) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "has no rows"),
        ('[{"a": 1}, 2]', "item 2: int, not an object"),
        ("[1]\n2\n", "line 1: list, not an object\n  - line 2: int, not"),
        ('[\n {"a": 1},\n {"a": }\n]', "is not JSON: Expecting value: line 3"),
        ('{"a": 1}\n{"a": \n', "line 2: "),
        ('{"a": [1, 2], "b": [1]}', None),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_other_json_is_refused_with_its_place(text, words):
    if words is None:  # no columns of one length: one row
        assert len(read_json("a.json", text).lines) == 1
        return
    with pytest.raises(DataError) as error:
        read_json("a.json", text)
    assert words in str(error.value)
