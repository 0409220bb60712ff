"""Rewards of generated texts, by rules, functions or unit tests.

    exact               1 if the text has the answer of the row, else 0
    regex:PATTERN       1 if the pattern is found in the text, else 0; `.` matches line breaks
    tests               1 if the code in the text passes the tests of the row, else 0
    FILE.py:FUNCTION    the numbers that a function returns; also MODULE:FUNCTION

exact: if the answer of the row is a number, or ends with one after `####`, the last number of the
text must be equal to it; otherwise both texts, without case, punctuation and articles.

A function is called once for all texts of a batch, with lists of the same length by name:

    def score(completions, prompts, answer, **columns): return [len(c) for c in completions]

`completions` are texts, `prompts` texts or lists of messages, and each further column of the data
is a list by its name. The result is a list of numbers; a text with None is not scored, and does not
count. A text is not scored either if a pattern takes longer than two seconds on it.

`tests` executes code that a model wrote, in a process of its own with limits of time, memory and
file size, in an empty folder that is deleted afterwards. This is no sandbox: the code can read
files and reach the network. It is only run with the option `run_code`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import Any

import regex

from adapterhub.errors import ConfigError, DataError, one_line
from adapterhub.tasks.common.metrics import normal_answer

RULES = ("exact", "regex:PATTERN", "tests", "FILE.py:FUNCTION", "MODULE:FUNCTION")
SECONDS, MEMORY, FILE_BYTES = 5, 1 << 30, 1 << 20  # limits of a run of tests
REGEX_SECONDS = 2.0  # for one text
_REGEX = "regex:"
_NUMBER = regex.compile(r"-?(?:\d[\d,]*)?\.?\d+")
_CODE = regex.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", regex.DOTALL)
_MOST_DIGITS = 1000  # of a number that is compared as one

Scores = list[float | None]


@dataclass(frozen=True)
class RewardedTexts:
    """Generated texts with their prompts, answers and further columns, all of one length."""

    completions: list[str]
    prompts: list[Any]
    answers: list[str | None]
    columns: Mapping[str, list[Any]]


@dataclass(frozen=True)
class RewardRule:
    """A reward by its spec.

    Attributes:
        spec: as the user typed it.
        name: a short name for reports.
        score: returns a number for each text, or None.
        reads_answer: whether it reads the answer of the row.
        is_code: whether it runs code that a spec names or a model wrote.
    """

    spec: str
    name: str
    score: Callable[[RewardedTexts], Scores]
    reads_answer: bool = False
    is_code: bool = False


@lru_cache(maxsize=64)
def reward_of(spec: str) -> RewardRule:
    """Return the reward of a spec; functions are imported when they are first called.

    Raises:
        ConfigError: the spec is not a reward, or its pattern is invalid.
    """
    if spec == "exact":
        return RewardRule(spec, spec, _exact, reads_answer=True)
    if spec == "tests":
        return RewardRule(spec, spec, _tested, reads_answer=True, is_code=True)
    if spec.startswith(_REGEX):
        pattern = spec.removeprefix(_REGEX)
        try:
            compiled = regex.compile(pattern, regex.DOTALL)
        except (regex.error, RecursionError, MemoryError, OverflowError) as error:
            raise ConfigError(
                f"reward {one_line(spec, 100)!r} is not a regular expression: {error}"
            ) from error
        return RewardRule(
            spec, "regex", lambda texts: [_found(compiled, t) for t in texts.completions]
        )
    place, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier() or not place:
        raise ConfigError(
            f"reward {one_line(spec, 100)!r} is unknown", expected=f"one of {', '.join(RULES)}"
        )
    return RewardRule(spec, name, lambda texts: _called(spec, texts), is_code=True)


def total_rewards(
    rewards: Sequence[RewardRule], weights: Sequence[float], texts: RewardedTexts
) -> tuple[list[float], dict[str, list[float]]]:
    """Return the weighted sum of the rewards of each text, and each reward by name.

    A text that a reward does not score has NaN there; NaN counts as 0 in the sum, unless no reward
    scores the text.
    """
    by_name: dict[str, list[float]] = {}
    for number, reward in enumerate(rewards):
        name = reward.name if reward.name not in by_name else f"{reward.name}-{number + 1}"
        by_name[name] = [math.nan if value is None else value for value in reward.score(texts)]
    sums = []
    for row in zip(*by_name.values(), strict=True):
        known = [w * v for w, v in zip(weights, row, strict=True) if not math.isnan(v)]
        sums.append(math.fsum(known) if known else math.nan)
    return sums, by_name


def check_rewards(rewards: Sequence[RewardRule]) -> None:
    """Import the functions of rewards, so that errors come before anything is loaded.

    Raises:
        ConfigError: a function cannot be imported.
    """
    for reward in rewards:
        if reward.is_code and not reward.reads_answer:
            _function(reward.spec)


# Rules


def _exact(texts: RewardedTexts) -> Scores:
    pairs = zip(texts.completions, texts.answers, strict=True)
    return [float(has_answer(completion, answer or "")) for completion, answer in pairs]


def has_answer(completion: str, answer: str) -> bool:
    """Return whether a text has an answer: its last number, or the whole text."""
    expected = answer.rpartition("####")[2].strip()
    number = _number(expected) if _NUMBER.fullmatch(_plain(expected)) else None
    if number is None:
        return normal_answer(completion) == normal_answer(expected)
    numbers = _NUMBER.findall(completion)
    return bool(numbers) and _number(numbers[-1]) == number


def _plain(text: str) -> str:
    return text.removeprefix("$").removesuffix(".").removesuffix("%").strip()


def _number(text: str) -> Decimal | None:
    """Return the value of a number; None if it is not one or is too long to be compared."""
    digits = _plain(text).replace(",", "")
    if len(digits) > _MOST_DIGITS:
        return None
    try:
        return Decimal(digits)
    except InvalidOperation:
        return None


def _found(pattern: Any, text: str) -> float | None:
    try:
        return float(pattern.search(text, timeout=REGEX_SECONDS) is not None)
    except TimeoutError:
        return None


# Functions


def _called(spec: str, texts: RewardedTexts) -> Scores:
    """Call a function and check its result.

    Raises:
        ConfigError: it raised an error, or did not return a number or None for each text.
    """
    function = _function(spec)
    columns = {
        name: values
        for name, values in texts.columns.items()
        if name not in ("completions", "prompts")
    }
    try:
        returned = function(completions=texts.completions, prompts=texts.prompts, **columns)
        scores = None if returned is None else [*returned]
    except Exception as error:
        raise ConfigError(
            f"reward {spec} raised {type(error).__name__}: {one_line(str(error), 200)}",
            expected="a function(completions, prompts, **columns) that returns a list of numbers",
            hint=f"columns of the data: {', '.join(columns) or 'none'}",
        ) from error
    if scores is None or len(scores) != len(texts.completions):
        count = "None" if scores is None else f"{len(scores)} values"
        raise ConfigError(
            f"reward {spec} returned {count} for {len(texts.completions)} texts",
            expected="one number, or None, for each text",
        )
    return [_checked(spec, score) for score in scores]


def _checked(spec: str, score: Any) -> float | None:
    if score is None:
        return None
    try:
        value = float(score)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(
            f"reward {spec} returned {one_line(repr(score), 80)}",
            expected="finite numbers; None for texts that are not scored",
        )
    return value


@lru_cache(maxsize=16)
def _function(spec: str) -> Callable[..., Any]:
    """Import the function of a spec.

    Raises:
        ConfigError: its file or module does not exist or raises an error, or has no such function.
    """
    place, _, name = spec.rpartition(":")
    try:
        module = _of_file(place) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise ConfigError(
            f"reward {spec} cannot be imported: {type(error).__name__}: {error}",
            expected="FILE.py:FUNCTION or MODULE:FUNCTION",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
        raise ConfigError(
            f"{place} has no function {name}", expected=f"one of {', '.join(names) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


def _of_file(place: str) -> Any:
    path = Path(place)
    if not path.is_file():
        raise FileNotFoundError(f"no file {place}")
    spec = importlib.util.spec_from_file_location(f"rewards_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Unit tests

# The mark is printed only after the tests have passed: code that exits early does not pass.
_RUNNER = """
import resource, sys
seconds, memory, size = map(int, sys.argv[1:])
for kind, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory),
                   (resource.RLIMIT_FSIZE, size), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (most, most))
mark, source = sys.stdin.readline(), sys.stdin.read()
exec(compile(source, "completion", "exec"), {"__name__": "__main__"})
sys.stdout.write("\\n" + mark)
"""


def code_of(completion: str) -> str:
    """Return the last code block of a text, or the whole text."""
    blocks = _CODE.findall(completion)
    return str(blocks[-1]) if blocks else completion


def _tested(texts: RewardedTexts) -> Scores:
    if sys.platform == "win32":
        raise ConfigError(
            "reward tests needs limits of processes, which Windows lacks",
            expected="Linux or macOS, or a function as the reward",
        )
    pairs = list(zip(texts.completions, texts.answers, strict=True))
    if missing := sum(not tests for _, tests in pairs):
        raise DataError(f"{missing} rows have no tests", expected="Python code in the label column")
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 8)) as pool:
        return list(pool.map(lambda pair: float(passes_tests(*pair)), pairs))


def passes_tests(completion: str, tests: str | None) -> bool:
    """Run the code of a text, followed by tests, and return whether no error was raised."""
    mark = secrets.token_hex(16)
    source = f"{mark}\n{code_of(completion)}\n\n{tests}\n"
    limits = map(str, (SECONDS, MEMORY, FILE_BYTES))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER, *limits],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL, cwd=folder,
            env={"PATH": os.defpath, "HOME": folder}, start_new_session=True,
        )  # fmt: skip
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            process.communicate(source.encode(errors="replace"), timeout=SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return output.read().decode(errors="replace").endswith(f"\n{mark}\n")
