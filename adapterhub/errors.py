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
    ├── RegistryError    refused or unreachable
    │   ├── NotPublishedError   the adapter or version does not exist
    │   └── YankedError         a version that was withdrawn
    ├── SignatureError   not signed by a trusted key, where a signature is required
    ├── MergeError       an adapter that cannot be merged, or a merge that changed the outputs
    ├── ServingError     a request that is not answered: the queue is full, the deadline has passed
    └── OutputError      a path that cannot be written (it exists, is read-only, the disk is full)

Each message states the problem, what was expected and what to try next. If several things are
wrong, one error lists them all. The command line prints the message and exits with code 2. Messages
may quote untrusted files, so control characters are escaped. Lines after the first of each part are
indented, so that quoted text cannot pass for a message or a prompt.
"""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

MOST_LINES, MOST_CHARACTERS = 200, 2000  # per message; untrusted files may have millions
MOST_IN_A_LINE = 1000  # characters of a field printed on one line: the longest label


class AdapterhubError(Exception):
    """Base class of all adapterhub errors.

    Attributes:
        problem: the problem.
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
        return printable("\n".join(_cut(line).replace("\n", "\n    ") for line in lines))


class ConfigError(AdapterhubError):
    """An invalid recipe, option, method or reference."""


class BackboneError(AdapterhubError):
    """A backbone that cannot be loaded, or an unknown architecture."""


class SiteError(AdapterhubError):
    """A site that is missing from the backbone or unsupported by the method."""


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


class NotPublishedError(RegistryError):
    """An adapter or a version that a store lacks."""


class YankedError(RegistryError):
    """A version of an adapter that was withdrawn."""


class SignatureError(AdapterhubError):
    """An adapter that is not signed by a trusted key, where a signature is required."""


class MergeError(AdapterhubError):
    """An adapter that cannot be merged, or a merge that changed the model's outputs."""


class ServingError(AdapterhubError):
    """A request that is not answered: the queue is full, its deadline has passed, or it fails."""


class OutputError(AdapterhubError):
    """A path that cannot be written: it exists, is read-only, or the disk is full."""


# Control characters except tab and newline; format characters (bidirectional marks, zero-width and
# tag characters); line separators other than newline; lone surrogates. Joiners are part of words in
# other scripts and of emoji, but are invisible next to ASCII.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
    "|(?<![^\x00-\x7f])[\u200c\u200d]|[\u200c\u200d](?![^\x00-\x7f])"
)


def printable(text: str) -> str:
    r"""Escape characters that control a terminal or that reorder or hide text, as in \u001b.

    Lone surrogates cannot be encoded and are escaped too. The escapes are those used by JSON:
    inside a JSON string they stand for the original characters.
    """
    return _UNSAFE.sub(_escape, text)


def one_line(text: str, most: int = MOST_IN_A_LINE) -> str:
    r"""Return `text` as one printable line, cut to `most` characters; escape line ends and tabs."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    return printable(cut.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r"))


def warn_user(message: str, *, stacklevel: int = 1) -> None:
    """Issue a warning; make quoted text in the message printable.

    `stacklevel` is one more than the number of frames between the caller and the reported line.
    """
    warnings.warn(printable(message).replace("\n", "\n    "), stacklevel=stacklevel + 1)


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match.group())[1:-1] if match.group() != "\x7f" else "\\u007f"


def _cut(line: str) -> str:
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."


def unknown(
    kind: str,
    value: str,
    choices: Iterable[str],
    *,
    expected: str = "",
    hint: str = "",
    meaning: str = "",
) -> ConfigError:
    """Build the error for an unknown name.

    Args:
        kind: the kind of name, such as "method".
        value: the unknown name.
        choices: the valid names; the error suggests the nearest.
        expected: printed instead of the list of all choices.
        hint: what to try next.
        meaning: the meaning of the name, if it is known; printed instead of the nearest choice.

    Returns:
        The error, for the caller to raise.
    """
    names = list(choices)
    return ConfigError(
        f"unknown {kind} {value!r}{f': {meaning}' if meaning else did_you_mean(value, names)}",
        expected=expected or f"one of {', '.join(names)}",
        hint=hint,
    )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 label", "2 labels"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Suggest the choices nearest to `word`: "; did you mean 'x'?", or "" if none is near."""
    near = nearest(word, choices)
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def nearest(word: str, choices: Iterable[str]) -> list[str]:
    """List the choices spelled like `word`, ignoring case, hyphens and underscores."""
    by_spelling: dict[str, list[str]] = {}
    for choice in sorted(choices):
        by_spelling.setdefault(_spelling(choice), []).append(choice)
    near = difflib.get_close_matches(_spelling(word), by_spelling, n=3, cutoff=0.6)
    if near and near[0] == _spelling(word):
        near = near[:1]
    return [choice for spelling in near for choice in by_spelling[spelling]]


def spelled_like(word: str, choices: Iterable[str]) -> str:
    """Return the choice equal to `word` up to case, hyphens and underscores; else `word`."""
    same = [choice for choice in choices if _spelling(choice) == _spelling(word.strip())]
    return same[0] if len(same) == 1 else word


def _spelling(name: str) -> str:
    return name.casefold().replace("_", "-")


_LFS = b"version https://git-lfs.github.com/spec/"
_MOST_OF_A_POINTER = 1024  # bytes: the limit set by git-lfs


def not_fetched(data: bytes) -> str:
    """Describe the problem if a file is a git-lfs pointer that was not fetched; else return ""."""
    if not data.startswith(_LFS) or len(data) > _MOST_OF_A_POINTER:
        return ""
    return "a git-lfs pointer instead of the file: run git lfs pull"


def unfetched_files(folder: Path) -> list[str]:
    """List the files in a folder that git-lfs has not fetched; do not search subfolders."""
    names = []
    for path in sorted(folder.iterdir()):
        try:
            if path.is_file() and path.stat().st_size <= _MOST_OF_A_POINTER:
                names += [path.name] * bool(not_fetched(path.read_bytes()))
        except OSError:  # the reader of the file reports the reason
            continue
    return names


def read_problem(path: Path, error: OSError | ValueError) -> str:
    """Describe why a file cannot be read; suggest the nearest file name if it is missing.

    A ValueError means that the name is invalid for any file.
    """
    if isinstance(error, ValueError):
        return f"no such file: {str(path)!r}, which is not the name of a file"
    if isinstance(error, FileNotFoundError):
        neighbours = (entry.name for entry in path.parent.glob("*"))
        return f"no such file: {str(path)!r}{did_you_mean(path.name, neighbours)}"
    return f"cannot read {path}: {error.strerror or error}"
