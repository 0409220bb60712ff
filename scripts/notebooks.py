"""Run the notebooks of examples/, and write their outputs into them.

    python scripts/notebooks.py examples/routing.ipynb            # run it
    python scripts/notebooks.py examples/*.ipynb --write          # and keep the outputs

A notebook runs in its folder. What differs between two runs of the same code is not written: times,
counts, versions, warnings. With QUICK in the environment trainings are short, and nothing is
written.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import nbclient
import nbformat

SECONDS = 3600  # the longest time of one cell


def run(path: Path) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of this run.

    Raises:
        CellExecutionError: a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, resources=resources, coalesce_streams=True
    )
    client.execute()
    return cleaned(notebook)


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove what differs between two runs of the same code."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [_cleaned(output) for output in cell.outputs if not _is_noise(output)]
    return notebook


def _is_noise(output: nbformat.NotebookNode) -> bool:
    """Return whether an output is a warning or a progress bar."""
    return output.get("name") == "stderr"


def _cleaned(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    if "execution_count" in output:
        output.execution_count = None
    if "metadata" in output:
        output.metadata = {}
    return output


def main() -> None:
    """Run some notebooks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("notebooks", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="keep the outputs")
    parser.add_argument("--record", type=Path, help="write what was run to a JSON file")
    options = parser.parse_args()
    if options.write and "QUICK" in os.environ:
        parser.error("outputs of short trainings are not kept: unset QUICK")
    record = {}
    for path in options.notebooks:
        start = time.perf_counter()
        notebook = run(path)
        record[path.name] = json.loads(nbformat.writes(notebook))
        if options.write:
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s")
    if options.record:
        options.record.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
