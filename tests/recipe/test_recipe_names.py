"""The tables of other names; tests/recipe/test_recipe.py reads recipes with each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adapterhub.recipe.other_names import ALIASES, MEANINGS
from adapterhub.recipe.recipe import NAMES, read_draft


def test_the_page_has_every_alias():
    page = (Path(__file__).parents[2] / "docs/guides/options.md").read_text(encoding="utf-8")
    table = page.partition("<!-- aliases:")[2].partition("<!-- /aliases")[0]
    listed = {
        name: path
        for names, path in re.findall(r"^\| (.*) \| `([\w.]+)` \|$", table, re.MULTILINE)
        for name in re.findall(r"\w+", names)
    }
    assert listed == ALIASES


def test_the_tables_do_not_overlap():
    assert ALIASES.keys().isdisjoint(MEANINGS)
    assert all(name == name.lower() and "-" not in name for name in MEANINGS)


@pytest.mark.parametrize(
    "meaning", [text for text in MEANINGS.values() if "=" in text.split(" ")[0]], ids=str
)
def test_what_a_meaning_says_to_type_is_accepted(meaning):
    """Up to the first comma or colon outside of a value in quotes."""
    if "'" in meaning:
        key, _, value = meaning.partition("='")
        word = f"{key}={value.partition(chr(39))[0]}"
    else:
        word = meaning.partition(",")[0].partition(":")[0]
    key = word.partition("=")[0]
    if key.isupper():
        return  # a variable of the environment
    assert NAMES.own_name(key) == key
    recipe = read_draft(None, [word])
    if key == "method":
        from adapterhub.methods.common.base import parse_methods

        assert parse_methods(recipe.method)  # type: ignore[arg-type]
