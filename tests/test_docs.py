"""Tables, paths and options in the documentation agree with the code and the records."""

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
def test_tables_in_readme_equal_the_records(marker, script, rows):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = re.search(rf"<!-- {marker}: .*? -->\n(.*?)\n<!-- /{marker} -->", readme, re.DOTALL)[1]
    assert quoted == script.table()
    assert len(quoted.splitlines()) == 2 + rows


def test_files_named_in_readme_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = re.findall(r"^    (adapterhub/\S+)", readme, re.MULTILINE)
    assert len(paths) >= 6
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_format_page_agrees_with_the_code():
    from adapterhub.files import manifest, native

    page = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    assert native.__doc__.strip() in page
    fields = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert fields == [*manifest.Manifest.__dataclass_fields__, "sha256"]


def test_the_quantization_table_equals_the_records():
    page = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    quoted = re.search(r"<!-- results: .*? -->\n(.*?)\n<!-- /results -->", page, re.DOTALL)[1]
    assert quoted == quantized.table()
    assert len(quoted.splitlines()) > 2 + len(quantized.PRECISIONS)


def test_every_extra_is_installed_in_a_test_environment():
    """`make` installs all extras, so no test is skipped; trl and torchao have their own targets."""
    extras = re.search(r"optional-dependencies\]\n(.*?)\n\n", text("pyproject.toml"), re.DOTALL)[1]
    names = set(re.findall(r"^(\w+) =", extras, re.MULTILINE))
    environments = re.findall(
        r"^\.(venv[\w-]*)/\.installed: EXTRAS := (.*)$", text("Makefile"), re.MULTILINE
    )
    installed = {name: set(line.split(",")) for name, line in environments}
    assert "quantized" in installed["venv"]
    assert set().union(*installed.values()) == names
    assert names - installed["venv"] == {"trl", "torchao"}, (
        "trl and torchao have their own environments"
    )
    assert re.search(r"^bitsandbytes==", text("constraints.txt"), re.MULTILINE)
    if Path(sys.prefix) == ROOT / ".venv":
        assert importlib.util.find_spec("bitsandbytes")


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")
