"""Refuse to publish files that contain secrets or paths of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from adapterhub.errors import FileError
from adapterhub.files.schema import path_problem, shorten

_SECRETS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "an OpenAI key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})",
    "an AWS key": r"\bA(?:KIA|SIA)[0-9A-Z]{16}\b",
    "a Google key": r"\bAIza[0-9A-Za-z_-]{35}",
    "a Slack token": r"\bxox[abprs]-[0-9A-Za-z-]{10,}",
    "a W&B key": r"(?i)wandb\S{0,20}\s*[:=]\s*\W?[0-9a-f]{40}\b",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in a URL": r"[a-z]+://[^\s/:@]+:[^\s/@]+@",
}
_BINARY = (".safetensors",)


def refuse_leaks(files: Mapping[str, bytes]) -> None:
    """Refuse to publish text that contains a path of this machine or a secret.

    Raises:
        FileError: a file does; the error lists each such line, without the secret.
    """
    leaks = [
        f"{name}, line {number}: {problem}"
        for name, data in files.items()
        for number, problem in _leaks(data if not name.endswith(_BINARY) else _header(data))
    ]
    if leaks:
        raise FileError(
            "these files contain private information",
            offenders=shorten(leaks),
            expected="no absolute paths, tokens, keys or passwords",
            hint="correct the text or the recipe, and save the adapter again",
        )


def _leaks(data: bytes) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        yield from ((number, kind) for kind, secret in _SECRETS.items() if re.search(secret, line))
        # A spelled-out home folder may name a person; ~ and $HOME do not.
        if path_problem("", line):
            yield number, "an absolute path"


def _header(data: bytes) -> bytes:
    """Return the text of a safetensors file: its header."""
    return data[8 : 8 + int.from_bytes(data[:8], "little")]
