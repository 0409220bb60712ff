"""The reference registry as pages: `adapterhub registry site`, with the study of tasks of GLUE.

They are files of the site, below registry/, and not pages of mkdocs.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).parents[2]
STUDIES = ("benchmarks/studies/glue",)
TITLE = "Adapters that come with the source"


def pages() -> dict[str, str]:
    """Return no pages: the registry has its own frame."""
    return {}


def assets() -> dict[str, Path]:
    """Write the pages of the registry to a folder of their own, and return them."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write(folder / "registry")
    files = (path for path in (folder / "registry").rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path for path in files if not path.name.startswith(".")
    }


def write(output: Path) -> None:
    """Write the pages of the reference registry."""
    studies = [word for study in STUDIES for word in ("--study", study)]
    command = [sys.executable, "-m", "adapterhub", "registry", "site", "--registry", "registry"]
    command += [*studies, "--title", TITLE, "--output", str(output)]
    subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.DEVNULL)
