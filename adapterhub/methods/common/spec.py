"""Method specs: methods with options, written in Python, YAML or on the command line.

lora                         a name
lora(rank=16)                a name with options
lora(sites=[attn.q, attn.v]) lists need no quotes
{lora: {rank: 16}}           the same as a mapping
[prefix, lora(rank=4)]       several, composed

Commands describe methods and check specs without torch, which takes seconds to import: method files
define modules and so import it. `catalogue.json` repeats the
facts and options of their classes; it is generated (`make catalogue`), and a test compares both.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapterhub.config.options import is_neutral, option, options_of, to_dict
from adapterhub.config.spec import call_text, parse_calls, spec_error
from adapterhub.errors import ConfigError, FileError, one_line, spelled_like
from adapterhub.methods.common.base import (
    METHODS,
    Method,
    method_class,
    method_modules,
    option_names,
    read_method_options,
    unknown_method,
)

EXAMPLES = "lora, lora(rank=16), {lora: {rank: 16}}, or a list of these"
Spec = str | Method | type[Method] | Mapping[str, Any] | Sequence[Any]
"""A method with options: `"lora"`, `"lora(rank=16)"`, `{"lora": {"rank": 16}}`, `LoRA(rank=16)`.

A list of these composes them.
"""


def parse_methods(spec: Spec) -> tuple[Method, ...]:
    """Parse a spec into methods with their options.

    Raises:
        ConfigError: an unknown method or option (the error suggests the nearest name), or an
            invalid spec.
    """
    return tuple(
        call if isinstance(call, Method) else build_method(*call) for call in method_calls(spec)
    )


def method_calls(spec: Spec) -> list[Method | tuple[str, Any]]:
    """Return the methods in a spec: objects unchanged, others as name and options.

    Raises:
        ConfigError: an invalid spec; names and options are not checked.
    """
    if isinstance(spec, Method):
        return [spec]
    if isinstance(spec, type) and issubclass(spec, Method):
        return [spec()]
    if hasattr(spec, "peft_type"):
        return [_of_peft(spec)]
    if isinstance(spec, str):
        return [*parse_calls(spec, "method", EXAMPLES)]
    if isinstance(spec, Mapping) and spec:
        return [(name, options or {}) for name, options in spec.items()]
    if isinstance(spec, Sequence):
        calls = [call for item in spec for call in method_calls(item)]
        if calls:
            return calls
    raise spec_error(spec, "method", EXAMPLES)


def build_method(name: str, options: Mapping[str, Any]) -> Method:
    """Build one method from its name and options.

    Raises:
        ConfigError: an unknown method or option, or an invalid value.
    """
    cls = method_class(name)
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"options of {name} are {options!r}", expected="a mapping of option to value"
        )
    return read_method_options(cls, name, options)


_PEFT_OPTIONS = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}
_PEFT_KINDS = {"use_rslora": "rslora", "use_dora": "dora"}
# Options that do not affect the trained weights or their training.
_PEFT_RECORDS = frozenset(
    {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path",
     "revision", "inference_mode", "runtime_config", "fan_in_fan_out", "megatron_core"}
)  # fmt: skip


def _of_peft(config: Any) -> tuple[str, dict[str, Any]]:
    """Translate a configuration of peft to a method: LoRA, rsLoRA or DoRA at named modules.

    Without `target_modules` and `target_parameters`, the sites are the method's own default.

    Raises:
        ConfigError: the configuration is for another method, or has options without an equivalent;
            the error suggests a spec.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    kinds = [ours for own, ours in _PEFT_KINDS.items() if getattr(config, own, False)]
    name = kinds[0] if kinds else kind.replace("_tuning", "")
    hint = "adapterhub methods lists ours; a saved adapter of peft is read by adapterhub import"
    used: dict[str, Any] = {}
    if name in METHODS:
        fields = {option.name for option in options_of(METHODS[name])}
        given = {ours: getattr(config, own, None) for own, ours in _PEFT_OPTIONS.items()}
        used = {n: v for n, v in given.items() if n in fields and v is not None}
        targets = getattr(config, "target_modules", None)
        parameters = [*map(_weight, getattr(config, "target_parameters", None) or ())]
        if isinstance(targets, Collection) and not isinstance(targets, str):
            used["sites"] = sorted({*targets, *parameters})
        elif parameters:
            used["sites"] = sorted(parameters)
        hint = f"attach(model, {call_text(name, used)!r})"
    unread = _unread_of_peft(config) if kind == "lora" and len(kinds) < 2 else ["peft_type"]
    if not unread:
        return name, used
    raise ConfigError(
        f"{type(config).__name__} is a configuration of peft that is not translated",
        offenders=[f"{own}: {one_line(str(getattr(config, own, '')), 80)}" for own in unread],
        expected=EXAMPLES,
        hint=hint,
    )


def _weight(parameter: str) -> str:
    """Return the path of a parameter's site; a parameter without a module belongs to experts."""
    path = parameter.removesuffix(".weight")
    return path if "." in parameter else f"experts.{path}"


def _unread_of_peft(config: Any) -> list[str]:
    """Return the options of a LoRA configuration that are neither translated nor the default."""
    usual = type(config)()
    read = {*_PEFT_OPTIONS, *_PEFT_KINDS, *_PEFT_RECORDS, "target_parameters"}
    if not isinstance(config.target_modules, str):  # "all-linear", or a regular expression
        read.add("target_modules")
    names = [field.name for field in dataclasses.fields(config) if field.name not in read]
    return [each for each in names if getattr(config, each) != getattr(usual, each)]


def with_options(spec: Spec, options: Mapping[str, Any]) -> tuple[Method, ...]:
    """Parse a spec of one method, and options for it: "lora", {"rank": 4}.

    Raises:
        ConfigError: several methods or a method object; otherwise as `parse_methods`.
    """
    methods = parse_methods(spec)
    if not options:
        return methods
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    if len(methods) == 1 and not isinstance(spec, Method):
        (method,) = methods
        given = option_names(type(method)).normal_form(options)
        return (build_method(method.name, to_dict(method) | given),)
    names = ", ".join(method.name for method in methods)
    having = [f"{name}: of {', '.join(_methods_with(name)) or 'no method'}" for name in options]
    raise ConfigError(
        f"options ({words}) for {names}",
        offenders=having,
        expected="options beside the name of one method",
        hint='attach(model, ["lora(rank=4)", "prefix(length=10)"]) for several, '
        "or the options in the method object: LoRA(rank=4)",
    )


def method_text(method: Method) -> str:
    """Write a method as a spec, with the options that differ from their defaults."""
    values = to_dict(method)
    defaults = to_dict({option.name: option.default for option in options_of(type(method))})
    return call_text(method.name, {k: v for k, v in values.items() if v != defaults[k]})


def dump_methods(methods: Sequence[Method]) -> tuple[dict[str, Any], ...]:
    """Convert methods to their normal form: one mapping {name: all options} each."""
    return tuple({method.name: to_dict(method)} for method in methods)


def restore_methods(
    saved: Sequence[Mapping[str, Mapping[str, Any]]], source: str
) -> tuple[Method, ...]:
    """Restore the methods of an adapter that any version of adapterhub saved.

    Options that this version lacks are ignored if they are null, false or empty.

    The methods are in their normal form; `source` names their origin in errors.

    Raises:
        FileError: methods or options of a later version; lists all of them.
        ConfigError: an invalid value.
    """
    specs = [(name, options) for spec in saved for name, options in spec.items()]
    if missing := [line for name, options in specs for line in _missing(name, options)]:
        raise FileError(
            f"{source} needs a newer adapterhub",
            offenders=missing,
            expected="methods and options of this version: adapterhub methods",
            hint="pip install --upgrade adapterhub",
        )
    return tuple(
        build_method(name, {key: options[key] for key in options.keys() & _option_names(name)})
        for name, options in specs
    )


def _missing(name: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Describe the features of a saved method that this version lacks."""
    if name not in METHODS:
        yield f"the method {name!r}"
        return
    option_names = _option_names(name)
    for key, value in options.items():
        if key not in option_names and not is_neutral(value):
            yield f"the option {key!r} of {name}"


def _methods_with(option: str) -> list[str]:
    """List the methods that have an option, under this name or an alias."""
    return sorted(name for name, cls in METHODS.items() if option_names(cls).own_name(option))


def _option_names(name: str) -> set[str]:
    return {option.name for option in options_of(METHODS[name])}


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


CATALOGUE = Path(__file__).parents[1] / "catalogue.json"


@functools.cache
def catalogue() -> dict[str, DescribedMethod]:
    """Read the generated facts and options of the methods that ship, by name."""
    return {name: _read(facts) for name, facts in json.loads(CATALOGUE.read_bytes()).items()}


def _read(facts: dict[str, Any]) -> DescribedMethod:
    options = facts.pop("options")
    kinds = {name: _type(text) for name, (text, *_) in options.items()}
    fields = {
        name: (kinds[name], _default(text, default), help_text)
        for name, (text, default, help_text) in options.items()
    }
    return DescribedMethod(**facts, fields=fields)


@functools.cache
def _type(text: str) -> Any:
    holder = type("holder", (), {"__annotations__": {"option": text}})
    return typing.get_type_hints(holder, vars(typing))["option"]


def _default(text: str, default: Any) -> Any:  # JSON lacks tuples
    return tuple(default) if isinstance(default, list) and "tuple" in text else default


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
    described = catalogue()
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
