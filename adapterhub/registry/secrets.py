"""What must not leave a machine: paths of it, and secrets."""

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
    "a password in an address": r"[a-z]+://[^\s/:@]+:[^\s/@]+@",
}
_BINARY = (".safetensors",)


def refuse_leaks(files: Mapping[str, bytes]) -> None:
    """Refuse to publish text that holds a path of this machine or a secret.

    Raises:
        FileError: it does; each line that holds one is listed, without the secret.
    """
    found = [
        f"{name}, line {number}: {what}"
        for name, data in files.items()
        for number, what in _leaks(data if not name.endswith(_BINARY) else _header(data))
    ]
    if found:
        raise FileError(
            "these files hold what must not leave this machine",
            offenders=shorten(found),
            expected="no absolute paths, tokens, keys or passwords",
            hint="correct the text, or the recipe, and save the adapter again",
        )


def _leaks(data: bytes) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        yield from ((number, what) for what, secret in _SECRETS.items() if re.search(secret, line))
        # A shown path of home may name a person; what is shown after ~ or $ may not.
        if path_problem("", line):
            yield number, "an absolute path"


def _header(data: bytes) -> bytes:
    """The text in a safetensors file: its header."""
    return data[8 : 8 + int.from_bytes(data[:8], "little")]
