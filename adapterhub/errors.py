"""Every error that adapterhub raises on purpose.

    AdapterhubError
    ├── ConfigError      a recipe, option, method or reference that cannot be read
    ├── BackboneError    a backbone that cannot be loaded, or whose anatomy is unknown
    ├── SiteError        a site that this backbone does not have, or that the method cannot use
    ├── AttachError      an adapter that cannot be put on, taken off or activated
    ├── FileError        adapter files that are broken: missing, truncated, altered, hostile
    ├── MismatchError    sound adapter files that belong to another backbone, tokenizer or task
    ├── DataError        training or evaluation data that cannot be used
    ├── TrainingError    a run that cannot go on (loss is NaN, nothing trains)
    ├── RegistryError    a store that has not what was asked for, or refuses, or cannot be reached
    ├── MergeError       an adapter that no weights can express, or whose merge changed the outputs
    └── OutputError      a place that cannot be written (exists, read-only, full)

Each says what was given, what was expected and what to type next. Where several things are wrong,
one error lists them all. The command line prints the message and exits with code 2. A message may
quote a stranger's file, so it is printed without characters that steer a terminal.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MOST_LINES, MOST_CHARACTERS = 200, 2000  # of a message; a stranger's file may have millions


class AdapterhubError(Exception):
    """The root of the tree.

    `problem` says what was given, `expected` what would have been right, `hint` what to type next;
    `offenders` are listed one a line.
    """

    def __init__(
        self, problem: str, *, expected: str = "", hint: str = "", offenders: Iterable[str] = ()
    ) -> None:
        self.problem = problem
        self.expected = expected
        self.hint = hint
        self.offenders = tuple(offenders)
        super().__init__(problem)

    def __str__(self) -> str:
        lines = [self.problem]
        lines += [f"  - {offender}" for offender in self.offenders[:MOST_LINES]]
        if more := len(self.offenders[MOST_LINES:]):
            lines.append(f"  - and {more} more")
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return printable("\n".join(map(_cut, lines)))


class ConfigError(AdapterhubError):
    """A recipe, option, method or reference that cannot be read."""


class BackboneError(AdapterhubError):
    """A backbone that cannot be loaded, or whose anatomy is unknown."""


class SiteError(AdapterhubError):
    """A site that this backbone does not have, or that the method cannot use."""


class AttachError(AdapterhubError):
    """An adapter that cannot be put on, taken off or activated."""


class FileError(AdapterhubError):
    """Adapter files that are broken: missing, truncated, altered or hostile."""


class MismatchError(AdapterhubError):
    """Sound adapter files that belong to another backbone, tokenizer or task."""


class DataError(AdapterhubError):
    """Training or evaluation data that cannot be used."""


class TrainingError(AdapterhubError):
    """A training run that cannot go on."""


class RegistryError(AdapterhubError):
    """A store that has not what was asked for, refuses, or cannot be reached."""


class MergeError(AdapterhubError):
    """An adapter that no weights can express, or whose merge changed what the model computes."""


class OutputError(AdapterhubError):
    """A place that cannot be written: it exists, is read-only, or the disk is full."""


# Controls but the tab and the line end, marks that reorder what follows, and lone surrogates.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)


def _cut(line: str) -> str:
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."


def printable(text: str) -> str:
    """`text` with what could steer a terminal, or cannot be written, as escapes: \\u001b.

    Names and labels come from strangers' files. Inside a JSON string the escapes mean the same.
    """
    return _STEERING.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def unknown(
    kind: str, value: str, choices: Iterable[str], *, expected: str = "", hint: str = ""
) -> ConfigError:
    """Build the error for a name that is not among the choices.

    Args:
        kind: what the name should be one of, such as "method".
        value: the name that was given.
        choices: the valid names; the error suggests the nearest.
        expected: what to print instead of the list of all choices.
        hint: what to type next.

    Returns:
        The error, to be raised by the caller.
    """
    names = list(choices)
    return ConfigError(
        f"unknown {kind} {value!r}{did_you_mean(value, names)}",
        expected=expected or f"one of {', '.join(names)}",
        hint=hint,
    )


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The end of a sentence that names the choices nearest to `word`, or "" if none is near."""
    near = difflib.get_close_matches(word, sorted(choices), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
