"""The structure of the package: imports, names, functions, and tests that are found by name."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import house

import adapterhub

PACKAGE = Path(adapterhub.__path__[0])
TESTS = Path(__file__).parent
LONGEST_FUNCTION = 60  # lines


@cache
def modules():
    return house.modules(PACKAGE)


@cache
def functions():
    return list(house.functions(modules()))


def test_the_package_is_measured():
    assert len(modules()) > 150
    assert len(functions()) > 1000


def test_rooms_do_not_import_each_other_in_circles():
    assert house.circles(house.room_imports(modules(), PACKAGE.name)) == []


def test_modules_do_not_import_each_other_in_circles():
    """A module may import from its own package's `__init__`."""
    imports = house.module_imports(modules(), PACKAGE.name)
    graph = {
        module: {target for target in targets if not module.startswith(f"{target}.")}
        for module, targets in imports.items()
    }
    assert house.circles(graph) == []


def test_a_public_name_has_one_meaning():
    """Only the CLI's modules share a name: each defines `command`."""
    names = house.public_names(modules())
    assert len(names) > 300
    assert {name for name, places in names.items() if len(places) > 1} == {"command"}
    assert all(module.startswith("cli.") for module in names["command"])


def test_every_function_is_annotated():
    missing = [f"{m.name}.{f.name}" for m, f in functions() if not house.is_annotated(f)]
    assert not missing


def test_functions_are_short():
    long = [f"{m.name}.{f.name}" for m, f in functions() if house.lines(f) > LONGEST_FUNCTION]
    assert not long


def modules_by_folder():
    """Yield the folder and the name of each module of a room, but private ones."""
    for module in modules():
        path = module.path.relative_to(PACKAGE)
        if len(path.parts) > 1 and not path.stem.startswith("_"):
            yield path.parent.as_posix(), path.stem


def has_test(folder, name):
    """Whether tests/FOLDER contains test_NAME.py or test_NAME_*.py."""
    files = [TESTS / folder / f"test_{name}.py", *(TESTS / folder).glob(f"test_{name}_*.py")]
    return any(file.exists() for file in files)


def test_tests_are_found_by_name():
    """adapterhub/ROOM/FILE.py is tested in tests/ROOM/test_FILE.py or test_FILE_*.py."""
    found = list(modules_by_folder())
    assert len(found) > 100
    untested = [f"{folder}/{name}.py" for folder, name in found if not has_test(folder, name)]
    assert not untested, "add a test file of this name"


def test_every_public_definition_is_documented():
    definitions = house.public_definitions(modules())
    missing = [f"{m.name}.{n.name}" for m, n in definitions if not ast.get_docstring(n)]
    assert not missing


def test_docstrings_follow_the_form():
    problems = house.docstring_problems(modules())
    assert problems == []
