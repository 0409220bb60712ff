"""The base class of all methods, the steps of their plans, and the registry of methods.

Methods and options have other names elsewhere, in peft, adapters and common scripts. An alias of an
option means the same as the option, for every value, and is accepted by each method that has the
option. The other names are refused, with an error that suggests the option.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from adapterhub.config.options import OptionNames, from_dict, range_problems
from adapterhub.errors import ConfigError, spelled_like, unknown

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
    "reduction_factor": ("size", "size=48, the width itself: that of the backbone / the factor"),
    "modules_to_save": ("", "no option: the task head trains with each adapter"),
    "task_type": ("", "task=classification, beside the method"),
    "inference_mode": ("", "no option: activate(model) without names is the bare backbone"),
    "bias": ("", "the method bitfit, also composed: [lora, bitfit]"),
    "use_rslora": ("rank", "the method rslora"),
    "use_dora": ("rank", "the method dora"),
    "init_lora_weights": ("rank", "the method pissa, for pissa"),
    "lr": ("", "train.learning_rate=1e-3, beside the method"),
    "learning_rate": ("", "train.learning_rate=1e-3, beside the method"),
    "epochs": ("", "train.epochs=3, beside the method"),
    "quantize": ("", "quantize=nf4, beside the method"),
}

_MEANT = {
    "adapter adapters bottleneck": (
        "pfeiffer and houlsby are sequential adapters, parallel is beside the layer"
    ),
    "seq-bn": "pfeiffer is this adapter",
    "double-seq-bn": "houlsby is this adapter",
    "par-bn": "parallel is this adapter",
    "qlora": "QLoRA is --method lora --quantize nf4 (in Python: load_backbone(quantize='nf4'))",
    "peft": "peft is a library; its usual method is lora",
    "sft": "any method does supervised fine-tuning: lora, with task=causal-lm",
    "dpo ipo orpo": "preferences are a task: --task preference, with lora or any other method",
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
    name = spelled_like(name, METHODS)
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
