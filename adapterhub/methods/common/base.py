"""The base class of all methods, the steps of their plans, their registry and their specs.

A spec is a method with its options, written in Python, YAML or on the command line:

    lora                         a name
    lora(rank=16)                a name with options
    lora(sites=[attn.q, attn.v]) lists need no quotes
    {lora: {rank: 16}}           the same as a mapping
    [prefix, lora(rank=4)]       several, composed

Methods and options have other names elsewhere, in peft, adapters and common scripts. An alias of an
option means the same as the option, for every value, and is accepted by each method that has the
option. The other names are refused, with an error that suggests the option.

Commands describe methods and check specs without torch, which takes seconds to import: method files
define modules and so import it. `catalogue.json` repeats the facts and options of their classes. It
is generated (`make catalogue`), and a test compares both.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import pkgutil
import typing
from abc import ABC
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from adapterhub.config.options import (
    OptionNames,
    from_dict,
    is_neutral,
    option,
    options_of,
    range_problems,
    to_dict,
)
from adapterhub.config.yaml import call_text, parse_calls, spec_error
from adapterhub.errors import ConfigError, FileError, one_line, spelled_like, unknown

if TYPE_CHECKING:
    from torch import Tensor, nn

    from adapterhub.anatomy.sites import Anatomy, Site
    from adapterhub.methods.common.site_module import SiteModule


T = TypeVar("T")

_ALIASES = {
    "rank": "r lora_r lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "length": "num_virtual_tokens prefix_length prompt_length",
    "size": "bottleneck_size bottleneck_dim adapter_size",
    "activation": "non_linearity",
    "middle": "encoder_hidden_size",
    "reparametrize": "prefix_projection",
    "block": "oft_block_size boft_block_size",
    "coefficients": "n_frequency",
    "pieces": "gralora_k",
    "hybrid": "hybrid_r",
    "factor": "decompose_factor",
    "strength": "delora_lambda",
    "group": "group_size",
}
ALIASES = {alias: option for option, names in _ALIASES.items() for alias in names.split()}

# For each name: its option ("" for none), and the suggestion. {sites} are the
# default sites of the method.
_MEANINGS = {
    "target_modules": ("sites", "sites=[{sites}]"),
    "modules": ("sites", "sites=[{sites}]"),
    "feedforward_modules": ("sites", "sites=[{sites}]"),
    "rank_pattern": ("ranks", "ranks={{attn.q: 4}}"),
    "layers_to_transform": ("layers", "layers=[0, 5]"),
    "leave_out": ("layers", "layers=[0, 5], the layers to adapt"),
    "scaling": ("scale", "scale=4"),
    "reduction_factor": ("size", "size=48, the width itself: the backbone's width / the factor"),
    "modules_to_save": ("", "no option: the task head trains with each adapter"),
    "task_type": ("", "task=classification, next to the method"),
    "inference_mode": ("", "no option: activate(model) without names is the bare backbone"),
    "bias": ("", "the method bitfit, also composed: [lora, bitfit]"),
    "use_rslora": ("rank", "the method rslora"),
    "use_dora": ("rank", "the method dora"),
    "init_lora_weights": ("rank", "the method pissa, for pissa"),
    "lr": ("", "train.learning_rate=1e-3, next to the method"),
    "learning_rate": ("", "train.learning_rate=1e-3, next to the method"),
    "epochs": ("", "train.epochs=3, next to the method"),
    "quantize": ("", "quantize=nf4, next to the method"),
}

_MEANT = {
    "adapter adapters bottleneck": (
        "pfeiffer and houlsby are sequential adapters, parallel is next to the layer"
    ),
    "seq-bn": "pfeiffer is this adapter",
    "double-seq-bn": "houlsby is this adapter",
    "par-bn": "parallel is this adapter",
    "qlora": "QLoRA is --method lora --quantize nf4 (in Python: load_backbone(quantize='nf4'))",
    "peft": "peft is a library; its usual method is lora",
    "sft": "any method does supervised fine-tuning: lora, with task=causal-lm",
    "dpo ipo orpo cpo simpo kto": (
        "preferences are a task: --task preference, with lora or any other method"
    ),
    "lora+ loraplus": "lora-plus is this method",
    "prefix-tuning": "prefix is this method",
    "prompt-tuning soft-prompt": "prompt is this method",
    "ptuning": "p-tuning is this method",
    "p-tuning-v2": "prefix is this method",
    "(ia)3": "ia3 is this method",
    "ln-tuning layernorm": "norms is this method",
    "bias": "bitfit is this method",
    "linear linear-probe probe": "head is this method: a classifier on the frozen backbone",
    "finetune fine-tune fine-tuning full-finetuning full-fine-tuning ft": "full trains all weights",
    "none": "full trains all weights, head only a classifier on the frozen backbone",
    "fusion": "adapterfusion is this method",
    "bone": "miss is this method",
    "oftv2": "oft is this method",
    "mam-adapter": "mam is this method",
    "ulmfit": "unfreeze is this method",
    "elmo": "scalar-mix is this method",
}
METHOD_MEANINGS = {name: text for names, text in _MEANT.items() for name in names.split()}


@lru_cache(maxsize=256)
def option_names(cls: type[Any]) -> OptionNames:
    """Return the names of a method's options, including names from other libraries."""
    own = OptionNames(cls, {}, {})
    sites = ", ".join(getattr(cls, "sites", ()))
    meanings = {
        name: text.format(sites=sites)
        for name, (option, text) in _MEANINGS.items()
        if not option or own.own_name(option)
    }
    aliases = {alias: option for alias, option in ALIASES.items() if own.own_name(option)}
    return OptionNames(cls, aliases, meanings)


def read_method_options(cls: type[T], name: str, options: Mapping[str, Any]) -> T:
    """Build a dataclass of a method's options; names of other libraries are accepted.

    Raises:
        ConfigError: unknown options, with suggestions, or invalid values.
    """
    kind: Any = cls  # mypy does not take a type variable for hashable
    names = option_names(kind)
    return from_dict(cls, names.normal_form(options), where=name, suggest=names.suggest)


def unknown_method(name: str, methods: Iterable[str]) -> ConfigError:
    """Build the error for an unknown method, with the meaning of the name, or the nearest one."""
    meaning = METHOD_MEANINGS.get(name.lower().replace("_", "-"), "")
    if meaning:
        return ConfigError(f"unknown method {name!r}: {meaning}", hint="adapterhub methods")
    return unknown("method", name, sorted(methods), hint="adapterhub methods")


Start = Literal["identity", "near-identity", "paper"]
Layers = str | int | tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """A module to add at a site; the module's base class must fit the kind of site."""

    site: Site
    module: SiteModule


@dataclass(frozen=True)
class Unfrozen:
    """A backbone parameter to train, by its path in the model.

    It trains from stage `stage` of the method on, at `rate` times the method's learning rate. A
    tied parameter is replaced wherever the model uses it, or if `untied` only at this path.
    """

    path: str
    stage: int = 0
    rate: float = 1.0
    untied: bool = False


@dataclass(frozen=True)
class StageSchedule:
    """Schedule of the stages of a method.

    A stage begins after every `epochs` epochs or, without these, after `patience` consecutive
    evaluations without a new best result; `equal` stages share the steps of the run.
    """

    epochs: int | None = 1
    patience: int = 1
    equal: bool = False


PlanStep = Placement | Unfrozen


class TrainedSource(NamedTuple):
    """A trained adapter that another one is built from: its methods, and its tensors by file name.

    The names are the ones in adapter files: `encoder.0.attn.q.lora.A`.
    """

    name: str
    methods: tuple[Method, ...]
    tensors: Mapping[str, Tensor]


class Method(ABC):
    """The base class of all methods: a subclass is a frozen dataclass of options.

    Attributes:
        name: the registered name.
        paper: authors, year and URL.
        summary: one line for `adapterhub methods`.
        start: the outputs of the adapted backbone before training: equal to the backbone's
            (identity), almost equal (near-identity), or as in the paper (paper).
        learning_rate: AdamW's default for the method's parameters.
        schedule: the default learning rate schedule, if the paper prescribes one.
        data_start: the default start from the data (`train.init`), if the method needs one.
        trains_backbone: whether the plan unfreezes backbone parameters (`Unfreezing`).
        sized_by: the option that determines the number of parameters, if any.
        training_options: the options that affect training, but not the outputs of a trained
            adapter.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    start: ClassVar[Start] = "identity"
    learning_rate: ClassVar[float] = 1e-3
    schedule: ClassVar[str | None] = None
    data_start: ClassVar[str | None] = None
    trains_backbone: ClassVar[bool] = False
    sized_by: ClassVar[str | None] = None
    training_options: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if problems := range_problems(self):
            raise ConfigError(
                f"options of {self.name} are out of range",
                offenders=problems,
                expected="numbers in range",
            )

    @classmethod
    def example(cls) -> Method:
        """Return the method with options that work on any backbone; by default with defaults."""
        return cls()

    def decomposes_again(self) -> bool:
        """Return whether loading it decomposes weights: other values have other components."""
        return False

    def sources(self) -> tuple[str, ...]:
        """Return the trained adapters that are still needed to build this method.

        Returns:
            Names of attached adapters, or folders; () for most methods, and after `built_from`.
        """
        return ()

    def with_sources(self, sources: Sequence[str]) -> Method | None:
        """Return the method with the adapters that it is built from; None if not needed."""
        return None

    def built_from(self, sources: Sequence[TrainedSource]) -> tuple[Method, dict[str, Tensor]]:
        """Build the method from trained adapters.

        Returns:
            The method with the adapters in its options, and the tensors that it copies from them,
            under its own names.
        """
        raise NotImplementedError(f"{self.name} is not built from other adapters")

    def parts(self) -> tuple[Method, ...]:
        """Return the methods that this one is composed of; itself, if it is not a composition."""
        return (self,)

    def plan(self, anatomy: Anatomy) -> Iterator[PlanStep]:
        """Yield the modules to add and the backbone parameters to train.

        Raises:
            SiteError: the backbone lacks sites that the options name.
        """
        raise NotImplementedError(f"{self.name} has neither parts nor a plan")

    def stage_schedule(self) -> StageSchedule | None:
        """Return when the next stage of the plan begins; None if it has only one stage."""
        return None

    def rate(self, name: str) -> float:
        """Return the learning rate factor of a parameter, by its name in adapter files."""
        return 1.0

    def count(self, anatomy: Anatomy) -> int:
        """Compute the number of trainable parameters by formula, without the task head."""
        return sum(part.count(anatomy) for part in self.parts())

    def penalty(self, modules: Sequence[Any]) -> Tensor | None:
        """Return the term added to the loss of a step, or None.

        `modules` are the modules of this method at all of its sites.
        """
        return None

    def stepped(self, modules: Sequence[Any], done: float) -> None:  # noqa: B027
        """Change the modules after a step of the optimizer; their gradients are still there.

        `done` is the completed share of the run, including this step. State for later steps is in
        buffers of modules, so that an interrupted run resumes bit-identically.
        """

    def ready(self, done: float) -> bool:
        """Return whether an evaluation at this share of a run may count as the best one."""
        return True

    @classmethod
    def takes_steps(cls) -> bool:
        """Return whether the method takes part in the steps of training."""
        return (cls.penalty, cls.stepped) != (Method.penalty, Method.stepped)

    def inference_form(self) -> Method:
        """Return the method to save: without parameters that only training needs."""
        return self

    def options(self) -> dict[str, Any]:
        """Return all options by name, for specs and manifests."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)  # type: ignore[arg-type]
        }


class Unfreezing(Method):
    """The base class of methods that train backbone parameters instead of new modules."""

    trains_backbone = True

    def plan(self, anatomy: Anatomy) -> Iterator[Unfrozen]:
        """Yield the parameters of `paths`, all in stage 0 and at the same learning rate."""
        return map(Unfrozen, self.paths(anatomy))

    def paths(self, anatomy: Anatomy) -> Iterable[str]:
        """Return the paths of the parameters to train; implement either this or `plan`.

        Raises:
            SiteError: the backbone lacks all of them.
        """
        raise NotImplementedError(f"{self.name} has neither paths nor a plan")

    def count(self, anatomy: Anatomy) -> int:
        """Sum the sizes of the parameters."""
        parameters = anatomy.parameters(every_use=True)
        return sum(parameters[step.path].numel() for step in self.plan(anatomy))


_METHODS = "adapterhub.methods"


def method_modules() -> tuple[str, ...]:
    """List the files that define methods, without importing them."""
    files = pkgutil.iter_modules([str(Path(__file__).parents[1])])
    return tuple(sorted(file.name for file in files if not file.ispkg))


class MethodRegistry(MutableMapping[str, type[Method]]):
    """The methods by name. Their modules import torch, so they are imported on first use."""

    def __init__(self) -> None:
        self._registered: dict[str, type[Method]] = {}
        self._complete = False

    def _all(self) -> dict[str, type[Method]]:
        if not self._complete:
            own = dict(self._registered)  # from the caller, who may replace one of ours
            for module in method_modules():
                importlib.import_module(f"{_METHODS}.{module}")
            self._registered |= own
            self._complete = True
        return self._registered

    def imported(self) -> dict[str, type[Method]]:
        """Return the methods registered so far, without importing others."""
        return dict(self._registered)

    def __repr__(self) -> str:
        return repr(self._all())

    def __getitem__(self, name: str) -> type[Method]:
        return self._all()[name]

    def __setitem__(self, name: str, method: type[Method]) -> None:
        self._registered[name] = method

    def __delitem__(self, name: str) -> None:
        del self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


METHODS = MethodRegistry()
"""The classes of all methods by name; a file of methods is imported when it is used."""

M = TypeVar("M", bound=type[Method])


def register_method(cls: M) -> M:
    """Register a method under its name: a class decorator."""
    METHODS[cls.name] = cls
    return cls


def method_class(name: str) -> type[Method]:
    """Return the method registered under a name.

    Raises:
        ConfigError: no such method; the error suggests the nearest and lists all.
    """
    name = name if name in METHODS else spelled_like(name, METHODS)
    if name not in METHODS:
        raise unknown_method(name, METHODS)
    return METHODS[name]


def activation_module(name: str) -> nn.Module:
    """Return an activation function by its transformers name.

    Raises:
        ConfigError: an unknown name.
    """
    from transformers.activations import ACT2FN  # slow to import

    if name not in ACT2FN:
        expected = "a transformers name: relu, gelu, silu, tanh, ..."
        raise unknown("activation", name, ACT2FN, expected=expected)
    module: nn.Module = ACT2FN[name]
    return module


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
        values = {ours: getattr(config, own, None) for own, ours in _PEFT_OPTIONS.items()}
        used = {n: v for n, v in values.items() if n in fields and v is not None}
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
        values = option_names(type(method)).normal_form(options)
        return (build_method(method.name, to_dict(method) | values),)
    names = ", ".join(method.name for method in methods)
    having = [f"{name}: of {', '.join(_methods_with(name)) or 'no method'}" for name in options]
    raise ConfigError(
        f"options ({words}) for {names}",
        offenders=having,
        expected="options next to the name of one method",
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
    name = name if name in described else spelled_like(name, described)
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
    results = []
    for call in method_calls(spec):
        if isinstance(call, Method):
            results.append((call.name, to_dict(call)))
            continue
        name, options = call
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"options of {name} are {options!r}", expected="a mapping of option to value"
            )
        described = described_methods()
        name = name if name in described else spelled_like(name, described)
        cls: type[Any] = described_method(name).options
        results.append((name, to_dict(read_method_options(cls, name, options))))
    return results
