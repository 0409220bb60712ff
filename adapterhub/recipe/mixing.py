"""Several tasks in one run: their options, and the share of the steps that each of them gets.

Each optimizer step trains on one task. Which one is drawn at random, in one of three proportions of
Raffel et al. 2020 (https://arxiv.org/abs/1910.10683), section 3.5.2:

    size          examples-proportional mixing: task m has the share r_m = min(e_m, K) / sum of
                  min(e_n, K), where e are numbers of examples and K is `limit`
    temperature   the shares r_m to the power of 1/T, renormalized: `size` at T = 1, nearly `equal`
                  at a large T
    equal         the same share for each task

The draws depend on the seed and the number of the step alone, so a resumed run repeats them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adapterhub.config.options import from_dict, option, to_dict
from adapterhub.config.spec import parse_calls, spec_error
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, unknown

MIXING_EXAMPLES = "size, size(limit=10000), equal or temperature(t=2)"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")  # it is a part of the names of tensors
_DRAWS = 0x7A5C  # keeps the draws of tasks apart from the order of examples with the same seed


@dataclass(frozen=True)
class TaskOptions:
    """One task of several: its data, its head and metric (by its task), and its weight."""

    task: object = option(None, "a task spec (null: the recipe's `task`)", resumed="fixed")
    weight: float = option(1.0, "the factor on the task's loss", resumed="recorded")
    data: DataOptions = field(default_factory=DataOptions)

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ConfigError(f"weight is {self.weight}", expected="a number above 0")


@dataclass(frozen=True)
class BySize:
    """Shares proportional to the numbers of examples, of at most `limit` each."""

    limit: int | None = option(None, "count at most this many examples of a task")

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    def rates(self, sizes: Sequence[int]) -> list[float]:
        """Return the unnormalized shares of tasks with so many examples."""
        most = self.limit or max(sizes)
        return [float(min(size, most)) for size in sizes]


@dataclass(frozen=True)
class ByTemperature:
    """Shares between proportional (t=1) and equal ones (a large t)."""

    t: float = option(2.0, "the temperature: 1 is `size`, a large one nearly `equal`")
    limit: int | None = option(None, "count at most this many examples of a task")

    def __post_init__(self) -> None:
        _check_limit(self.limit)
        if not 1 <= self.t < float("inf"):
            raise ConfigError(f"t is {self.t}", expected="a number from 1")

    def rates(self, sizes: Sequence[int]) -> list[float]:
        """Return the unnormalized shares of tasks with so many examples."""
        return [rate ** (1 / self.t) for rate in BySize(self.limit).rates(sizes)]


@dataclass(frozen=True)
class Equally:
    """The same share for each task."""

    def rates(self, sizes: Sequence[int]) -> list[float]:
        """Return the unnormalized shares of tasks with so many examples."""
        return [1.0] * len(sizes)


Mixing = BySize | ByTemperature | Equally
MIXINGS: dict[str, type[Mixing]] = {
    "size": BySize,
    "temperature": ByTemperature,
    "equal": Equally,
}


def parse_mixing(spec: object) -> Mixing:
    """Build a mixing from its spec: `size`, `temperature(t=2)` or {temperature: {t: 2}}.

    None is `size`: options that a recipe does not use are null.

    Raises:
        ConfigError: the name or an option is unknown, or the spec is not of one mixing.
    """
    spec = "size" if spec is None else spec
    parsed = parse_calls(spec, "mixing", MIXING_EXAMPLES) if isinstance(spec, str) else spec
    pairs = list(parsed.items()) if isinstance(parsed, Mapping) else parsed
    if not isinstance(pairs, list) or len(pairs) != 1 or not isinstance(pairs[0], tuple):
        raise spec_error(spec, "mixing", MIXING_EXAMPLES)
    ((name, options),) = pairs
    if name not in MIXINGS:
        raise unknown("mixing", str(name), MIXINGS, expected=MIXING_EXAMPLES)
    if options is not None and not isinstance(options, Mapping):
        raise spec_error(spec, "mixing", MIXING_EXAMPLES)
    mixing: Mixing = from_dict(MIXINGS[name], options or {}, where=name)
    return mixing


def dump_mixing(mixing: Mixing) -> dict[str, Any]:
    """Return the normal form of a mixing: {name: all options}."""
    name = next(name for name, cls in MIXINGS.items() if isinstance(mixing, cls))
    return {name: to_dict(mixing)}


def mixture_shares(mixing: Mixing, sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the share of the steps that each task gets; they add up to 1."""
    rates = mixing.rates(list(sizes.values()))
    total = sum(rates)
    return {name: rate / total for name, rate in zip(sizes, rates, strict=True)}


def draw_tasks(shares: Sequence[float], steps: int, seed: int, epoch: int) -> list[int]:
    """Return the number of the task that each step of an epoch, counted from 0, trains on.

    The result depends on the arguments alone.
    """
    import numpy as np

    random = np.random.default_rng([seed, epoch, _DRAWS])
    drawn: list[int] = random.choice(len(shares), size=steps, p=np.asarray(shares)).tolist()
    return drawn


def check_task_names(names: Sequence[str]) -> None:
    """Refuse names of tasks that cannot be a part of the names of tensors and metrics.

    Raises:
        ConfigError: some are; all of them are listed.
    """
    if wrong := [repr(name)[:60] for name in names if not _NAME.fullmatch(name)]:
        raise ConfigError(
            "invalid names of tasks",
            offenders=wrong,
            expected="1 to 40 of A-Z a-z 0-9 _ -, beginning with a letter or digit",
        )


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}", expected="a whole number from 1")
