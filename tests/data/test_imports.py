"""The data is read and checked without the libraries that take seconds to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "transformers", "datasets", "pyarrow", "numpy", "accelerate")
CODE = """
import sys, pkgutil, importlib
import adapterhub.data
for module in pkgutil.iter_modules(adapterhub.data.__path__):
    importlib.import_module(f"adapterhub.data.{module.name}")
from adapterhub.data.columns import WANTS, choose_columns
from adapterhub.data.examples import read_examples
from adapterhub.data.options import DataOptions
choice = choose_columns(sys.argv[1], DataOptions(), "train", WANTS["classes"])
read_examples(sys.argv[1], choice.options, labelled=True)
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


def test_reading_a_file_imports_no_heavy_library(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    rows = "caf\u00e9 was good;5\nit was bad;1\n" * 9
    file.write_bytes(f"text;stars\n{rows}".encode("cp1252"))
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(file), *HEAVY], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
