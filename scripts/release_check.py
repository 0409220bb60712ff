"""Build the release, and use it as a stranger does: `make release-check`.

1. builds the sdist, and from it the wheel, into dist/;
2. checks what is in both;
3. installs the wheel into an empty environment and runs the quickstart in an empty folder.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
IN_WHEEL = ("adapterhub/py.typed", "adapterhub/pages/page.html", "adapterhub/cli/quickstart.py")
IN_SDIST = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", *IN_WHEEL)
ELSEWHERE = ("tests", "docs", "benchmarks", "scripts", "registry", "recipes", ".github", "build")
_EXTRAS = "[minilm]"  # the quickstart's backbone, so that it needs no hub


def version() -> str:
    """Return the version of the source."""
    text = (ROOT / "adapterhub/_version.py").read_text(encoding="utf-8")
    return re.findall(r'__version__ = "(.+)"', text)[0]


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; the requirements of the build are pinned."""
    pins = str(ROOT / "constraints-build.txt")
    environment = os.environ | {"PIP_CONSTRAINT": pins, "PIP_BUILD_CONSTRAINT": pins}
    command = [sys.executable, "-m", "build", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    stem = f"adapterhub-{version()}"
    return folder / f"{stem}.tar.gz", folder / f"{stem}-py3-none-any.whl"


def contents_problems(names: Sequence[str], required: Sequence[str]) -> list[str]:
    """List what is wrong with the names of the files of a distribution."""
    missing = [f"{name} is missing" for name in required if name not in names]
    parts = {name: PurePosixPath(name).parts for name in names}
    stray = [name for name in names if parts[name][0] in ELSEWHERE or "__pycache__" in name]
    return missing + [f"{name} does not belong there" for name in stray]


def metadata_problems(metadata: str) -> list[str]:
    """List what is wrong with the metadata of a wheel: what a package index shows."""
    fields = email.message_from_string(metadata)
    expected = {
        "Name": "adapterhub",
        "Version": version(),
        "License-Expression": "Apache-2.0",
        "Description-Content-Type": "text/markdown",
    }
    wrong = [f"{k} is {fields[k]!r}, not {v!r}" for k, v in expected.items() if fields[k] != v]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").strip()
    return wrong + ([] if str(fields.get_payload()).strip() == readme else ["another README"])


def problems(sdist: Path, wheel: Path) -> list[str]:
    """List what is wrong with the contents of the two files."""
    with tarfile.open(sdist) as archive:
        inside = [name.partition("/")[2] for name in archive.getnames()]
        found = contents_problems([name for name in inside if name], IN_SDIST)
    with zipfile.ZipFile(wheel) as archive:
        info = f"adapterhub-{version()}.dist-info"
        required = (*IN_WHEEL, f"{info}/licenses/LICENSE")
        found += contents_problems(archive.namelist(), required)
        return found + metadata_problems(archive.read(f"{info}/METADATA").decode())


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel into a new environment; return the folder of its commands."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python, pins = folder / "bin/python", ROOT / "constraints.txt"
    subprocess.run(["sh", ROOT / "scripts/install-torch", python, pins], check=True)
    # pip 25.3 and later ignore PIP_CONSTRAINT in isolated builds, older ones read nothing else.
    build_pins = str(ROOT / "constraints-build.txt")
    environment = os.environ | {"PIP_CONSTRAINT": f"{pins} {build_pins}"}
    environment |= {"PIP_BUILD_CONSTRAINT": build_pins}
    requirement = f"adapterhub{_EXTRAS} @ {wheel.resolve().as_uri()}"
    command = [python, "-m", "pip", "install", "--quiet", "--no-compile", requirement]
    subprocess.run(command, check=True, env=environment)
    return folder / "bin"


def use(commands: Path, folder: Path) -> None:
    """Run the quickstart with the installed package, in an empty folder."""
    environment = os.environ | {"HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    where = "import adapterhub; print(adapterhub.__version__, adapterhub.__file__)"
    for command in ([commands / "python", "-c", where], [commands / "adapterhub", "quickstart"]):
        subprocess.run(command, check=True, env=environment, cwd=folder)


def main() -> None:
    """Build, check, install and use the release."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-only", action="store_true", help="do not install the wheel")
    options = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)  # pip would take this source for the installed package
    start = time.perf_counter()
    sdist, wheel = build(ROOT / "dist")
    for file in (sdist, wheel):
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1000:,.0f} kB")
    if found := problems(sdist, wheel):
        sys.exit("\n".join(["the release is not complete:", *found]))
    if not options.build_only:
        with tempfile.TemporaryDirectory() as folder:
            commands = install(wheel, Path(folder, "environment"))
            empty = Path(folder, "empty")
            empty.mkdir()
            use(commands, empty)
    print(f"release-check: good, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
