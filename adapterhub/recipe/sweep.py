"""Recipes of several runs: stages, which may start from earlier ones, and sweeps.

    stages:
    - {name: domain, task: masked-lm, data: {train: reports.txt}}
    - {name: task, from: domain, task: classification, data: {train: train.tsv}}

A stage has the options of the recipe around it. Its own options override them; its own task or
method replaces the other one entirely. Each stage is a run in a subfolder of the output. In later
stages, its name refers to its adapter.

The runs of a sweep are every combination of the values of some options.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapterhub.config.yaml import dump_yaml, load_yaml, parse_overrides
from adapterhub.errors import ConfigError
from adapterhub.recipe.recipe import NAMES, STAGES, Recipe, layered, read_layers

REFERENCES = ("from", "on")  # the options that may name an earlier stage
_STAGE_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,63}")
_RESERVED = ("adapter", "checkpoints", "tensorboard")  # folders in a run


@dataclass(frozen=True)
class StagedRecipe:
    """The stages of a recipe, in order: the recipe of each stage by name.

    Attributes:
        output: the folder of all stages.
        stages: the recipes; the output of each is a subfolder.
        starts: for each stage, the names of the stages that it refers to.
        data: the recipe as plain data, for `recipe.yaml`.
    """

    output: str
    stages: Mapping[str, Recipe]
    starts: Mapping[str, tuple[str, ...]]
    data: Mapping[str, Any]

    def to_yaml(self) -> str:
        """Return the recipe as YAML, for `read_staged`."""
        return dump_yaml(dict(self.data))


def read_staged(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> StagedRecipe | None:
    """Read a recipe with stages; None without stages. Flags and overrides apply to each stage.

    Raises:
        ConfigError: the stages are not a list of recipes with different names, or a recipe is
            invalid.
    """
    data = dict(load_yaml(path)) if path else {}
    if STAGES not in data:
        return None
    listed, common = data.pop(STAGES), NAMES.normal_form(data)
    several = (flags or {}, parse_overrides(overrides))
    options = layered([NAMES.normal_form(each) for each in several])
    named = _named(listed)
    output = str(options.get("output") or common.get("output") or "")
    if not output:
        raise ConfigError("the recipe has no output", hint="--output DIR")
    stages: dict[str, Recipe] = {}
    starts: dict[str, tuple[str, ...]] = {}
    for name, own in named.items():
        resolved, starts[name] = _resolved(layered([common, own, options]), stages, output)
        place = {"output": str(Path(output) / name)}
        if name == [*named][-1] and resolved.get("name") is None:  # its adapter is that of the run
            place["name"] = Recipe(output=output).adapter_name
        try:
            stages[name] = read_layers([resolved, place])
        except ConfigError as error:
            raise ConfigError(f"stage {name!r}: {error}") from error
    return StagedRecipe(output, stages, starts, _written(output, common, named, options))


def _written(
    output: str,
    common: Mapping[str, Any],
    named: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the recipe with the command-line options in each stage."""
    others = {key: value for key, value in options.items() if key != "output"}
    stages = [{"name": name, **layered([own, others])} for name, own in named.items()]
    # YAML would use references for values that several stages share.
    return copy.deepcopy({**common, "output": output}) | {STAGES: list(map(copy.deepcopy, stages))}


def _named(listed: object) -> dict[str, dict[str, Any]]:
    """Return the options of each stage by its name.

    Raises:
        ConfigError: a stage is not a mapping with a unique name.
    """
    stages = listed if isinstance(listed, list) else []
    names = [stage.get("name") if isinstance(stage, Mapping) else None for stage in stages]
    problems = [
        f"stage {number}: the name is {name!r}"
        for number, name in enumerate(names, start=1)
        if not isinstance(name, str) or not _STAGE_NAME.fullmatch(name) or name in _RESERVED
    ]
    problems += [f"two stages are named {n!r}" for n in dict.fromkeys(names) if names.count(n) > 1]
    problems += [f"stage {n!r} has an output" for n, s in zip(names, stages, strict=True)
                 if isinstance(s, Mapping) and "output" in s]  # fmt: skip
    if problems or not stages:
        raise ConfigError(
            "invalid stages",
            offenders=problems,
            expected="a list of recipes, each with a name of letters, digits, - and _, which is "
            "that of its folder in the output",
            hint="stages: [{name: domain, task: masked-lm, data: {train: FILE}}, ...]",
        )
    return {
        str(stage["name"]): NAMES.normal_form({k: v for k, v in stage.items() if k != "name"})
        for stage in stages
    }


def _resolved(
    options: dict[str, Any], earlier: Mapping[str, Recipe], output: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Replace the names of earlier stages by their adapters; also return the names."""
    values: list[str] = []

    def adapter(value: object) -> object:
        if isinstance(value, list):
            return [adapter(each) for each in value]
        if not isinstance(value, str) or value not in earlier:
            return value
        values.append(value)
        return _place(output, value)

    changed = {key: adapter(options[key]) for key in REFERENCES if key in options}
    return options | changed, tuple(values)


def _place(output: str, name: str) -> str:
    """Return the folder of a stage's adapter, as a reference."""
    folder = Path(output, name, "adapter").as_posix()
    return folder if Path(folder).is_absolute() else f"./{folder}"


def without_places(staged: StagedRecipe, name: str) -> Recipe:
    """Return the recipe of a stage without the parts that depend on the output folder."""
    recipe = staged.stages[name]
    names = {_place(staged.output, each): each for each in staged.starts[name]}
    start = recipe.from_ and names.get(recipe.from_, recipe.from_)
    on = tuple(names.get(each, each) for each in recipe.on)
    return replace(recipe, output="-", name=None, from_=start, on=on)


MOST_NAME = 120  # characters in a folder name; most file systems limit it to 255 bytes
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its name, which is also its folder, and its options as KEY=VALUE."""

    name: str
    words: tuple[str, ...]


def parse_sweep(words: Sequence[str]) -> list[SweepRun]:
    """Return the runs of a sweep, the last option changing fastest.

    A word is an option and its values, such as `method=lora,pfeiffer` or `seed=0,1,2`. A comma
    inside brackets or quotes belongs to a value: `method=lora,[prefix, lora]`.

    Raises:
        ConfigError: a word without `=` or values, an option given twice, or equal values.
    """
    options = [_option(word) for word in words]
    problems = [f"{key} is given twice" for key in _repeated([key for key, _ in options])]
    for key, values in options:
        problems += [f"{key} has the value {value} twice" for value in _repeated(values)]
    if problems:
        raise ConfigError(
            "a sweep tries each value once",
            offenders=problems,
            hint="--sweep method=lora,pfeiffer --sweep seed=0,1,2",
        )
    combinations = itertools.product(*[[(key, v) for v in values] for key, values in options])
    runs = [[f"{key}={value}" for key, value in each] for each in combinations]
    names = _different([_name(run) for run in runs])
    return [SweepRun(name, tuple(run)) for name, run in zip(names, runs, strict=True)]


def _option(word: str) -> tuple[str, list[str]]:
    key, equals, text = word.partition("=")
    values = [value.strip() for value in split_values(text)]
    if not equals or not key.strip() or not all(values):
        raise ConfigError(
            f"{word!r} is not an option with values",
            expected="KEY=VALUE,VALUE,...",
            hint="--sweep train.learning_rate=1e-4,3e-4,1e-3",
        )
    return key.strip(), values


def split_values(text: str) -> Iterator[str]:
    """Yield the values of a list, split at commas outside brackets and quotes."""
    depth, quote, value = 0, "", ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        depth += (character in _OPENING) - (character in _CLOSING) if not quote else 0
        if character == "," and not depth and not quote:
            yield value
            value = ""
        else:
            value += character
    yield value


def _repeated(values: Sequence[str]) -> list[str]:
    return sorted({value for value in values if values.count(value) > 1})


def _name(words: Sequence[str]) -> str:
    """Name a run by its values: a method alone, any other option with the end of its name."""
    parts = []
    for word in words:
        key, _, value = word.partition("=")
        last = key.rpartition(".")[2]
        parts.append(_plain(value if last == "method" else f"{last}={value}"))
    return ",".join(parts)[:MOST_NAME]


def _plain(text: str) -> str:
    """Replace characters that are awkward in a file name or in a shell."""
    return re.sub(r"[^\w.=+-]+", "-", text, flags=re.ASCII).strip("-.") or "run"


def _different(names: Sequence[str]) -> list[str]:
    """Append numbers to duplicate names, ignoring case as some file systems do."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        count = seen[name.lower()] = seen.get(name.lower(), 0) + 1
        result.append(name if count == 1 else f"{name}-{count}")
    return result
