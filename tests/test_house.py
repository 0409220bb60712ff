"""The structure of the package: imports, names, functions."""

import ast
from functools import cache
from pathlib import Path

import house

import adapterhub

PACKAGE = Path(adapterhub.__path__[0])
TESTS = Path(__file__).parent
LONGEST_FUNCTION = 60  # lines


def modules():
    return house.modules(PACKAGE)  # parsed once


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
    """Two kinds of modules share a name: commands (`command`) and migrations (`upgrade`)."""
    names = house.public_names(modules())
    assert len(names) > 300
    assert {name for name, places in names.items() if len(places) > 1} == {"command", "upgrade"}
    assert all(module.startswith("cli.") for module in names["command"])
    assert all(module.startswith("hub.migrations.") for module in names["upgrade"])


def test_every_function_is_annotated():
    missing = [f"{m.name}.{f.name}" for m, f in functions() if not house.is_annotated(f)]
    assert not missing


def test_functions_are_short():
    long = [f"{m.name}.{f.name}" for m, f in functions() if house.lines(f) > LONGEST_FUNCTION]
    assert not long


def test_every_public_definition_is_documented():
    definitions = house.public_definitions(modules())
    missing = [f"{m.name}.{n.name}" for m, n in definitions if not ast.get_docstring(n)]
    assert not missing


def test_docstrings_follow_the_form():
    problems = house.docstring_problems(modules(), adapterhub.__all__)
    assert problems == []
