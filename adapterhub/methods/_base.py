"""What a method is: a frozen dataclass of options that plans what goes where on a backbone."""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from torch import Tensor

from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.errors import unknown
from adapterhub.methods._site_module import SiteModule

Start = Literal["identity", "near-identity", "paper"]
Layers = str | int | tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """A module to place at a site; the module's class fits the kind of the site."""

    site: Site
    module: SiteModule


@dataclass(frozen=True)
class Unfrozen:
    """A parameter of the backbone that the method trains, by its path from the model.

    It trains from this stage of the method's pace on, at `rate` times the method's learning rate.
    """

    path: str
    stage: int = 0
    rate: float = 1.0


@dataclass(frozen=True)
class StageSchedule:
    """When the stages of a method follow each other: one each `epochs` epochs; where that is None,
    one after each `patience` evaluations in a row that were not the best so far."""

    epochs: int | None = 1
    patience: int = 1


PlanStep = Placement | Unfrozen


class TrainedSource(NamedTuple):
    """A trained adapter that another one is built of: its methods, and its tensors by the names of
    adapter files."""

    name: str
    methods: tuple[Method, ...]
    tensors: Mapping[str, Tensor]


class Method(ABC):
    """The base of all methods. A subclass is a frozen dataclass, and registered by its name.

    `start` says what the adapted backbone computes before training: the same function (`identity`),
    almost the same (`near-identity`), or what the paper's initialization gives (`paper`).
    `learning_rate` is AdamW's default for the method's own parameters, and `schedule` the default
    shape of it over a run, where the method's source names one. `trains_backbone` is set where the
    plan unfreezes parameters of the backbone (`Unfreezing`). A composed method names its `parts`,
    and has no plan of its own.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    start: ClassVar[Start] = "identity"
    learning_rate: ClassVar[float] = 1e-3
    schedule: ClassVar[str | None] = None
    trains_backbone: ClassVar[bool] = False

    @classmethod
    def example(cls) -> Method:
        """The method with its defaults, or where it needs more, with options that fit any
        backbone."""
        return cls()

    def sources(self) -> tuple[str, ...]:
        """The trained adapters that it is built of, until `built_of` has put them in: names on the
        model, or folders."""
        return ()

    def built_of(self, sources: Sequence[TrainedSource]) -> tuple[Method, dict[str, Tensor]]:
        """The method with these adapters written into its options, and the tensors that it takes
        over from them, by its own names."""
        raise NotImplementedError(f"{self.name} is built of no other adapters")

    def parts(self) -> tuple[Method, ...]:
        """The methods that this one is composed of; itself unless it is a composition."""
        return (self,)

    def plan(self, anatomy: Anatomy) -> Iterator[PlanStep]:
        """What to put where, and which backbone parameters to train.

        Raises:
            SiteError: the backbone lacks the sites that the options name.
        """
        raise NotImplementedError(f"{self.name} has neither parts nor a plan")

    def pace(self) -> StageSchedule | None:
        """When the next stage of the plan begins; None: the plan has one stage."""
        return None

    def rate(self, name: str) -> float:
        """A factor on the learning rate of one parameter, by its name in adapter files."""
        return 1.0

    def count(self, anatomy: Anatomy) -> int:
        """The number of trainable parameters on this backbone, by formula, without the
        task head."""
        return sum(part.count(anatomy) for part in self.parts())

    def inference_form(self) -> Method:
        """The method that an adapter is saved as; another one where training has more parameters
        than use (a reparametrization)."""
        return self

    def options(self) -> dict[str, Any]:
        """All options by name, for specs and manifests."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)  # type: ignore[arg-type]
        }


class Unfreezing(Method):
    """What methods share that train parameters of the backbone as they are."""

    trains_backbone = True

    def plan(self, anatomy: Anatomy) -> Iterator[Unfrozen]:
        """The parameters of `paths`."""
        return map(Unfrozen, self.paths(anatomy))

    def paths(self, anatomy: Anatomy) -> Iterable[str]:
        """The chosen parameters by their paths, where all train alike: from the start, at one rate.

        Raises:
            SiteError: the backbone has none of them.
        """
        raise NotImplementedError(f"{self.name} has neither paths nor a plan")

    def count(self, anatomy: Anatomy) -> int:
        """The sizes of the chosen parameters."""
        parameters = anatomy.parameters()
        return sum(parameters[step.path].numel() for step in self.plan(anatomy))


METHODS: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register_method(cls: M) -> M:
    """Enter a method into the registry under its name."""
    METHODS[cls.name] = cls
    return cls


def method_class(name: str) -> type[Method]:
    """The registered method of a name.

    Raises:
        ConfigError: no such method; the error names the nearest and lists all.
    """
    if name not in METHODS:
        raise unknown("method", name, sorted(METHODS), hint="adapterhub methods")
    return METHODS[name]
