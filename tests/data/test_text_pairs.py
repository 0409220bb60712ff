"""Pairs of texts with negatives or scores: columns, cells and what is refused."""

from __future__ import annotations

import json

import pytest

from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import TextPair, has_scores, pair_columns, read_text_pairs
from adapterhub.errors import DataError


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "pairs.jsonl"


@pytest.mark.parametrize(
    ("names", "scored"),
    [
        (("anchor", "positive"), False),
        (("query", "positive"), False),
        (("question", "answer"), False),
        (("sentence1", "sentence2", "score"), True),
        (("text", "pair2", "label"), None),
    ],
)
def test_columns_are_found_by_their_names(file, names, scored):
    values = ("how?", "so", 3.5)
    source = write(file, *[dict(zip(names, values, strict=False))] * 3)
    if scored is None:
        scored, options = True, DataOptions(pair="pair2")
    else:
        options = DataOptions()
    assert has_scores(source, options, "train") == scored
    choice = pair_columns(source, options, "train", scored=scored).options
    assert (choice.text, choice.pair) == names[:2]
    expected = TextPair("how?", "so", (), 3.5 if scored else None)
    assert read_text_pairs(source, options, "train", scored=scored) == [expected] * 3


@pytest.mark.parametrize(
    ("negatives", "expected"),
    [
        ({"negative": "c"}, ("c",)),
        ({"negative_1": "c", "negative_2": "d"}, ("c", "d")),
        ({"hard_negatives": ["c", "d"]}, ("c", "d")),
        ({"neg": None}, ()),
    ],
)
def test_negatives(file, negatives, expected):
    source = write(file, {"anchor": "a", "positive": "b", "score": 1, **negatives})
    assert not has_scores(source, DataOptions(), "train")
    (pair,) = read_text_pairs(source, DataOptions(), "train", scored=False)
    assert pair == TextPair("a", "b", expected)
    assert pair.texts == ("a", "b", *expected)


def test_negatives_that_are_named(file):
    source = write(file, {"anchor": "a", "positive": "b", "other": "c", "negative": "d"})
    options = DataOptions(negatives=("other",))
    assert read_text_pairs(source, options, "train", scored=False)[0].negatives == ("c",)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"anchor": "a", "positive": " "}, "'positive' is empty"),
        ({"anchor": "a", "positive": "b", "negative": ""}, "'negatives' is empty"),
        ({"anchor": "a", "positive": "b", "negative": [1]}, "type int"),
    ],
)
def test_texts_that_are_refused(file, row, problem):
    source = write(file, {"anchor": "a", "positive": "b", "negative": "c"}, row)
    with pytest.raises(DataError, match=f"line 2: .*{problem}"):
        read_text_pairs(source, DataOptions(), "train", scored=False)


def test_a_score_is_a_number(file):
    rows = [{"sentence1": "a", "sentence2": "b", "score": s} for s in (1, "high")]
    with pytest.raises(DataError, match="'high' is not a number"):
        read_text_pairs(write(file, *rows), DataOptions(label="score"), "train", scored=True)


def test_to_predict_on_only_the_first_texts_are_read(file):
    source = write(file, {"anchor": "a"}, {"anchor": ""})
    options = DataOptions(text="anchor", pair="positive", label="score")
    pairs = read_text_pairs(source, options, "eval", scored=True, labelled=False)
    assert pairs == [TextPair("a"), TextPair("")]
