"""Write adapterhub/methods/_catalogue.py from the classes of the methods: `make catalogue`."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

from adapterhub.methods import METHODS
from adapterhub.methods._described import DescribedMethod, describe

FILE = Path(__file__).parents[1] / "adapterhub" / "methods" / "_catalogue.py"
HEAD = '''"""The facts and options of all methods. Generated: do not edit, run `make catalogue`."""
# ruff: noqa
# fmt: off

from typing import Any, Literal

# name: (module, summary, paper, learning rate, schedule, {option: (type, default, help)})
CATALOGUE: dict[str, tuple[str, str, str, float, str | None, dict[str, tuple[Any, Any, str]]]] = {
'''


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


def entry(name: str, method: DescribedMethod) -> str:
    """Return the lines of one method."""
    facts = (method.module, method.summary, method.paper, method.learning_rate, method.schedule)
    lines = [f"    {name!r}: ({', '.join(map(repr, facts))}, {{"]
    for option, (kind, default, help_text) in method.fields.items():
        lines.append(f"        {option!r}: ({annotation(kind)}, {default!r}, {help_text!r}),")
    return "\n".join([*lines, "    }),\n"])


def source() -> str:
    """Return the source of the catalogue."""
    methods = sorted(METHODS.items())
    return HEAD + "".join(entry(name, describe(method)) for name, method in methods) + "}\n"


if __name__ == "__main__":
    FILE.write_text(source(), encoding="utf-8")
