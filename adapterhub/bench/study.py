"""A study: the methods and data to compare, the budget, and its folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adapterhub.config.options import from_dict, option, to_dict
from adapterhub.config.yaml import dump_yaml, load_yaml, merge_options, parse_overrides, seconds_of
from adapterhub.errors import ConfigError, OutputError
from adapterhub.files.atomic import replace_file
from adapterhub.methods.common.base import (
    check_spec,
    dump_methods,
    method_calls,
    parse_methods,
)
from adapterhub.recipe.output_folder import writing
from adapterhub.recipe.recipe import Recipe, read_draft
from adapterhub.tasks import parse_task
from adapterhub.tasks.common.infer_task import DEFAULT

METHODS_COMPARED = ("head", "bitfit", "lora", "pfeiffer", "mam", "full")
USUAL_BASELINE = "lora"
START = "from"
STUDY = "study.yaml"
RECORDS = "records"
WORK = "work"
CLAIMS = "claims"
# Options that a study sets for each of its runs.
_DECIDED = (
    "from_",
    "seed",
    "train.learning_rate",
    "train.max_steps",
    "train.epochs",
    "train.eval_every",
)


@dataclass(frozen=True)
class BenchOptions:
    """The content of a study's comparison, and its budget.

    Raises:
        ConfigError: some values are out of range; all of them are listed.
    """

    methods: tuple[object, ...] = option(
        METHODS_COMPARED,
        "method specs: lora, lora(rank=16), ...; `from NAME` trains on from a trained adapter",
    )
    ranks: tuple[int, ...] = option(
        (),
        "ranks at which methods with a rank are compared, each with the same scale of the update "
        "(none: as the methods have it)",
    )
    baseline: str | None = option(
        None, "the method that the others are compared with (null: lora, or the first one)"
    )
    test: str | None = option(
        None, "test data, used once at the end (null: a fifth of the training data is held out)"
    )
    seeds: int = option(3, "runs of each method with the learning rate that was chosen for it")
    rates: int = option(5, "learning rates that are tried for each method, half a decade apart")
    tuning_seeds: int = option(
        2, "runs with each of the best two rates that choose between them, each with its own seed"
    )
    rows: tuple[int, ...] = option((), "numbers of training rows to compare at (none: all rows)")
    steps: int | None = option(
        None, "optimizer steps of a whole run (null: by the budget, or by the number of rows)"
    )
    budget: str | None = option(
        None, "the time that the study may take, about: 30m, 2h, 1d (null: no limit)"
    )
    select_rows: int = option(1_000, "evaluation rows that select rate and checkpoint, at most")
    tasks: dict[str, object] = option(
        {},
        "several tasks: for each name the options of the recipe in which it differs, and test",
    )
    recorded: tuple[str, ...] = option(
        (), "further methods, whose records another program writes: shown and tested, never run"
    )

    def __post_init__(self) -> None:
        counts = {
            n: getattr(self, n) for n in ("seeds", "rates", "tuning_seeds", "steps", "select_rows")
        }
        offenders = [
            f"{name}: {value} (a whole number from 1)"
            for name, value in counts.items()
            if value is not None and value < 1
        ]
        offenders += [f"rows: {rows} (a whole number from 2)" for rows in self.rows if rows < 2]
        offenders += [f"ranks: {rank} (a whole number from 1)" for rank in self.ranks if rank < 1]
        offenders += [] if self.methods else ["methods: none"]
        run = set(map(method_label, self.methods))
        offenders += [
            f"recorded: {name} (a name that none of the methods has)"
            for name in self.recorded
            if name in run
        ]
        if self.budget is not None and seconds_of(self.budget) is None:
            offenders.append(f"budget: {self.budget!r} (a number and s, m, h or d: 30m)")
        if offenders:
            raise ConfigError("these options of the study are out of range", offenders=offenders)


@dataclass(frozen=True)
class Study:
    """A study: a recipe shared by all runs, and the comparison."""

    recipe: Recipe
    bench: BenchOptions = field(default_factory=BenchOptions)

    def tasks(self) -> dict[str, Recipe]:
        """Return the recipe of each task; without several tasks, the recipe of the study alone.

        Raises:
            ConfigError: a task has an unknown option.
        """
        if not self.bench.tasks:
            return {_task_name(self.recipe): self.recipe}
        base = to_dict(self.recipe)
        own = {name: _mapping(name, options) for name, options in self.bench.tasks.items()}
        return {
            name: read_draft(None, (), merge_options(base, _without(options, "test")))
            for name, options in own.items()
        }

    def tests(self) -> dict[str, str]:
        """Return the test data by task, for tasks with their own test data."""
        own = {name: _mapping(name, options) for name, options in self.bench.tasks.items()}
        return {name: str(options["test"]) for name, options in own.items() if "test" in options}

    def specs(self) -> tuple[object, ...]:
        """Return the method specs; one with a rank is repeated for each of `ranks`."""
        methods, ranks = self.bench.methods, tuple(dict.fromkeys(self.bench.ranks))
        return tuple(s for spec in methods for s in _at_ranks(spec, ranks)) if ranks else methods

    def labels(self) -> dict[str, object]:
        """Return the methods by their names in the report."""
        return {method_label(spec): spec for spec in self.specs()}

    def compared(self) -> tuple[str, ...]:
        """Return the names of all methods, run or recorded."""
        return tuple(dict.fromkeys((*self.labels(), *self.bench.recorded)))

    @property
    def baseline(self) -> str:
        """The method that the others are compared with."""
        labels = list(self.labels())
        usual = next(label for label in (USUAL_BASELINE, *labels) if label in labels)
        chosen = self.bench.baseline or usual
        if chosen not in labels:
            raise ConfigError(
                f"the baseline {chosen!r} is not one of the methods",
                expected=f"one of {', '.join(labels)}",
            )
        return chosen

    def with_usual_method(self, usual: str) -> Study:
        """Return the study with its methods: one at several ranks is the usual one by default.

        Raises:
            ConfigError: none of the methods has a rank, or the baseline is not one of them.
        """
        if not self.bench.ranks:
            return self
        named = self.bench.methods if self.bench.methods != METHODS_COMPARED else (usual,)
        if all(rank_of(spec) is None for spec in named):
            raise ConfigError(
                f"none of these methods has a rank: {', '.join(map(method_label, named))}",
                expected="--ranks with methods such as lora, dora or loha",
            )
        study = replace(self, bench=replace(self.bench, methods=named))
        _ = study.baseline
        return study

    def to_yaml(self) -> str:
        """Return the study as YAML, for `read_study`."""
        return dump_yaml({"bench": to_dict(self.bench), **to_dict(self.recipe)})


def read_study(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
    bench: Mapping[str, Any] | None = None,
) -> Study:
    """Read a study: a recipe with a section `bench`.

    Raises:
        ConfigError: unknown options, values of a wrong type, or options that the study sets itself.
    """
    data = dict(load_yaml(path)) if path else {}
    section = _mapping("bench", data.pop("bench", {}))
    words = list(overrides)
    own = [word.removeprefix("bench.") for word in words if word.startswith("bench.")]
    others = [word for word in words if not word.startswith("bench.")]
    section = merge_options(section, {k: v for k, v in (bench or {}).items() if v is not None})
    section = merge_options(section, parse_overrides(own))
    recipe = read_draft(None, others, merge_options(data, flags or {}))
    _check_open(recipe)
    study = Study(recipe, from_dict(BenchOptions, section, "bench"))
    for spec in study.bench.methods:
        if start_of(spec) is None:
            check_spec(spec)  # type: ignore[arg-type]
    if not study.bench.ranks:
        _ = study.baseline
    for each in study.tasks().values():
        if each.task is not None:
            parse_task(each.task)
    return study


def start_of(spec: object) -> str | None:
    """Return the adapter of `from NAME` or {from: NAME}, where a method starts, or None."""
    if isinstance(spec, str) and spec.split()[:1] == [START] and len(spec.split()) > 1:
        return spec.split(maxsplit=1)[1].strip()
    if isinstance(spec, Mapping) and set(spec) == {START}:
        return str(spec[START])
    return None


def method_label(spec: object) -> str:
    """Return the name of a method in tables: its spec as written."""
    if (start := start_of(spec)) is not None:
        return f"{START} {start}"
    if isinstance(spec, str):
        return spec.strip()
    if isinstance(spec, Mapping) and len(spec) == 1:
        ((name, options),) = spec.items()
        inner = ", ".join(f"{k}={v}" for k, v in (options or {}).items())
        return f"{name}({inner})" if inner else str(name)
    if isinstance(spec, list | tuple):
        return "+".join(map(method_label, spec))
    return str(spec)


def rank_of(spec: object) -> int | None:
    """Return the rank of a spec of one method; None if it has none, or the method is unknown."""
    if start_of(spec) is not None:
        return None
    try:
        methods = parse_methods(spec)  # type: ignore[arg-type]
    except ConfigError:  # of a record that another version made
        return None
    rank = getattr(methods[0], "rank", None) if len(methods) == 1 else None
    return rank if isinstance(rank, int) else None


def ranks_of(labels: Mapping[str, object]) -> list[dict[str, int]]:
    """Return the methods that differ only in rank and alpha, as ranks by name, group by group."""
    groups: dict[str, dict[str, int]] = {}
    for label, spec in labels.items():
        if (rank := rank_of(spec)) is not None:
            (method,) = dump_methods(parse_methods(spec))  # type: ignore[arg-type]
            ((name, options),) = method.items()
            rest = {key: value for key, value in options.items() if key not in ("rank", "alpha")}
            groups.setdefault(f"{name} {rest}", {})[label] = rank
    return [group for group in groups.values() if len(group) > 1]


def _at_ranks(spec: object, ranks: Iterable[int]) -> Iterator[object]:
    """Yield the spec of a method at each rank, with the scale that it has as written.

    The scale is alpha / rank, so alpha changes with the rank. An alpha that is written without a
    rank stays, and so does that of a method with another scale, such as alpha / sqrt(rank).
    """
    if rank_of(spec) is None:
        yield spec
        return
    ((name, options),) = method_calls(spec)  # type: ignore[arg-type, misc]
    (method,) = parse_methods(spec)  # type: ignore[arg-type]
    written, alpha = method.rank, getattr(method, "alpha", 0.0)  # type: ignore[attr-defined]
    fixed = not alpha or ("alpha" in options and "rank" not in options)
    if not fixed and callable(scale := getattr(method, "scale", None)):
        fixed = not math.isclose(scale(written), alpha / written)
    for rank in ranks:
        scaled = {} if fixed else {"alpha": _whole(alpha * rank / written)}
        yield {name: {**options, "rank": rank, **scaled}}


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def _check_open(recipe: Recipe) -> None:
    default = Recipe()
    values = {path: _at(recipe, path) for path in _DECIDED}
    options = [
        f"{path.removesuffix('_')}={value}"
        for path, value in values.items()
        if value != _at(default, path)
    ]
    if options:
        raise ConfigError(
            "a study chooses these options for each of its runs",
            offenders=options,
            hint="leave them out; --seeds, --rates and --steps say how many are tried, and the "
            "method `from NAME` starts from an adapter",
        )


def _at(recipe: Recipe, path: str) -> object:
    value: object = recipe
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _task_name(recipe: Recipe) -> str:
    return Path(recipe.data.location or "data").stem


def _mapping(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}", expected="a mapping of options")
    return dict(value)


def _without(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


def keep_study(study: Study, output: Path) -> Study:
    """Write `study.yaml` in the folder of a study, and return it.

    It includes the recorded methods of the new study and of an existing one.

    Raises:
        OutputError: the folder has another study, or cannot be written.
        ConfigError: its study is broken.
    """
    path = output / STUDY
    if path.exists():
        there = read_study(path)
        if _identity(there, output) != _identity(study, output):
            raise OutputError(
                f"{output} has another study",
                expected="the same options as when it was begun",
                hint=f"adapterhub bench {path} --output {output} to continue it, "
                "or another --output",
            )
        study = _with_recorded(there, study)
    with writing(path):
        output.mkdir(parents=True, exist_ok=True)
        replace_file(path, study.to_yaml().encode())
    return study


def as_begun(study: Study, output: Path) -> Study:
    """Return a study with the choices made when it began in a folder, if it is the same study.

    Raises:
        ConfigError: the study in the folder is broken.
    """
    path = output / STUDY
    if not path.exists():
        return study
    begun = read_study(path)
    begun = replace(begun, recipe=replace(begun.recipe, output=str(output)))
    recipe, bench = study.recipe, study.bench
    if recipe.dtype is None:
        recipe = replace(recipe, dtype=begun.recipe.dtype, attention=begun.recipe.attention)
    if bench.budget is not None and bench.steps is None:
        bench = replace(bench, steps=begun.bench.steps, select_rows=begun.bench.select_rows)
    chosen = replace(study, recipe=recipe, bench=bench)
    if _identity(chosen, output) != _identity(begun, output):
        return study
    recorded = _with_recorded(begun, study).bench.recorded
    return replace(begun, bench=replace(begun.bench, recorded=recorded))


def _with_recorded(begun: Study, study: Study) -> Study:
    """Return a study that also has the recorded methods of its start."""
    names = dict.fromkeys((*begun.bench.recorded, *study.bench.recorded))
    return replace(study, bench=replace(study.bench, recorded=tuple(names)))


def _identity(study: Study, output: Path) -> str:
    """Return the part of a study that defines its runs; its folder may have been moved."""
    recipe = replace(study.recipe, output=str(output), task=study.recipe.task or DEFAULT)
    return Study(recipe, replace(study.bench, recorded=())).to_yaml()
