"""Measure the structure of the package: rooms, imports, names, functions, docstrings.

    python scripts/house.py [PACKAGE_FOLDER]

A room is a folder or a module directly under the package. The floor of a room is the length of the
longest chain of imports between rooms that starts there; rooms that import each other (a cycle)
share a floor. tests/test_house.py checks the targets.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
ENTRANCES = ("__init__", "__main__")
ENTRIES = {"train": "cli.train", "ah.load": "registry.pull", "ah.attach": "adapters.attach"}
"""The modules with which the paths begin that a reader follows."""


@dataclass(frozen=True)
class Module:
    """One source file of a package."""

    path: Path
    room: str
    name: str
    tree: ast.Module


@cache
def modules(package: Path) -> list[Module]:
    """List the modules of a package, except its own `__init__` and `__main__`."""
    sources = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if len(parts) > 1 or parts[0] not in ENTRANCES:
            name = ".".join(part for part in parts if part != "__init__")
            tree = ast.parse(path.read_text(encoding="utf-8"))
            sources.append(Module(path, parts[0], name, tree))
    return sources


def imported(module: Module, package: str) -> Iterator[str]:
    """Yield the dotted names under `package` that a module imports, anywhere in the file."""
    prefix = f"{package}."
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
            yield str(node.module).removeprefix(prefix)
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from (name.removeprefix(prefix) for name in names if name.startswith(prefix))


def room_imports(sources: list[Module], package: str) -> dict[str, set[str]]:
    """Map each room to the other rooms that it imports from."""
    rooms: dict[str, set[str]] = {module.room: set() for module in sources}
    for module in sources:
        targets = {name.split(".")[0] for name in imported(module, package)}
        rooms[module.room] |= (targets & rooms.keys()) - {module.room}
    return rooms


def module_imports(sources: list[Module], package: str) -> dict[str, set[str]]:
    """Map each module to the modules that it imports."""
    names = {module.name for module in sources}
    return {m.name: {i for i in imported(m, package) if i in names} - {m.name} for m in sources}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Find the cycles: groups of nodes that reach each other (strongly connected components)."""
    reach = {node: _reachable(graph, node) for node in graph}
    groups = {
        frozenset({node} | {other for other in reach[node] if node in reach[other]})
        for node in graph
    }
    return [set(group) for group in groups if len(group) > 1]


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += graph[node]
    return seen


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """Map each room to its floor: one more than the highest floor that it imports from."""
    joined = {node: min(group) for group in circles(graph) for node in group}

    def group_of(node: str) -> str:
        return joined.get(node, node)

    flat: dict[str, set[str]] = defaultdict(set)
    for node, targets in graph.items():
        flat[group_of(node)] |= {group_of(target) for target in targets} - {group_of(node)}

    def floor(node: str) -> int:
        return 1 + max((floor(target) for target in flat[node]), default=0)

    return {node: floor(group_of(node)) for node in graph}


def single_importers(graph: dict[str, set[str]]) -> list[str]:
    """List the modules that exactly one other module imports, of a graph of imports."""
    importers = Counter(target for targets in graph.values() for target in targets)
    return sorted(name for name, count in importers.items() if count == 1)


def stations(sources: list[Module], package: str, entry: str) -> set[str]:
    """Return the modules that imports reach from one module, with it, anywhere in the files.

    A module that lists the modules of its folder (`pkgutil.iter_modules`) imports all of them.

    Args:
        sources: the modules of the package.
        package: the name of the package.
        entry: the module with which they begin.
    """
    graph = module_imports(sources, package)
    for module in sources:
        if "iter_modules" in module.path.read_text(encoding="utf-8"):
            folder = module.path.parent
            graph[module.name] |= {m.name for m in sources if m.path.parent == folder}
    return {entry} | _reachable(graph, entry)


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines of code: without blank lines, comments and docstrings."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            found |= {*range(token.start[0], token.end[0] + 1)}
    texts = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Expr))
    docstrings = (n for n in texts if isinstance(n.value, ast.Constant) and _is_text(n.value))
    return found - {line for n in docstrings for line in _span(n)}


def import_share(sources: list[Module]) -> float:
    """Return the share of the lines of code that are imports."""
    code = imports = 0
    for module in sources:
        own = code_lines(module.path.read_text(encoding="utf-8"))
        nodes = (n for n in ast.walk(module.tree) if isinstance(n, ast.Import | ast.ImportFrom))
        imports += len(own & {line for node in nodes for line in _span(node)})
        code += len(own)
    return imports / code


def _is_text(node: ast.Constant) -> bool:
    return isinstance(node.value, str)


def _span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def public_names(sources: list[Module]) -> dict[str, list[str]]:
    """Map each public top-level class or function to the modules that define it."""
    names: dict[str, list[str]] = defaultdict(list)
    for module in sources:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
                names[node.name].append(module.name)
    return dict(names)


def functions(sources: list[Module]) -> list[tuple[Module, Function]]:
    """List all functions and methods, including nested ones, with their module."""
    return [(m, n) for m in sources for n in ast.walk(m.tree) if isinstance(n, Function)]


def lines(node: ast.stmt) -> int:
    """Count the lines of a definition, excluding decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def is_annotated(function: Function) -> bool:
    """Return whether the result and all parameters except self and cls have a type."""
    typed = (parameter.annotation for parameter in _parameters(function))
    return function.returns is not None and all(typed)


def public_definitions(sources: list[Module]) -> list[tuple[Module, Function | ast.ClassDef]]:
    """List public classes and functions, and the public methods of public classes."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    definitions: list[tuple[Module, Function | ast.ClassDef]] = []
    for module in sources:
        for node in module.tree.body:
            if not isinstance(node, kinds) or node.name.startswith("_"):
                continue
            definitions.append((module, node))
            if isinstance(node, ast.ClassDef):
                inner = (n for n in node.body if isinstance(n, Function))
                definitions += [(module, n) for n in inner if not n.name.startswith("_")]
    return definitions


NOUN_START = re.compile(
    r"(an?|the|th(is|at|ese|ose)|its?|wh(at|ich|o|ether|ere|en)|how|one|each|every|all|any|both|no|of|"
    r"in|on|at|by|for|from|to|with(out)?|as|if|is|are|has|not|several|two)\b",
    re.IGNORECASE,
)


def docstring_problems(sources: list[Module], exported: Collection[str]) -> list[str]:
    """List the public docstrings that break the project's rules.

    A function's first line is imperative; one that users import has an `Args:` section from three
    parameters on; exceptions are in a `Raises:` section. ruff checks the rest (pydocstyle,
    convention "google").

    Args:
        sources: the modules.
        exported: the names that users import.
    """
    problems = []
    for module, node in public_definitions(sources):
        text = ast.get_docstring(node)
        if isinstance(node, ast.ClassDef) or text is None:
            continue
        at = f"{module.path}:{node.lineno} {node.name}"
        decorators = {ast.unparse(d).split("(")[0].split(".")[-1] for d in node.decorator_list}
        noun_is_fine = decorators & {"property", "cached_property"}
        if not noun_is_fine and NOUN_START.match(text):
            problems.append(f"{at}: the first line is not imperative: {text.splitlines()[0]}")
        if re.search(r"^\s*Raises [A-Z`]", text, re.MULTILINE):
            problems.append(f"{at}: use a Raises: section")
        if len(_parameters(node)) >= 3 and "Args:" not in text and node.name in exported:
            problems.append(f"{at}: three parameters or more without Args:")
    return problems


def _parameters(function: Function) -> list[ast.arg]:
    """List the parameters of a function, without self and cls."""
    args = function.args
    parameters = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return [p for p in parameters if p and p.arg not in ("self", "cls")]


def report(package: Path) -> str:
    """Format the measurements of a package, one per line."""
    sources = modules(package)
    rooms = room_imports(sources, package.name)
    named = {name: where for name, where in public_names(sources).items() if len(where) > 1}
    sizes = sorted(lines(function) for _, function in functions(sources))
    annotated = [is_annotated(function) for _, function in functions(sources)]
    public = public_definitions(sources)
    documented = [ast.get_docstring(node) is not None for _, node in public]
    total = sum(len(m.path.read_text(encoding="utf-8").splitlines()) for m in sources)
    graph = module_imports(sources, package.name)
    rows = {
        "modules": len(sources),
        "lines": total,
        "rooms": len(rooms),
        "floors": max(floors(rooms).values()),
        "imports between rooms": sum(map(len, rooms.values())),
        "cycles of rooms": len(circles(rooms)),
        "cycles of modules": len(circles(graph)),
        "files with one importer": len(single_importers(graph)),
        "imports in lines of code": f"{import_share(sources):.1%}",
        **{
            f"modules that {name} reaches": len(stations(sources, package.name, entry))
            for name, entry in ENTRIES.items()
            if entry in graph
        },
        "public names with several meanings": len(named),
        "functions": len(sizes),
        "lines per function, median": statistics.median(sizes),
        "lines per function, 95th percentile": sizes[int(0.95 * len(sizes))],
        "lines per function, longest": sizes[-1],
        "functions annotated": f"{sum(annotated) / len(annotated):.1%}",
        "public definitions documented": f"{sum(documented) / len(documented):.1%}",
    }
    text = "\n".join(f"{name:<36}{value:>8}" for name, value in rows.items())
    for name, where in sorted(named.items()):
        text += f"\n  {name}: {', '.join(where)}"
    return text


if __name__ == "__main__":
    package = Path(__file__).parents[1] / "adapterhub"
    print(report(Path(sys.argv[1]) if len(sys.argv) > 1 else package))
