"""Method specs: one way to name methods with options, in Python, YAML and on the command line.

lora                         a name
lora(rank=16)                a name with options
{lora: {rank: 16}}           the same as a mapping
[prefix, lora(rank=4)]       several, composed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adapterhub.config.options import from_dict, is_neutral, options_of, to_dict
from adapterhub.config.spec import parse_calls, spec_error
from adapterhub.errors import ConfigError, FileError
from adapterhub.methods._base import METHODS, Method, method_class

EXAMPLES = "lora, lora(rank=16), {lora: {rank: 16}}, or a list of these"
Spec = str | Method | Mapping[str, Any] | Sequence[Any]


def parse_methods(spec: Spec) -> tuple[Method, ...]:
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
        return tuple(build_method(name, options or {}) for name, options in spec.items())
    if isinstance(spec, Sequence):
        methods = tuple(method for item in spec for method in parse_methods(item))
        if methods:
            return methods
    raise spec_error(spec, "method", EXAMPLES)


def build_method(name: str, options: Mapping[str, Any]) -> Method:
    """One method from its name and options, strictly."""
    cls = method_class(name)
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"options of {name} are {options!r}", expected="a mapping of option to value"
        )
    return from_dict(cls, options, where=name)


def dump_methods(methods: Sequence[Method]) -> tuple[dict[str, Any], ...]:
    """The normal form of methods: one {name: all options} each."""
    return tuple({method.name: to_dict(method)} for method in methods)


def restore_methods(
    saved: Sequence[Mapping[str, Mapping[str, Any]]], source: str
) -> tuple[Method, ...]:
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
        if name in known and option not in known[name] and not is_neutral(value)
    ]
    if unknown:
        raise FileError(
            f"{source} needs a newer adapterhub",
            offenders=unknown,
            expected="methods and options of this version: adapterhub methods",
            hint="pip install --upgrade adapterhub",
        )
    return tuple(
        build_method(name, {option: options[option] for option in options.keys() & known[name]})
        for spec in saved
        for name, options in spec.items()
    )


def _parse_text(text: str) -> tuple[Method, ...]:
    return tuple(
        build_method(name, options) for name, options in parse_calls(text, "method", EXAMPLES)
    )
