"""Every exception that adapterhub raises deliberately.

    AdapterhubError
    ├── ConfigError      an invalid recipe, option, method or reference
    ├── BackboneError    a backbone that cannot be loaded, or an unknown architecture
    ├── SiteError        a site that the backbone lacks or that the method does not support
    ├── AttachError      an adapter that cannot be attached, detached or activated
    ├── FileError        corrupt or unsafe adapter files: missing, truncated, altered, hostile
    ├── MismatchError    valid adapter files for a different backbone, tokenizer or task
    ├── DataError        unusable training or evaluation data
    ├── TrainingError    a run that cannot continue (the loss is NaN, nothing is trainable)
    ├── RegistryError    not found, refused or unreachable
    ├── SignatureError   not signed by a trusted key, where a signature is required
    ├── MergeError       an adapter that cannot be merged, or a merge that changed the outputs
    └── OutputError      a path that cannot be written (it exists, is read-only, the disk is full)

Each message states the problem, what was expected and what to try next. If several things are
wrong, one error lists them all. The command line prints the message and exits with code 2. Messages
may quote untrusted files, so control characters are escaped.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

MOST_LINES, MOST_CHARACTERS = 200, 2000  # per message; untrusted files may have millions


class AdapterhubError(Exception):
    """Base class of all adapterhub errors.

    Attributes:
        problem: what is wrong.
        expected: what would have been valid.
        hint: what to try next.
        offenders: the invalid items, printed one per line.
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
    """An invalid recipe, option, method or reference."""


class BackboneError(AdapterhubError):
    """A backbone that cannot be loaded, or an unknown architecture."""


class SiteError(AdapterhubError):
    """A site that the backbone lacks or that the method does not support."""


class AttachError(AdapterhubError):
    """An adapter that cannot be attached, detached or activated."""


class FileError(AdapterhubError):
    """Corrupt or unsafe adapter files: missing, truncated, altered or hostile."""


class MismatchError(AdapterhubError):
    """Valid adapter files for a different backbone, tokenizer or task."""


class DataError(AdapterhubError):
    """Unusable training or evaluation data."""


class TrainingError(AdapterhubError):
    """A training run that cannot continue."""


class RegistryError(AdapterhubError):
    """An adapter or registry that was not found, refused the request or is unreachable."""


class SignatureError(AdapterhubError):
    """An adapter that is not signed by a trusted key, where a signature is required."""


class MergeError(AdapterhubError):
    """An adapter that cannot be merged, or a merge that changed the model's outputs."""


class OutputError(AdapterhubError):
    """A path that cannot be written: it exists, is read-only, or the disk is full."""


# Control characters except tab and newline, bidirectional marks, and lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)


def printable(text: str) -> str:
    r"""Escape characters that control a terminal, reorder text or cannot be encoded, as \u001b.

    The escapes are JSON's: inside a JSON string they stand for the original characters.
    """
    return _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def _cut(line: str) -> str:
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."


def unknown(
    kind: str, value: str, choices: Iterable[str], *, expected: str = "", hint: str = ""
) -> ConfigError:
    """Build the error for a name that is not among the choices.

    Args:
        kind: the kind of name, such as "method".
        value: the unknown name.
        choices: the valid names; the error suggests the nearest.
        expected: printed instead of the list of all choices.
        hint: what to try next.

    Returns:
        The error, for the caller to raise.
    """
    names = list(choices)
    return ConfigError(
        f"unknown {kind} {value!r}{did_you_mean(value, names)}",
        expected=expected or f"one of {', '.join(names)}",
        hint=hint,
    )


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Suggest the choices nearest to `word`: "; did you mean 'x'?", or "" if none is near."""
    near = difflib.get_close_matches(word, sorted(choices), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def read_problem(path: Path, error: OSError) -> str:
    """Describe why a file cannot be read; suggest the nearest file name if it is missing."""
    if isinstance(error, FileNotFoundError):
        neighbours = (entry.name for entry in path.parent.glob("*"))
        return f"no such file: {str(path)!r}{did_you_mean(path.name, neighbours)}"
    return f"cannot read {path}: {error.strerror or error}"
