"""What builds and installs the package is pinned."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pins(name: str) -> list[str]:
    lines = text(name).splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_build_requirements_are_pinned_as_in_their_constraints():
    (requires,) = re.findall(r"^requires = \[(.+)\]$", text("pyproject.toml"), re.MULTILINE)
    required = re.findall(r'"([^"]+)"', requires)
    assert required
    assert set(required) <= set(pins("constraints-build.txt"))


def test_every_constraint_is_one_version_without_hashes():
    """pip refuses to install a folder if any constraint has a hash."""
    for name in ("constraints.txt", "constraints-oldest.txt", "constraints-build.txt"):
        versions = pins(name)
        assert len(versions) >= 5
        for line in versions:
            assert re.fullmatch(r'[\w.-]+==[\w.]+( ; python_version >= "3.11")?', line), line


def test_every_pin_installs_on_every_python_that_it_is_for():
    """A release says which Pythons it supports; those that are not for 3.10 are marked."""
    wrong, checked = [], 0
    for line in pins("constraints.txt"):
        pin, _, marker = line.partition(" ; ")
        name, _, version = pin.partition("==")
        try:
            metadata = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another environment
        if metadata["Version"].partition("+")[0] == version:
            supported = SpecifierSet(metadata["Requires-Python"] or "")
            minors = range(11 if marker else 10, 14)
            wrong += [f"{pin} on 3.{n}" for n in minors if not supported.contains(f"3.{n}.99")]
            checked += 1
    assert not wrong, 'mark them: ; python_version >= "3.11"'
    assert checked > 20


def test_make_pins_isolated_builds_in_old_and_new_pip():
    makefile = text("Makefile")
    assert 'PIP_CONSTRAINT="$(PINS) constraints-build.txt"' in makefile
    assert "PIP_BUILD_CONSTRAINT=constraints-build.txt" in makefile
    installs = re.findall(r"^\t.*pip install.*$", makefile, re.MULTILINE)
    assert installs
    assert all(line.startswith("\t$(PINNED) ") for line in installs)
