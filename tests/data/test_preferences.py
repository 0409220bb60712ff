"""Comparisons: columns, chats and what is refused."""

from __future__ import annotations

import pytest
from fixtures import write_json_lines

from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import Comparison, are_chats, read_comparisons
from adapterhub.errors import DataError

USER = [{"role": "user", "content": "hi"}]


def answer(text, role="assistant"):
    return [{"role": role, "content": text}]


@pytest.mark.parametrize(
    ("row", "expected", "chats"),
    [
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, Comparison("p", "c", "r"), False),
        ({"question": "p", "chosen": "c", "rejected": "r"}, Comparison("p", "c", "r"), False),
        ({"prompt": "p", "chosen": answer("c"), "rejected": answer("r")},
         Comparison((("user", "p"),), "c", "r"), True),
        ({"chosen": USER + answer("c"), "rejected": USER + answer("r")},
         Comparison((("user", "hi"),), "c", "r"), True),
    ],
)  # fmt: skip
def test_forms_of_data(tmp_path, row, expected, chats):
    source = str(write_json_lines(tmp_path / "a.jsonl", [row] * 2))
    assert read_comparisons(source, DataOptions(), "train") == [expected] * 2
    assert are_chats(source, DataOptions(), "train") == chats


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": USER + answer("c"), "rejected": answer("no") + answer("r")}, "differ before"),
        ({"chosen": USER + answer("c", "user"), "rejected": USER + answer("r")}, "not the assist"),
        ({"chosen": USER + answer(" "), "rejected": USER + answer("r")}, "is empty"),
        ({"chosen": None, "rejected": USER + answer("r")}, "is missing"),
    ],
)
def test_rows_that_are_refused(tmp_path, row, problem):
    first = {"prompt": "p", "chosen": USER + answer("c"), "rejected": USER + answer("r")}
    source = str(write_json_lines(tmp_path / "a.jsonl", [first, {"prompt": "p"} | row]))
    with pytest.raises(DataError, match=f"line 2: .*{problem}"):
        read_comparisons(source, DataOptions(), "train")


def test_to_predict_on_only_prompts_are_read(tmp_path):
    source = str(write_json_lines(tmp_path / "a.jsonl", [{"prompt": "p"}, {"prompt": ""}]))
    options = DataOptions(text="prompt", label="chosen", pair="rejected")
    rows = read_comparisons(source, options, "eval", labelled=False)
    assert rows == [Comparison("p"), Comparison("")]
