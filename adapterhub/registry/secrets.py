"""Refuse to publish files that contain secrets or paths of this machine.

Each file is searched as it is and as it reads without disguises, by the rules in _secret_rules.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from adapterhub.errors import FileError, one_line
from adapterhub.files.atomic import UnreadableError, open_regular
from adapterhub.files.manifest import MAX_HEADER_BYTES, MAX_TENSOR_FILE_BYTES
from adapterhub.files.native import MAX_CARD_BYTES
from adapterhub.files.schema import shorten
from adapterhub.registry._disguises import json_texts, readings
from adapterhub.registry._secret_rules import problems_across, problems_in

_BINARY = (".safetensors",)
_MOST_IN_A_PLACE = 80  # characters: the place of a finding is shown, and may be a hostile key


@dataclass(frozen=True)
class Finding:
    """A secret or path in a file, without its text; `code` is what allows it."""

    file: str
    place: str
    problem: str
    code: str


def refuse_leaks(files: Mapping[str, bytes], allowed: Collection[str] = ()) -> None:
    """Refuse to publish text that contains a path of this machine or a secret.

    Args:
        files: the files by name; of tensor files, the header is searched.
        allowed: codes of findings that the user has read and accepts.

    Raises:
        FileError: a file does; the error lists each place, without the secret.
    """
    found = [f for f in findings(files) if f.code not in allowed]
    if found:
        raise FileError(
            "these files contain private information",
            offenders=shorten([f"{f.file}, {f.place}: {f.problem} ({f.code})" for f in found]),
            expected="no absolute paths, tokens, keys or passwords",
            hint="correct the text or the recipe, and save the adapter again; if it is no secret: "
            f"--allow-finding {found[0].code} (allow_findings=[...])",
        )


def findings(files: Mapping[str, bytes]) -> list[Finding]:
    """List the secrets and paths in files, each kind once per place."""
    return [
        Finding(name, place, problem, _code(name, place, problem, data))
        for name, data in files.items()
        for place, problem in _in_file(data if not name.endswith(_BINARY) else _header(data))
    ]


def published_texts(folder: Path, names: Collection[str]) -> dict[str, bytes]:
    """Read the files of these names that exist; of tensor files, only what is text.

    Raises:
        FileError: one is a link, no regular file, or larger than any that is published.
    """
    texts = {}
    for name in (name for name in names if os.path.lexists(folder / name)):
        is_binary = name.endswith(_BINARY)
        most = MAX_TENSOR_FILE_BYTES if is_binary else MAX_CARD_BYTES
        try:
            with open_regular(folder / name, 0, most) as file:
                start = file.read(8)
                size = int.from_bytes(start, "little") if is_binary else most
                texts[name] = start + file.read(min(size, MAX_HEADER_BYTES))
        except UnreadableError as error:
            raise FileError(f"{folder / name}: {error}", expected="a regular file") from None
    return texts


def _in_file(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield (place, problem), by the keys and values of a JSON document, or else by line."""
    if values := list(json_texts(data)):
        for path, key, text in values:
            across = (p for pair in pairwise(text.split("\n")) for p in problems_across(*pair))
            for problem in dict.fromkeys((*_problems(text, key), *across)):
                yield f"at {one_line(path, _MOST_IN_A_PLACE)}", problem
        return
    lines = data.decode("utf-8", "replace").split("\n")
    for number, line in enumerate(lines, 1):
        yield from ((f"line {number}", problem) for problem in _problems(line))
    for number, pair in enumerate(pairwise(lines), 1):
        yield from ((f"lines {number} and {number + 1}", p) for p in problems_across(*pair))


def _problems(text: str, key: str = "") -> list[str]:
    """List the kinds of secrets in a text in any of its readings, each once."""
    return list(dict.fromkeys(p for reading in readings(text) for p in problems_in(reading, key)))


def _code(name: str, place: str, problem: str, data: bytes) -> str:
    """Return a code that is valid for this finding in exactly these bytes."""
    digest = hashlib.sha256(data).hexdigest()
    return hashlib.sha256(f"{name}\0{place}\0{problem}\0{digest}".encode()).hexdigest()[:8]


def _header(data: bytes) -> bytes:
    """Return the text of a safetensors file: its header."""
    return data[8 : 8 + int.from_bytes(data[:8], "little")]
