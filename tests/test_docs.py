"""What README quotes is what the commands give."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import glue
import pytest
import quantized
import real

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("marker", "script", "rows"),
    [
        ("results", glue, len(glue.TASKS) * len(glue.METHODS)),
        ("recipes", real, len(real.RUNS)),
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


def test_the_table_on_quantized_backbones_is_made_from_the_records():
    page = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    quoted = re.search(r"<!-- results: .*? -->\n(.*?)\n<!-- /results -->", page, re.DOTALL)[1]
    assert quoted == quantized.table()
    assert len(quoted.splitlines()) > 2 + len(quantized.PRECISIONS)


def test_the_tests_run_with_every_extra():
    """Tests of quantized backbones are skipped without bitsandbytes: not in make's environment.
    Those of trl and of torchao have one of their own."""
    extras = re.search(r"optional-dependencies\]\n(.*?)\n\n", text("pyproject.toml"), re.DOTALL)[1]
    names = set(re.findall(r"^(\w+) =", extras, re.MULTILINE))
    made = re.findall(
        r"^\.(venv[\w-]*)/\.installed: EXTRAS := (.*)$", text("Makefile"), re.MULTILINE
    )
    installed = {name: set(line.split(",")) for name, line in made}
    assert "quantized" in installed["venv"]
    assert set().union(*installed.values()) == names
    assert names - installed["venv"] == {"trl", "torchao"}, "these have environments of their own"
    assert re.search(r"^bitsandbytes==", text("constraints.txt"), re.MULTILINE)
    if Path(sys.prefix) == ROOT / ".venv":
        assert importlib.util.find_spec("bitsandbytes")


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")
