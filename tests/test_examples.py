"""The notebooks of examples/ run, and the committed ones have the outputs of a whole run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import notebooks
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
_MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|usr|work|opt|private|Users|mnt|var)/\S+")


def outputs_text(notebook: nbformat.NotebookNode) -> str:
    """Return what the cells printed and displayed as text."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            texts += [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
    return "\n".join(texts)


@pytest.fixture(scope="module")
def quick_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nbformat.NotebookNode]:
    """Run all notebooks with short trainings, in a new process."""
    record = tmp_path_factory.mktemp("notebooks") / "record.json"
    script = ROOT / "scripts/notebooks.py"
    result = subprocess.run(
        [sys.executable, script, *NOTEBOOKS, "--record", record],
        env=os.environ | {"QUICK": "1", "PYTHONPATH": str(ROOT)}, text=True, check=False,
        timeout=280, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    ran = json.loads(record.read_text(encoding="utf-8"))
    return {name: nbformat.reads(json.dumps(book), as_version=4) for name, book in ran.items()}


def test_the_notebooks_are_found() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["classifier", "peft", "routing"]
    listed = re.findall(r"\]\((\w+\.ipynb)\)", (ROOT / "examples/README.md").read_text())
    assert sorted(listed) == [path.name for path in NOTEBOOKS]


@pytest.mark.apart
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, quick_runs: dict[str, nbformat.NotebookNode]) -> None:
    ran = quick_runs[path.name]
    assert any(cell.get("outputs") for cell in ran.cells)
    text = outputs_text(ran)
    if path.stem == "routing":
        assert text.count("largest difference below 1e-5: True") == 6
        assert text.count("False") == 0
    if path.stem == "peft":
        differences = re.findall(r"largest difference to peft: (\S+)", text)
        assert len(differences) == 2
        assert all(float(difference) < 1e-5 for difference in differences)
        assert "the same names: True the same values: True" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_is_clean_and_has_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert len(outputs) >= 3
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert notebooks.cleaned(nbformat.read(path, as_version=4)) == notebook
    assert path.read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"
    assert not _MACHINE_PATH.search(outputs_text(notebook))
    assert path.stat().st_size < 120_000
    assert all(re.fullmatch(r"[a-z-]+", cell.id) for cell in notebook.cells)


def test_a_notebook_fits_on_a_screen_or_two() -> None:
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert sum(len(cell.source.splitlines()) for cell in cells) < 100


def test_cleaning_removes_what_differs_between_two_runs() -> None:
    cell = nbformat.v4.new_code_cell("1", execution_count=3, metadata={"tags": ["mine"]})
    cell.outputs = [
        nbformat.v4.new_output("execute_result", {"text/plain": "1"}, execution_count=3),
        nbformat.v4.new_output("stream", name="stderr", text="a warning"),
    ]
    kernel = {"name": "mine", "display_name": "Mine"}
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": kernel})
    clean = notebooks.cleaned(notebook)
    assert clean.metadata.kernelspec.name == "python3"
    (left,) = clean.cells
    assert (left.execution_count, left.metadata) == (None, {})
    (output,) = left.outputs
    assert output.execution_count is None
    assert output.data["text/plain"] == "1"
