"""A table: its columns, templates over them, and how it is described."""

from __future__ import annotations

import pytest

from adapterhub.data.table import Table, first_few
from adapterhub.errors import DataError

COLUMNS = {"title": ["One", "Two", None], "body": ["a b", "", "c"], "n": [1, 2, 3]}


def table(**fields: object) -> Table:
    return Table("x.csv", "line", tuple(COLUMNS), [2, 3, 4], COLUMNS.__getitem__, **fields)  # type: ignore[arg-type]


def test_columns_and_templates_are_taken():
    one, other = table().take(["n", "{title}. {body} ({n})"])
    assert list(one) == [1, 2, 3]
    assert list(other) == ["One. a b (1)", "Two.  (2)", ". c (3)"]


def test_a_column_with_braces_in_its_name_is_a_column():
    columns = {"{a}": ["x"], "a": ["y"]}
    braces = Table("x", "row", tuple(columns), [1], columns.__getitem__)
    assert list(braces.take(["{a}"])[0]) == ["x"]


@pytest.mark.parametrize("name", ["titel", "{titel}. {body}"])
def test_an_unknown_column_is_listed_also_in_a_template(name):
    with pytest.raises(DataError, match="'titel'; did you mean 'title'") as error:
        table(header=True).take([name])
    assert "'title', 'body', 'n'" in error.value.expected
    assert "data.header=false" in error.value.hint


def test_it_is_described_in_one_line():
    assert table(form="semicolon-separated").described() == (
        "semicolon-separated, 3 rows; columns: title, body, n"
    )
    many = Table("x", "row", tuple(map(str, range(20))), [1], lambda name: [1])
    assert many.described().endswith("columns: 0, 1, 2, 3, 4, 5, 6, 7 and 12 more")


def test_samples_show_each_column_with_two_values():
    assert table().samples() == ["title: One | Two", "body: a b | (empty)", "n: 1 | 2"]
    long = Table("x", "row", ("t",), [1], lambda name: ["word " * 30])
    assert long.samples() == [f"t: {('word ' * 8)}..."]


def test_cells_from_all_over_the_table_are_looked_at():
    rows = list(range(10_000))
    big = Table("x", "row", ("n",), rows, lambda name: rows)
    spread = big.spread("n", 100)
    assert (len(spread), spread[0], spread[-1]) == (100, 0, 9900)
    lazy = Table("x", "row", ("n",), rows, lambda name: iter(rows))
    assert lazy.spread("n", 3) == [0, 1, 2]


@pytest.mark.parametrize("count", [0, 1, 10, 11, 99])
def test_first_few_lists_at_most_ten_items(count: int) -> None:
    listed = first_few([str(i) for i in range(count)])
    assert listed[:10] == [str(i) for i in range(min(count, 10))]
    assert listed[10:] == ([f"... and {count - 10} more"] if count > 10 else [])
