"""What README quotes is what the commands give."""

from __future__ import annotations

import re
from pathlib import Path

import glue
import pytest

import recipes

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("marker", "script", "rows"),
    [
        ("results", glue, len(glue.TASKS) * len(glue.METHODS)),
        ("recipes", recipes, len(recipes.RUNS)),
    ],
)
def test_the_tables_are_made_from_the_records(marker, script, rows):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = re.search(rf"<!-- {marker}: .*? -->\n(.*?)\n<!-- /{marker} -->", readme, re.DOTALL)[1]
    assert quoted == script.table()
    assert len(quoted.splitlines()) == 2 + rows


def test_the_files_that_readme_names_are_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^    (adapterhub/\S+)", readme, re.MULTILINE)
    assert len(named) >= 6
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_page_of_the_format_is_that_of_the_code():
    from adapterhub.files import manifest, native

    page = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    assert native.__doc__.strip() in page
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert listed == [*manifest.Manifest.__dataclass_fields__, "sha256"]
