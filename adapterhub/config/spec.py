"""The call syntax of specs: `lora`, `lora(rank=16)`, `seq2seq(metric=rouge)`."""

from __future__ import annotations

import ast
from typing import Any

from adapterhub.errors import ConfigError

MAX_TEXT = 4000  # characters: Python's parser takes memory by nesting


def calls(text: str, what: str, examples: str) -> list[tuple[str, dict[str, Any]]]:
    """A comma-separated list of `name` or `name(option=value)`, by Python's grammar for literals.

    Raises:
        ConfigError: it cannot be read; the error says `what` it should be, and shows `examples`.
    """
    unreadable = _unreadable(text, what, examples)
    names = text.replace("-", "_MINUS_")
    if len(names) > MAX_TEXT:
        raise unreadable
    try:
        tree = ast.parse(f"({names},)", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # as deep as it is long
        raise unreadable from error
    if not isinstance(tree, ast.Tuple):  # the text closed the bracket itself
        raise unreadable
    return [_call(node, unreadable) for node in tree.elts]


def _call(node: ast.expr, unreadable: ConfigError) -> tuple[str, dict[str, Any]]:
    call = node if isinstance(node, ast.Call) else None
    name = call.func if call else node
    if not isinstance(name, ast.Name) or (call and call.args):
        raise unreadable
    keywords = call.keywords if call else []
    options = {str(k.arg): _literal(k.value, unreadable) for k in keywords}
    return name.id.replace("_MINUS_", "-"), options


def _literal(node: ast.expr, unreadable: ConfigError) -> Any:
    try:
        source = ast.unparse(node).replace("_MINUS_", "-")
        return ast.literal_eval(source)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise unreadable from error
    except ValueError as error:
        if isinstance(node, ast.Name):
            return {"true": True, "false": False, "null": None}.get(source, source)
        raise unreadable from error


def _unreadable(spec: object, what: str, examples: str) -> ConfigError:
    return ConfigError(
        f"the {what} {repr(spec)[:200]} cannot be read",
        expected=examples,
    )
