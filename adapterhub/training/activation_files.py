"""Recorded outputs of layers on disk, for later runs on the same backbone and rows.

    <cache>/activations/<key>/states.bin    bf16, (tokens, layers, d)
    <cache>/activations/<key>/index.json    its digest; then layers, shape and rows

The key is a digest of all that the states depend on. A folder appears with one rename, complete;
what was read is compared with its digests, and a broken folder is recorded anew. A process that has
opened a folder keeps its states, whoever deletes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapterhub.errors import OutputError
from adapterhub.files.atomic import explained, put_in_place, staging
from adapterhub.training.activation_folders import activations_folder
from adapterhub.training.activation_store import DTYPE, Places, RecordedStates

STATES, INDEX = "states.bin", "index.json"
_BLOCK = 1 << 22


def open_activations(key: str) -> RecordedStates | None:
    """Open recorded states; None if there are none, or if they are broken."""
    folder = activations_folder() / key
    try:
        index = _read_index(folder / INDEX)
        path, shape = folder / STATES, tuple(index["shape"])
        if path.stat().st_size != _bytes(shape) or _digest(path) != index["sha256"]:
            return None
        states = _mapped(path, shape)
        os.utime(folder / INDEX)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    places = {bytes.fromhex(key): (start, count) for key, start, count in index["rows"]}
    return RecordedStates(tuple(index["layers"]), states, places)


def _bytes(shape: tuple[int, ...]) -> int:
    tokens, layers, d = shape
    return int(tokens * layers * d * DTYPE.itemsize)


def _mapped(path: Path, shape: tuple[int, ...]) -> Tensor:
    tokens, layers, d = shape
    return torch.from_file(str(path), shared=False, size=tokens * layers * d, dtype=DTYPE).view(
        tokens, layers, d
    )


def _read_index(path: Path) -> dict[str, Any]:
    digest, _, text = path.read_bytes().partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError("the index is broken")
    index: dict[str, Any] = json.loads(text)
    return index


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


class DiskWriter:
    """Writes states to a folder of the cache: a context manager.

    Args:
        key: the name of the folder.

    Raises:
        OutputError: the cache cannot be written, or the disk is full.
    """

    def __init__(self, key: str) -> None:
        self.key, self.folder = key, activations_folder() / key
        self.digest = hashlib.sha256()
        self.shape = [0, 0, 0]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> DiskWriter:
        with explained(self.folder):
            self.staged = self._stack.enter_context(staging(self.folder))
            self.file = self._stack.enter_context(open(self.staged / STATES, "xb"))
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # a full disk may refuse the last bytes again
            self._stack.close()

    def add(self, states: Tensor) -> None:
        """Add the states of further tokens: (tokens, layers, d)."""
        data = states.to(DTYPE).contiguous().view(torch.int16).numpy().tobytes()
        self.shape = [self.shape[0] + len(states), *states.shape[1:]]
        self.digest.update(data)
        with explained(self.folder):
            self.file.write(data)

    def finish(self, layers: tuple[int, ...], places: Places) -> RecordedStates:
        """Put the folder in place, and open it.

        Args:
            layers: the numbers of the layers.
            places: where each row is, by its key.

        Raises:
            OutputError: the folder cannot be written or read.
        """
        rows = [(key.hex(), *place) for key, place in places.items()]
        index = {"layers": layers, "shape": self.shape, "sha256": self.digest.hexdigest()}
        text = json.dumps({**index, "rows": rows}).encode()
        with explained(self.folder):
            self.file.close()
            digest = hashlib.sha256(text).hexdigest().encode()
            (self.staged / INDEX).write_bytes(digest + b"\n" + text)
            self._put_in_place()
        recorded = open_activations(self.key)
        if recorded is None:
            raise OutputError(
                f"{self.folder} cannot be read back", hint="train.frozen_cache=memory, or off"
            )
        return recorded

    def _put_in_place(self) -> None:
        if self.folder.exists() and open_activations(self.key) is None:
            shutil.rmtree(self.folder, ignore_errors=True)  # broken
        try:
            put_in_place(self.staged, self.folder, overwrite=False)
        except OSError:
            if not self.folder.exists():  # else another process has recorded the same rows
                raise
