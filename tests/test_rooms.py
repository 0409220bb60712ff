"""The rooms of the house: a module imports only from rooms above its own."""

from __future__ import annotations

import ast
from pathlib import Path

import adapterhub

ROOT = Path(adapterhub.__file__).parent
ROOMS = (
    "_version",
    "errors",
    "config",
    "anatomy",
    "backbones",
    "data",
    "methods",
    "tasks",
    "files",
    "hooks",
    "interchange",
    "adapters",
    "merging",
    "registry",
    "training",
    "inference",
    "cli",
)
FLOOR = {name: level for level, name in enumerate(ROOMS)}
ENTRANCES = ("__init__", "__main__")


def imports(path):
    """The rooms that a file imports from, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("adapterhub.")
        ):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (
                a.name.split(".")[1] for a in node.names if a.name.startswith("adapterhub.")
            )


def test_no_module_imports_from_below():
    files = [p for p in sorted(ROOT.rglob("*.py")) if p.parent != ROOT or p.stem not in ENTRANCES]
    assert len(files) > 30
    checked = 0
    for path in files:
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for other in imports(path):
            assert FLOOR[other] <= FLOOR[room], f"{path.relative_to(ROOT)} imports from {other}"
            checked += 1
    assert checked > 100


def test_methods_and_architectures_are_named_only_in_their_own_rooms():
    """No branch on a method's or architecture's name outside methods/, anatomy/ and backbones/."""
    from adapterhub.anatomy import FAMILIES
    from adapterhub.methods import METHODS

    # "head" is also what the task head is called, "full" a word; quickstart runs two methods.
    names = (METHODS.keys() | FAMILIES.keys()) - {"head", "full", "prefix", "prompt", "parallel"}
    assert len(names) > 10
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0]
        if room in ("methods", "anatomy", "backbones") or path.stem in ("quickstart", "recipe"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                constants = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                assert not constants & names, f"{path}:{node.lineno}"


def test_tasks_are_named_only_in_their_own_room():
    """No branch on a task's name outside tasks/ and the kinds of model in backbones/."""
    from adapterhub.tasks import TASKS

    # "regression" is also what transformers calls a head with one output.
    names = TASKS.keys() - {"regression"}
    assert len(names) > 8
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).parts[0] in ("backbones", "tasks"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                constants = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                assert not constants & names, f"{path}:{node.lineno}"


def test_what_the_package_exports_is_there():
    for name in adapterhub.__all__:
        assert getattr(adapterhub, name) is not None
