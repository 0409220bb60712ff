"""Claims: which process runs a cell now, where several have the same folder.

A claim is a file that its process creates exclusively, and touches as long as it lives. The claim
of a process that died expires; the next one has a higher number, so that only one process gets it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from pathlib import Path

from adapterhub.recipe.output_folder import writing

EXPIRES = 300.0  # seconds without a sign of life; the clocks of machines differ by less
BEAT = 20.0  # seconds between two signs of life


class Claims:
    """The claims of this process in a folder, `KEY.NUMBER` each; a context that gives them back."""

    def __init__(self, folder: Path, expires: float = EXPIRES, beat: float = BEAT) -> None:
        self.folder, self.expires, self.beat = folder, expires, beat
        self.held: dict[str, Path] = {}
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._live, name="claims", daemon=True)

    def __enter__(self) -> Claims:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        for key in list(self.held):
            self.release(key)

    def take(self, key: str) -> bool:
        """Claim a cell; return whether no other process has it.

        Check afterwards whether it has a record: the process that had it may have ended just now.

        Raises:
            OutputError: the folder cannot be written.
        """
        last = max(self._numbers(key), default=0)
        if last and not self._is_stale(self._path(key, last)):
            return False
        path = self._path(key, last + 1)
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("x", encoding="utf-8") as file:
                    json.dump({"place": _place(), "pid": os.getpid()}, file)
            except FileExistsError:
                return False
        self.held[key] = path
        return True

    def release(self, key: str) -> None:
        """Give a claim back."""
        own = self.held.pop(key)
        for number in sorted(self._numbers(key)):
            if (path := self._path(key, number)).name != own.name:
                path.unlink(missing_ok=True)
        own.unlink(missing_ok=True)

    def _path(self, key: str, number: int) -> Path:
        return self.folder / f"{key}.{number}"

    def _numbers(self, key: str) -> list[int]:
        return [int(path.suffix[1:]) for path in self.folder.glob(f"{key}.*")]

    def _is_stale(self, path: Path) -> bool:
        """Return whether the process of a claim is dead, or silent for too long."""
        try:
            if time.time() - path.stat().st_mtime > self.expires:
                return True
            owner = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # it was given back just now, or is being written
            return False
        return owner["place"] == _place() is not None and not _is_running(owner["pid"])

    def _live(self) -> None:
        while not self.ended.wait(self.beat):
            for path in list(self.held.values()):
                with contextlib.suppress(OSError):
                    os.utime(path)


def _place() -> str | None:
    """Return where the numbers of processes are the same; None if that is not known."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
