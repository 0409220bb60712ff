"""Templates substitute the names of columns and do nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.data.table import cell_text, fill, is_template, template_columns
from adapterhub.errors import DataError

NAMES = st.text(st.characters(exclude_characters="{}", exclude_categories=["Cs"]), min_size=1)


def test_names_in_braces_are_cells():
    cells = {"title": "One", "body": "two"}
    assert fill("{title}. {body}", cells) == "One. two"
    assert template_columns("{title}. {body} {title}") == ["title", "body", "title"]
    assert fill("{{{title}}} 100%", cells) == "{One} 100%"


@pytest.mark.parametrize("value", [None, float("nan"), ""])
def test_a_missing_cell_is_empty_and_leaves_no_space_at_the_ends(value):
    assert fill("{a}\n\n{b}", {"a": "x", "b": value}) == "x"
    assert fill("{a}. {b}", {"a": "x", "b": value}) == "x."


def test_numbers_are_written_and_lists_refused():
    assert cell_text(3, "n") == "3"
    assert cell_text(2.5, "n") == "2.5"
    with pytest.raises(DataError, match="'n' in a template has type list"):
        cell_text(["a"], "n")


@pytest.mark.parametrize("name", ["a.__class__", "a[0]", "a!r", "a:>99999", "0", " a"])
def test_what_is_in_braces_is_a_name_and_no_code(name):
    assert template_columns(f"{{{name}}}") == [name]
    assert fill(f"{{{name}}}", {name: "x"}) == "x"


@pytest.mark.parametrize("template", ["{a} {", "{a}}", "}{a}", "{a} {}", "{a" + "{b}"])
def test_a_single_brace_is_refused(template):
    with pytest.raises(DataError, match="invalid template"):
        template_columns(template)


def test_a_long_template_is_refused():
    with pytest.raises(DataError, match="2,000 at most"):
        template_columns("{a}" * 1000)


@pytest.mark.parametrize("name", ["text", "#1 String", "a{", "}", "{{a}}", ""])
def test_names_without_a_name_in_braces_are_no_templates(name):
    assert not is_template(name)


@given(NAMES, st.text())
def test_any_cell_is_put_in_unchanged_but_for_space_around(name, value):
    assert fill(f"<{{{name}}}>", {name: value}) == f"<{value}>"
