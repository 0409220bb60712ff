"""Usual names of columns."""

from __future__ import annotations

import pytest

from adapterhub.data.column_names import KNOWN, NEVER
from adapterhub.data.table import numbers_rows, plain_name


@pytest.mark.parametrize(
    ("name", "plain"), [("Review Text", "reviewtext"), ("#1 String", "1string"), ("_id_", "id")]
)
def test_names_are_compared_without_case_and_punctuation(name: str, plain: str) -> None:
    assert plain_name(name) == plain


@pytest.mark.parametrize(
    "name", ["id", "ID", "user_id", "tweetId", "docID", "#1 ID", "index", "", "Unnamed: 0", "date"]
)
def test_columns_that_number_or_date_rows_are_known(name: str) -> None:
    assert numbers_rows(name)


@pytest.mark.parametrize("name", ["text", "label", "said", "paid", "kid", "valid", "Idea"])
def test_other_columns_are_not_taken_for_them(name: str) -> None:
    assert not numbers_rows(name)


def test_all_names_are_plain() -> None:
    assert all(name == plain_name(name) for name in KNOWN | NEVER)
