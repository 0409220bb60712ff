"""The rooms of the package, bottom up: a module imports only from rooms before its own."""

import ast
from functools import cache
from pathlib import Path

import house

import adapterhub
from adapterhub.anatomy import FAMILIES
from adapterhub.methods import METHODS
from adapterhub.tasks import TASKS

MODULES = house.modules(Path(adapterhub.__path__[0]))
ROOMS = (
    "_version", "errors", "interrupts", "patch", "ray_cluster", "status", "config", "anatomy",
    "backbones", "data", "methods", "tasks", "files", "hooks", "interchange", "adapters",
    "merging", "registry", "pages", "recipe", "loop", "speed", "training", "inference", "web",
    "serving", "hub", "bench", "extend", "cli",
)  # fmt: skip


# A newcomer needs one wing. Each imports from those that it is listed with, and `cli` from all.
WINGS = {
    "library": {"config", "anatomy", "backbones", "methods", "files", "hooks", "interchange",
                "adapters", "merging"},
    "trainer": {"data", "tasks", "recipe", "loop", "speed", "training", "inference", "pages"},
    "hub": {"registry", "web"},
    "server": {"serving", "hub"},
    "laboratory": {"bench"},
}  # fmt: skip
READS = {
    "library": set(),
    "trainer": {"library", "hub"},
    "hub": {"library"},
    "server": {"library", "hub", "trainer"},
    "laboratory": {"library", "hub", "trainer"},
}


@cache
def nodes():
    """List the nodes of all modules, each with its module."""
    return [(module, node) for module in MODULES for node in ast.walk(module.tree)]


@cache
def imports():
    return house.room_imports(MODULES, "adapterhub")


def test_every_room_is_listed():
    assert {module.room for module in MODULES} == set(ROOMS)


def test_every_room_documents_what_belongs_there_and_what_does_not():
    folders = [module for module in MODULES if module.path.name == "__init__.py"]
    assert len([module for module in folders if module.name in ROOMS]) == len(ROOMS) - 7
    for module in folders:
        summary, _, rest = (ast.get_docstring(module.tree) or "").partition("\n\n")
        assert summary, module.name
        assert rest or module.name not in ROOMS, module.name


def test_imports_only_go_down():
    assert sum(map(len, imports().values())) > 50
    for number, room in enumerate(ROOMS):
        upwards = imports()[room] - set(ROOMS[:number])
        assert not upwards, f"{room} imports from rooms above it"


def test_a_wing_imports_only_from_those_it_needs():
    common = {*ROOMS[: ROOMS.index("config")], "extend", "cli"}
    assert common | set().union(*WINGS.values()) == set(ROOMS)
    for wing, rooms in WINGS.items():
        others = set().union(*(WINGS[w] for w in WINGS.keys() - READS[wing] - {wing}))
        wrong = {r: imports()[r] & others for r in rooms if imports()[r] & others}
        assert not wrong, f"{wing} imports from another wing"


def comparisons_with(names, *rooms, except_for=()):
    """List the comparisons with one of these names, outside of some rooms and modules."""
    for module, node in nodes():
        if not isinstance(node, ast.Compare) or module.room in rooms:
            continue
        constants = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
        if constants & names and module.path.stem not in except_for:
            yield f"{module.path}:{node.lineno}"


def test_no_branch_on_a_method_or_architecture_outside_their_rooms():
    # "head" also names the task head, "full" is a common word; quickstart runs two methods.
    names = (METHODS.keys() | FAMILIES.keys()) - {"head", "full", "prefix", "prompt", "parallel"}
    assert len(names) > 10
    rooms = ("methods", "anatomy", "backbones")
    assert not list(comparisons_with(names, *rooms, except_for=("quickstart", "recipe")))


def test_no_branch_on_a_task_outside_its_room():
    # transformers also calls a head with one output "regression".
    names = TASKS.keys() - {"regression"}
    assert len(names) > 8
    assert not list(comparisons_with(names, "backbones", "tasks"))


def test_only_a_backbone_tells_models_of_transformers_from_other_modules():
    found = [
        f"{module.path}:{node.lineno}"
        for module, node in nodes()
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
        if "PreTrainedModel" in ast.unparse(node.args[1])
    ]
    assert found
    assert all("anatomy/backbone.py" in Path(place).as_posix() for place in found), found


def test_no_class_pretends_to_be_a_model_of_transformers():
    kinds = ("PreTrainedModel", "PreTrainedConfig", "PretrainedConfig")
    classes = [node for _, node in nodes() if isinstance(node, ast.ClassDef)]
    assert len(classes) > 500
    assert not [c.name for c in classes for b in c.bases if ast.unparse(b).endswith(kinds)]


def test_no_import_crosses_rooms_into_a_private_name():
    found = [
        f"{module.path}:{node.lineno}"
        for module, node in nodes()
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("adapterhub.")
        if (names := [*node.module.split(".")[1:], *(each.name for each in node.names)])
        if names[0] not in (module.room, "_version") and any(n.startswith("_") for n in names)
    ]
    assert not found
