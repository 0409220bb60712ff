"""What README quotes is what the commands give."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_results_table_is_made_from_the_records():
    spec = importlib.util.spec_from_file_location("glue", ROOT / "benchmarks" / "glue.py")
    glue = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(glue)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = re.search(r"<!-- results: .*? -->\n(.*?)\n<!-- /results -->", readme, re.DOTALL)[1]
    assert quoted == glue.table()
    assert len(quoted.splitlines()) == 2 + len(glue.TASKS) * len(glue.METHODS)


def test_the_files_that_readme_names_are_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^    (adapterhub/\S+)", readme, re.MULTILINE)
    assert len(named) >= 6
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_table_on_quantized_backbones_is_made_from_the_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    quantized = importlib.import_module("quantized")
    page = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    quoted = re.search(r"<!-- results: .*? -->\n(.*?)\n<!-- /results -->", page, re.DOTALL)[1]
    assert quoted == quantized.table()
    assert len(quoted.splitlines()) > 2 + len(quantized.PRECISIONS)


def test_the_tests_run_with_every_extra():
    """Tests of quantized backbones are skipped without bitsandbytes: not in make's environment."""
    extras = re.search(r"optional-dependencies\]\n(.*?)\n\n", text("pyproject.toml"), re.DOTALL)[1]
    names = set(re.findall(r"^(\w+) =", extras, re.MULTILINE))
    installed = re.search(r'-e "\.\[(.*?)\]"', text("Makefile"))[1]
    assert "quantized" in names
    assert names == set(installed.split(","))
    assert re.search(r"^bitsandbytes==", text("constraints.txt"), re.MULTILINE)
    if Path(sys.prefix) == ROOT / ".venv":
        assert importlib.util.find_spec("bitsandbytes")


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")
