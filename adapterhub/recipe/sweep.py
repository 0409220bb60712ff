"""The runs of a sweep: every combination of the values that some options take."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from adapterhub.errors import ConfigError

MOST_NAME = 120  # characters of a folder's name, which most file systems limit to 255 bytes
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its name, which is that of its folder, and its options as KEY=VALUE."""

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
    """Yield the values of a list: split at commas that are outside of brackets and quotes."""
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
    """Replace what is awkward in the name of a file or in a shell."""
    return re.sub(r"[^\w.=+-]+", "-", text, flags=re.ASCII).strip("-.") or "run"


def _different(names: Sequence[str]) -> list[str]:
    """Append a number to names that occur twice, for file systems that ignore case too."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        count = seen[name.lower()] = seen.get(name.lower(), 0) + 1
        result.append(name if count == 1 else f"{name}-{count}")
    return result
