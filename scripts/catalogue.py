"""Write what is listed of the methods, from their classes: `make catalogue`.

That is adapterhub/methods/catalogue.json, the classes that adapterhub/__init__.py exports, the
number of methods in the documents, and the schema of recipes.
"""

from __future__ import annotations

import json
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

import tables
from held_methods import written

from adapterhub.methods import METHODS, Method
from adapterhub.methods.common.base import describe
from adapterhub.recipe.recipe import recipe_schema

PACKAGE = Path(__file__).parents[1] / "adapterhub"
FILE, EXPORTS = PACKAGE / "methods" / "catalogue.json", PACKAGE / "__init__.py"
SCHEMA = PACKAGE.parent / "recipes" / "schema.json"
_IMPORTS = re.compile(r"(    from adapterhub\.methods\.[a-z]\w* import \w+ as \w+\n)+")
_LAZY = re.compile(r'(    "\w+": "methods\.[a-z]\w*",\n)+(?=}\n)')


def annotation(hint: Any) -> str:
    """Return a type as Python writes it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is type(None) or hint is Ellipsis:
        return {Any: "Any", type(None): "None", Ellipsis: "..."}[hint]
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(map(annotation, args))
    return f"{origin.__name__}[{', '.join(map(annotation, args))}]" if origin else hint.__name__


def source() -> str:
    """Return the text of the catalogue: the facts of each method, and [type, default, help]."""
    return json.dumps({name: facts(cls) for name, cls in sorted(METHODS.items())}, indent=1) + "\n"


def facts(cls: type[Method]) -> dict[str, Any]:
    """Return what the catalogue has of one method."""
    values = vars(describe(cls)).copy()
    fields = values.pop("fields")
    options = {name: [annotation(kind), *rest] for name, (kind, *rest) in fields.items()}
    return {**values, "options": options}


def exports(text: str) -> str:
    """Return the source of adapterhub/__init__.py with the classes of the methods in both lists."""
    classes = {cls.__name__: cls.__module__ for cls in METHODS.values()}
    by_module = sorted((module, name) for name, module in classes.items())
    lines = [f"    from {module} import {name} as {name}\n" for module, name in by_module]
    lazy = [
        f'    "{name}": "{module.removeprefix("adapterhub.")}",\n'
        for name, module in sorted(classes.items())
    ]
    return _LAZY.sub("".join(lazy), _IMPORTS.sub("".join(lines), text))


def main() -> None:
    """Write the files; print those that change."""
    texts = {FILE: source(), EXPORTS: exports(EXPORTS.read_text(encoding="utf-8"))}
    texts[SCHEMA] = json.dumps(recipe_schema(), indent=2) + "\n"
    for page in tables.pages():
        texts[page] = written(tables.counted(page.read_text(encoding="utf-8")))
    for file, text in sorted(texts.items()):
        if file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(file.relative_to(PACKAGE.parent))


if __name__ == "__main__":
    main()
