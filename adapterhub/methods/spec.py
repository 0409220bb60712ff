"""Method specs: one way to name methods with options, in Python, YAML and on the command line.

lora                         a name
lora(rank=16)                a name with options
{lora: {rank: 16}}           the same as a mapping
[prefix, lora(rank=4)]       several, composed
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from adapterhub.config import from_dict, options_of, says_nothing, to_dict
from adapterhub.errors import ConfigError, FileError
from adapterhub.methods.base import METHODS, Method, method_class

EXAMPLES = "lora, lora(rank=16), {lora: {rank: 16}}, or a list of these"
MAX_TEXT = 4000  # characters: Python's parser takes memory by nesting
Spec = str | Method | Mapping[str, Any] | Sequence[Any]


def parse(spec: Spec) -> tuple[Method, ...]:
    """The methods that a spec names, with their options.

    Raises:
        ConfigError: an unknown method or option (with the nearest name), or a spec that cannot be
            read.
    """
    if isinstance(spec, Method):
        return (spec,)
    if isinstance(spec, str):
        return _parse_text(spec)
    if isinstance(spec, Mapping):
        return tuple(build(name, options or {}) for name, options in spec.items())
    if isinstance(spec, Sequence):
        methods = tuple(method for item in spec for method in parse(item))
        if methods:
            return methods
    raise _unreadable(spec, "method", EXAMPLES)


def build(name: str, options: Mapping[str, Any]) -> Method:
    """One method from its name and options, strictly."""
    cls = method_class(name)
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"options of {name} are {options!r}", expected="a mapping of option to value"
        )
    return from_dict(cls, options, where=name)


def dump(methods: Sequence[Method]) -> tuple[dict[str, Any], ...]:
    """The normal form of methods: one {name: all options} each."""
    return tuple({method.name: to_dict(method)} for method in methods)


def restore(saved: Sequence[Mapping[str, Mapping[str, Any]]], source: str) -> tuple[Method, ...]:
    """The methods of a saved adapter, of whatever version of adapterhub.

    An option that this version does not know is left out where it is null, false or empty.

    Raises:
        FileError: a later version's method, or an option that says something, all of them; `source`
            names the adapter. ConfigError: values that no version takes.
    """
    known = {
        name: {option.name for option in options_of(METHODS[name])}
        for spec in saved
        for name in spec
        if name in METHODS
    }
    unknown = [f"the method {name!r}" for spec in saved for name in spec if name not in known]
    unknown += [
        f"the option {option!r} of {name}"
        for spec in saved
        for name, options in spec.items()
        for option, value in options.items()
        if name in known and option not in known[name] and not says_nothing(value)
    ]
    if unknown:
        raise FileError(
            f"{source} needs a newer adapterhub",
            offenders=unknown,
            expected="methods and options of this version: adapterhub methods",
            hint="pip install --upgrade adapterhub",
        )
    return tuple(
        build(name, {option: options[option] for option in options.keys() & known[name]})
        for spec in saved
        for name, options in spec.items()
    )


def _parse_text(text: str) -> tuple[Method, ...]:
    return tuple(build(name, options) for name, options in calls(text, "method", EXAMPLES))


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
