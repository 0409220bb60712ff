"""What a method is: a frozen dataclass of options that plans what goes where on a backbone."""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from adapterhub.backbones.anatomy import Anatomy, Site
from adapterhub.errors import ConfigError, did_you_mean

Start = Literal["identity", "near-identity", "paper"]
Layers = str | int | tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """A module to put at a site.

    At a projection or sublayer the module maps (x, y) to y'. At `attn.kv` it is called with nothing
    and gives prefix keys and values (2, length, d); at `embed` it gives virtual tokens (length, d);
    at `mix` it maps (the outputs of the layers below, y) to y'.
    """

    site: Site
    module: nn.Module


@dataclass(frozen=True)
class Unfrozen:
    """A parameter of the backbone that the method trains, by its path from the model.

    It trains from this stage of the method's pace on, at `rate` times the method's learning rate.
    """

    path: str
    stage: int = 0
    rate: float = 1.0


@dataclass(frozen=True)
class Pace:
    """When the stages of a method follow each other: one each `epochs` epochs; where that is None,
    one after each `patience` evaluations in a row that were not the best so far."""

    epochs: int | None = 1
    patience: int = 1


Step = Placement | Unfrozen


class Method(ABC):
    """The base of all methods. A subclass is a frozen dataclass, and registered by its name.

    `start` says what the adapted backbone computes before training: the same function (`identity`),
    almost the same (`near-identity`), or what the paper's initialization gives (`paper`).
    `learning_rate` is AdamW's default for the method's own parameters, and `schedule` the default
    shape of it over a run, where the method's source names one. `trains_backbone` is set where the
    plan unfreezes parameters of the backbone. A composed method names its `parts`, and has no plan
    of its own.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    start: ClassVar[Start] = "identity"
    learning_rate: ClassVar[float] = 1e-3
    schedule: ClassVar[str | None] = None
    trains_backbone: ClassVar[bool] = False

    def parts(self) -> tuple[Method, ...]:
        """The methods that this one is composed of; itself unless it is a composition."""
        return (self,)

    def plan(self, anatomy: Anatomy) -> Iterator[Step]:
        """What to put where, and which backbone parameters to train.

        Raises:
            SiteError: the backbone lacks the sites that the options name.
        """
        raise NotImplementedError(f"{self.name} has neither parts nor a plan")

    def pace(self) -> Pace | None:
        """When the next stage of the plan begins; None: the plan has one stage."""
        return None

    def rate(self, name: str) -> float:
        """A factor on the learning rate of one parameter, by its name in adapter files."""
        return 1.0

    def count(self, anatomy: Anatomy) -> int:
        """The number of trainable parameters on this backbone, by formula, without the
        task head."""
        return sum(part.count(anatomy) for part in self.parts())

    def options(self) -> dict[str, Any]:
        """All options by name, for specs and manifests."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)  # type: ignore[arg-type]
        }


def select(method: Any, anatomy: Anatomy) -> tuple[Site, ...]:
    """The sites that a method's `sites` and `layers` options name.

    A site that the user typed must be there; of the defaults, those that the backbone has.
    """
    default = next(f.default for f in dataclasses.fields(method) if f.name == "sites")
    return anatomy.select(method.sites, method.layers, strict=method.sites != default)


def require_positive(method: Method, *names: str) -> None:
    """Refuse options that must be more than 0.

    Raises:
        ConfigError: which are not.
    """
    values = {name: getattr(method, name) for name in names}
    if wrong := [f"{name}: {value}" for name, value in values.items() if not value > 0]:
        raise ConfigError(
            f"options of {method.name} are out of range", offenders=wrong, expected="more than 0"
        )


def cast(parameter: Tensor, like: Tensor) -> Tensor:
    """A parameter in the dtype that a product with `like` needs; autocast chooses for itself."""
    if parameter.dtype == like.dtype or torch.is_autocast_enabled(like.device.type):
        return parameter
    return parameter.to(like.dtype)


def add_product(y: Tensor, u: Tensor, weight: Tensor, scale: float) -> Tensor:
    """y + scale * u weightᵀ in one pass. y: (..., d_out), u: (..., r), weight: (d_out, r)."""
    rows = y.reshape(-1, y.shape[-1])
    u = u.reshape(-1, u.shape[-1]).to(y.dtype)
    return torch.addmm(rows, u, cast(weight, y).T, alpha=scale).view(y.shape)


METHODS: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register(cls: M) -> M:
    """Enter a method into the registry under its name."""
    METHODS[cls.name] = cls
    return cls


def method_class(name: str) -> type[Method]:
    """The registered method of a name.

    Raises:
        ConfigError: no such method; the error names the nearest and lists all.
    """
    if name not in METHODS:
        raise ConfigError(
            f"no method is called {name!r}{did_you_mean(name, METHODS)}",
            expected=f"one of {', '.join(sorted(METHODS))}",
            hint="adapterhub methods",
        )
    return METHODS[name]
