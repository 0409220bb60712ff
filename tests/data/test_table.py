"""A table: its columns, templates over them, and how it is described."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adapterhub.data.table import Table, cell_text, fill, first_few, is_template, template_columns
from adapterhub.errors import DataError

COLUMNS = {"title": ["One", "Two", None], "body": ["a b", "", "c"], "n": [1, 2, 3]}


def table(**fields):
    return Table("x.csv", "line", tuple(COLUMNS), [2, 3, 4], COLUMNS.__getitem__, **fields)


def test_columns_and_templates_are_taken():
    one, other = table().take(["n", "{title}. {body} ({n})"])
    assert list(one) == [1, 2, 3]
    assert list(other) == ["One. a b (1)", "Two.  (2)", ". c (3)"]
    columns = {"{a}": ["x"], "a": ["y"]}  # braces in the name of a column
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
    for count in (0, 1, 10, 11, 99):
        texts = [str(i) for i in range(count)]
        more = [f"... and {count - 10} more"] * (count > 10)
        assert first_few(texts) == texts[:10] + more


def test_cells_from_all_over_the_table_are_looked_at():
    rows = list(range(10_000))
    big = Table("x", "row", ("n",), rows, lambda name: rows)
    spread = big.spread("n", 100)
    assert (len(spread), spread[0], spread[-1]) == (100, 0, 9900)
    lazy = Table("x", "row", ("n",), rows, lambda name: iter(rows))
    assert lazy.spread("n", 3) == [0, 1, 2]


# Templates substitute the names of columns and do nothing else.


NAMES = st.text(st.characters(exclude_characters="{}", exclude_categories=["Cs"]), min_size=1)


def test_names_in_braces_are_cells():
    cells = {"title": "One", "body": "two"}
    assert fill("{title}. {body}", cells) == "One. two"
    assert template_columns("{title}. {body} {title}") == ["title", "body", "title"]
    assert fill("{{{title}}} 100%", cells) == "{One} 100%"
    assert (cell_text(3, "n"), cell_text(2.5, "n")) == ("3", "2.5")
    with pytest.raises(DataError, match="'n' in a template has type list"):
        cell_text(["a"], "n")
    assert not any(map(is_template, ("text", "#1 String", "a{", "}", "{{a}}", "")))
    with pytest.raises(DataError, match="2,000 at most"):
        template_columns("{a}" * 1000)


@pytest.mark.parametrize("value", [None, float("nan"), ""])
def test_a_missing_cell_is_empty_and_leaves_no_space_at_the_ends(value):
    assert fill("{a}\n\n{b}", {"a": "x", "b": value}) == "x"
    assert fill("{a}. {b}", {"a": "x", "b": value}) == "x."


@given(NAMES, st.text())
@example("a.__class__", "x")
@example("a[0]", "x")
@example("a!r", "x")
@example("a:>99999", "x")
@example("0", "x")
@example(" a", "x")
def test_what_is_in_braces_is_a_name_and_no_code(name, value):
    """Any cell is put in unchanged."""
    assert template_columns(f"{{{name}}}") == [name]
    assert fill(f"<{{{name}}}>", {name: value}) == f"<{value}>"


def test_a_single_brace_is_refused():
    for template in ("{a} {", "{a}}", "}{a}", "{a} {}", "{a" + "{b}"):
        with pytest.raises(DataError, match="invalid template"):
            template_columns(template)
