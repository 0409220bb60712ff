"""What a method is: a frozen dataclass of options that plans what goes where on a backbone."""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from adapterhub.backbones.anatomy import Anatomy, Kind, Site, layer_numbers, matches
from adapterhub.errors import ConfigError, SiteError, did_you_mean

Start = Literal["identity", "near-identity", "paper"]
Layers = str | int | tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """A module to put at a site.

    At a projection or sublayer the module maps (x, y) to y'. One whose class sets `reads_weight`
    is called with the host's weight and bias besides (x, y, W, b), and so need not hold them; one
    that sets `changes_input` maps x to the x' that the host gets in its place; one that sets
    `reads` gets that in the place of x: `residual`, the residual stream r that the sublayer's
    output is added to, or `block`, r + y as the layer goes on with it, normed where it norms it
    (`require_stream` refuses sites where they are not known). At `attn.kv` it is
    called with nothing and gives prefix keys and values (2, length, d_kv); one that sets
    `reads_input` is called with the attention's x and gives their gate (batch, tokens, 1) besides.
    At `embed` it gives virtual tokens (length, d); at `mix` it maps (the outputs of the layers
    below, y) to y'.

    One whose y' is affine in x and y together (y' = P x + Q y + r) sets `affine`: an adapter of
    such modules can be merged into the weights of their hosts. For one that changes the input, x'
    is linear in x.

    One whose change of the weight has a low rank says so by a method `factors`: two tensors
    (d_out, r) and (r, d_in), whose product it is.

    A module that trains in another form than it is used in has a method `folded`: it gives the
    module of the folded method (see `Method.folded`) that computes the same now.
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


class Source(NamedTuple):
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

    def built_of(self, sources: Sequence[Source]) -> tuple[Method, dict[str, Tensor]]:
        """The method with these adapters written into its options, and the tensors that it takes
        over from them, by its own names."""
        raise NotImplementedError(f"{self.name} is built of no other adapters")

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

    def folded(self) -> Method:
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


def select(method: Any, anatomy: Anatomy, *kinds: Kind) -> tuple[Site, ...]:
    """The sites that a method's `sites` and `layers` options name.

    A site that the user typed must be there; of the defaults, those that the backbone has.

    Raises:
        SiteError: a site that is not there, or of another kind than the method can use.
    """
    default = next(f.default for f in dataclasses.fields(method) if f.name == "sites")
    chosen = anatomy.select(method.sites, method.layers, strict=method.sites != default)
    if wrong := sorted({site.role for site in chosen if kinds and site.kind not in kinds}):
        fitting = sorted({s.role for s in anatomy.sites.values() if s.kind in kinds})
        raise SiteError(
            f"{method.name} cannot sit at these sites",
            offenders=wrong,
            expected=f"one of {', '.join(fitting)}",
        )
    return chosen


def require_stream(method: Method, reads: str, sites: Iterable[Site]) -> None:
    """Refuse sites without a known residual stream, for a method that reads it.

    Raises:
        SiteError: which they are.
    """
    if wrong := sorted({site.role for site in sites if site.stream is None}):
        raise SiteError(
            f"{method.name} cannot read the {reads} at these sites: where the residual stream "
            "meets them is not known",
            offenders=wrong,
            expected="sublayers of an architecture whose row names its norms",
        )


def sized(
    option: str, sites: Sequence[Site], size: int, sizes: Mapping[str, int]
) -> list[tuple[Site, int]]:
    """The rank or size of each site: that of the closest pattern in `sizes`, else `size`.

    Patterns are those of `sites` options. Of several that name a site, one without wildcards is
    closer, then a longer one: a site id, a stack's role (`encoder.attn.q`), a role (`attn.q`). The
    order of a mapping decides nothing, for files do not keep it.

    Raises:
        ConfigError: a size below 1. SiteError: a pattern that names none of the sites.
    """
    if wrong := [f"{k}: {v}" for k, v in {option: size, **sizes}.items() if v < 1]:
        raise ConfigError(f"{option} cannot be less than 1", offenders=wrong, expected="1 or more")
    if idle := [p for p in sizes if not any(matches(p, site) for site in sites)]:
        raise SiteError(
            f"{option}s names sites that the method does not adapt",
            offenders=[repr(p) for p in idle],
            expected=f"patterns of {', '.join(sorted({site.role for site in sites}))}",
        )

    def closest(site: Site) -> int:
        named = [p for p in sizes if matches(p, site)]
        best = max(named, key=lambda p: (not set(p) & set("*?["), len(p), p), default=None)
        return size if best is None else sizes[best]

    return [(site, closest(site)) for site in sites]


def in_layers(
    anatomy: Anatomy, paths: Iterable[str], layers: Layers, outside: bool | None = None
) -> list[str]:
    """Of these backbone parameters, those in the chosen layers; with `outside` those that stand
    outside all layers too. By default they are in where all layers are.

    Raises:
        SiteError: a selection that cannot be read, or a layer that is not there.
    """
    outside = layers == "all" if outside is None else outside
    numbers = {stack: layer_numbers(layers, anatomy.depth(stack)) for stack in anatomy.stacks}

    def chosen(path: str) -> bool:
        place = anatomy.layer_of(path)
        return outside if isinstance(place, str) else place[1] in numbers[place[0]]

    return [path for path in paths if chosen(path)]


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


def require_between(method: Method, low: float, high: float, *names: str) -> None:
    """Refuse options outside of `low` to `high`.

    Raises:
        ConfigError: which are.
    """
    values = {name: getattr(method, name) for name in names}
    if wrong := [f"{name}: {value}" for name, value in values.items() if not low <= value <= high]:
        raise ConfigError(
            f"options of {method.name} are out of range",
            offenders=wrong,
            expected=f"{low:g} to {high:g}",
        )


def require_decay(method: Method) -> None:
    """Refuse a `decay` whose powers, one a layer, leave the range of numbers.

    Raises:
        ConfigError: it does.
    """
    require_between(method, 0.01, 100, "decay")


def activation(name: str) -> nn.Module:
    """The activation of a transformers name.

    Raises:
        ConfigError: there is none.
    """
    if name not in ACT2FN:
        raise ConfigError(
            f"no activation is called {name!r}{did_you_mean(name, ACT2FN)}",
            expected="a transformers name: relu, gelu, silu, tanh, ...",
        )
    module: nn.Module = ACT2FN[name]
    return module


_BLANK: ContextVar[bool] = ContextVar("blank", default=False)


@contextmanager
def blank() -> Iterator[None]:
    """Modules that are made inside get their values afterwards: costly initial ones are left out,
    and torch's generators stay as they are."""
    token = _BLANK.set(True)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        _BLANK.reset(token)


def is_blank() -> bool:
    """Whether initial values will be overwritten."""
    return _BLANK.get()


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
