"""What commands say about methods, and the check of specs, without importing torch.

Method files define modules and so import torch, which takes seconds. `_catalogue.py` repeats the
facts and options of their classes; it is generated (`make catalogue`), and a test compares both.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from adapterhub.config.options import option, options_of, to_dict
from adapterhub.errors import ConfigError, spelled_like
from adapterhub.methods._base import METHODS, Method, method_modules
from adapterhub.methods._catalogue import CATALOGUE
from adapterhub.methods._other_names import read_method_options, unknown_method
from adapterhub.methods._spec import Spec, method_calls


@dataclasses.dataclass(frozen=True)
class DescribedMethod:
    """The facts of a method, and for each option its type, default and help text."""

    module: str
    summary: str
    paper: str
    learning_rate: float
    schedule: str | None
    fields: Mapping[str, tuple[Any, Any, str]]

    @functools.cached_property
    def options(self) -> type:
        """A dataclass with the options of the method, without its checks and modules."""
        fields = [(name, kind, option(*rest)) for name, (kind, *rest) in self.fields.items()]
        return dataclasses.make_dataclass("options", fields, frozen=True)


@functools.cache
def describe(method: type[Method]) -> DescribedMethod:
    """Describe a method by its class."""
    hints = typing.get_type_hints(method)
    return DescribedMethod(
        module=method.__module__.rpartition(".")[2],
        summary=method.summary,
        paper=method.paper,
        learning_rate=method.learning_rate,
        schedule=method.schedule,
        fields={o.name: (hints[o.name], o.default, o.help) for o in options_of(method)},
    )


def described_methods() -> dict[str, DescribedMethod]:
    """Return all methods by name; if the catalogue lacks a file, all are imported."""
    described = {name: DescribedMethod(*facts) for name, facts in CATALOGUE.items()}
    is_complete = {method.module for method in described.values()} == set(method_modules())
    classes = METHODS.imported() if is_complete else METHODS
    return described | {name: describe(method) for name, method in classes.items()}


def described_method(name: str) -> DescribedMethod:
    """Return the method with this name.

    Raises:
        ConfigError: no such method; the error suggests the nearest and lists all.
    """
    described = described_methods()
    name = spelled_like(name, described)
    if name not in described:
        raise unknown_method(name, described)
    return described[name]


def check_spec(spec: Spec) -> None:
    """Check the names of a spec, and the names and types of its options; values, when it is built.

    Raises:
        ConfigError: an unknown method or option, a value of a wrong type, or an invalid spec.
    """
    spec_options(spec)


def spec_options(spec: Spec) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and all options of each method of a spec.

    Raises:
        ConfigError: as in `check_spec`.
    """
    found = []
    for call in method_calls(spec):
        if isinstance(call, Method):
            found.append((call.name, to_dict(call)))
            continue
        name, options = call
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"options of {name} are {options!r}", expected="a mapping of option to value"
            )
        name = spelled_like(name, described_methods())
        cls: type[Any] = described_method(name).options
        found.append((name, to_dict(read_method_options(cls, name, options))))
    return found
