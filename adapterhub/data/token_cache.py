"""The token ids of a text stream, in a file of the user's cache that is read as an array.

A file's name is the digest of the texts and of what tokenizes them, so it never needs to be
replaced. It appears when it is complete: concurrent processes that write the same one leave one.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterhub.config.user_folders import user_folder
from adapterhub.data.text_stream import StreamedText, TextStream
from adapterhub.errors import DataError, OutputError
from adapterhub.status import counting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tokens = NDArray[np.uint32]

Tokenize = Callable[[Sequence[StreamedText]], "Tokens"]
"""Returns the tokens of some texts, one after the other."""

_TEXTS_AT_ONCE = 256
_FORMAT = 1


def tokens_folder() -> Path:
    """Return the folder of token files in the user's cache."""
    return user_folder("cache") / "tokens"


def open_tokens(texts: TextStream, key: Any, tokenize: Tokenize) -> Tokens:
    """Return the tokens of a stream, from the cache if they are there.

    Args:
        texts: the stream.
        key: what else the tokens depend on, as JSON.
        tokenize: returns the tokens of a few texts.

    Raises:
        DataError: the stream has changed, or has no tokens.
        OutputError: the cache cannot be written.
    """
    import numpy as np

    record = json.dumps([_FORMAT, texts.sha256, key], sort_keys=True)
    path = tokens_folder() / f"{hashlib.sha256(record.encode()).hexdigest()}.tokens"
    if not path.exists():
        _write(path, texts, tokenize)
    if path.stat().st_size == 0:
        raise DataError(f"{texts.source} contains no tokens")
    with contextlib.suppress(OSError):
        os.utime(path)  # the time of its last use
    return np.memmap(path, dtype=np.uint32, mode="r")


def _write(path: Path, texts: TextStream, tokenize: Tokenize) -> None:
    """Write a token file under another name, and give it its own when it is complete."""
    draft = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(draft, "wb") as file:
                _tokenize_all(texts, tokenize, lambda tokens: file.write(tokens.tobytes()))
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"{path.parent} cannot be written: {error.strerror or error}",
            expected="room for four bytes per token of the text",
            hint="XDG_CACHE_HOME=FOLDER on another disk, or delete older files there",
        ) from error


def _tokenize_all(texts: TextStream, tokenize: Tokenize, write: Callable[[Tokens], object]) -> None:
    """Tokenize a stream in groups of texts.

    Raises:
        DataError: it has other texts than when it was opened.
    """
    seen, source = 0, iter(texts)
    with counting(len(texts), "tokenizing") as done:
        while group := list(itertools.islice(source, _TEXTS_AT_ONCE)):
            write(tokenize(group))
            seen += len(group)
            done(len(group))
    if seen != len(texts):
        raise DataError(
            f"{texts.source} has changed while it was read",
            offenders=[f"{len(texts)} texts before, {seen} now"],
        )
