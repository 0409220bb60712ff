"""The call syntax of method and task specs: `lora`, `lora(rank=16)`, `seq2seq(metric=rouge)`."""

from __future__ import annotations

import ast
import re
from typing import Any

from adapterhub.errors import ConfigError

MAX_CHARACTERS = 4000  # Python's parser needs memory proportional to the nesting depth
_HYPHENATED = re.compile(r"\b[A-Za-z_]\w*(?:-\w+)+")  # causal-lm, which is no name in Python


def parse_calls(text: str, kind: str, examples: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse a comma-separated list of `name` or `name(option=value)`.

    Values are Python literals, bare words (strings), `true`, `false` or `null`.

    Args:
        text: the spec.
        kind: "method" or "task", for the error.
        examples: valid specs, for the error.

    Returns:
        One (name, options) pair per call, in order.

    Raises:
        ConfigError: the text is not such a list.
    """
    error = spec_error(text, kind, examples)
    text = _HYPHENATED.sub(lambda word: word[0].replace("-", "_MINUS_"), text)
    if len(text) > MAX_CHARACTERS:
        raise error
    try:
        tree = ast.parse(f"({text},)", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        raise error from cause
    if not isinstance(tree, ast.Tuple):  # the text closes the added parenthesis
        raise error
    return [_parse_call(node, error) for node in tree.elts]


def spec_error(spec: object, kind: str, examples: str) -> ConfigError:
    """Build the error for an invalid spec.

    Args:
        spec: the invalid spec, of any type.
        kind: "method" or "task".
        examples: valid specs.

    Returns:
        The error, for the caller to raise.
    """
    return ConfigError(f"invalid {kind} spec {repr(spec)[:200]}", expected=examples)


def _parse_call(node: ast.expr, error: ConfigError) -> tuple[str, dict[str, Any]]:
    call = node if isinstance(node, ast.Call) else None
    name = call.func if call else node
    if not isinstance(name, ast.Name) or (call and call.args):
        raise error
    keywords = call.keywords if call else []
    options = {str(k.arg): _parse_value(k.value, error) for k in keywords}
    return name.id.replace("_MINUS_", "-"), options


def _parse_value(node: ast.expr, error: ConfigError) -> Any:
    try:
        source = ast.unparse(node).replace("_MINUS_", "-")
        return ast.literal_eval(source)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as cause:
        raise error from cause
    except ValueError as cause:
        if isinstance(node, ast.Name):
            return {"true": True, "false": False, "null": None}.get(source, source)
        raise error from cause
