"""What surrounds a test: homes, slow calls, waiting, faults and refusals."""

import ast
import asyncio
import functools
import gc
import os
import random
import signal
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn.server

import adapterhub
from adapterhub.pages import figures

# The user's folders of a test, or of what a session prepares before its tests.


@contextmanager
def home_in(folder: Path, cache: Path | None = None) -> Iterator[None]:
    """Set the user's registry, trusted keys, record of versions and cache to those of a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("XDG_CACHE_HOME", str(cache or folder / "cache"))
        patch.setenv("ADAPTERHUB_STATE", str(folder / "state"))
        for variable in ("ADAPTERHUB_TRUST", "ADAPTERHUB_REQUIRE_SIGNATURES"):
            patch.delenv(variable, raising=False)
        yield


# Slow calls that have no effect in a test, left out.


_TICK = 0.01  # seconds
_DRAWN = figures.figure_svg


@contextmanager
def charts_drawn() -> Iterator[None]:
    """Draw charts again, for tests that read them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "figure_svg", _DRAWN)
        yield


@contextmanager
def left_out() -> Iterator[None]:
    """Do not wait for the disk or for a server's end, and do not read certificates.

    A flush to the disk matters after a power cut only: a killed process loses nothing that it has
    written. A test that is about flushing replaces `os.fsync` itself. Each client of a hub reads
    the certificates of all authorities, and the servers of the tests do without encryption.
    uvicorn looks ten times a second whether it is to end, and then waits as long once more. Where
    there is no accelerator, torch keeps each seed for later, with the stack of its caller. A server
    that ends lets the collector look through all objects again, which here are those of all tests.
    Charts take a quarter of a run's time: a test that reads them uses the fixture `charts`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "figure_svg", lambda fill, size: "<svg></svg>")
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None, raising=False)
        patch.setattr(uvicorn.server, "asyncio", _Asyncio())
        patch.setattr(gc, "unfreeze", lambda: None)
        if torch := sys.modules.get("torch"):
            for kind in (torch.cuda, torch.xpu, torch.mtia):
                if not kind.is_available():
                    patch.setattr(kind, "manual_seed_all", lambda seed: None, raising=False)
        yield


class _Asyncio:
    """asyncio with short pauses."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, _TICK))


# Wait for what another thread or process does, however busy the machine is.


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Return as soon as a condition holds; fail when it does not within the seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.005)


# Assertions on a run of the command line.


def succeeded(result, *expected):
    """Assert that a run ended well, and printed every text; return what it printed."""
    code, out, err = result
    assert code == 0, err
    for text in expected:
        assert text in out, out
    return out


def refused(result, *expected):
    """Assert that a run failed with exit code 2 and one message that contains every text."""
    code, out, err = result
    assert code == 2, err or out
    assert "Traceback" not in err
    for text in expected:
        assert text in err, err
    assert err.count("error: ") <= 1 or "Error: " in err


# Run an operation, and raise before one line of the package: an interrupt, or an error.


PACKAGE = str(Path(adapterhub.__path__[0]))
Place = tuple[str, int]  # a file and a line of it
Line = tuple[Place, int]


def interrupt() -> None:
    """Send a real SIGINT to this process: its handler runs here, in the main thread."""
    signal.raise_signal(signal.SIGINT)


def out_of_memory() -> None:
    """Raise what an allocation raises."""
    raise MemoryError("injected")


@functools.cache
def _safe_lines(file: str) -> frozenset[int]:
    """Return the lines `try:`, which run nothing that could fail, and those of `finally` blocks."""
    nodes = [n for n in ast.walk(ast.parse(Path(file).read_text())) if isinstance(n, ast.Try)]
    last = [s for n in nodes for s in n.finalbody]
    inside = {line for s in last for line in range(s.lineno, (s.end_lineno or s.lineno) + 1)}
    return frozenset({n.lineno for n in nodes} | inside)


@functools.cache
def _with_lines(file: str) -> frozenset[int]:
    """Return the lines of the heads of `with` statements.

    Python also reports them when a block ends, where no signal is handled before `__exit__` runs.
    """
    nodes = [n for n in ast.walk(ast.parse(Path(file).read_text())) if isinstance(n, ast.With)]
    return frozenset(line for n in nodes for line in range(n.lineno, n.body[0].lineno))


def _runs_inside(frame: Any, names: frozenset[str]) -> bool:
    while frame is not None:
        if frame.f_code.co_name in names and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


class Lines:
    """Counts the lines of the package that run, and calls `fault` before one of them.

    A line is a place and the number of its run. `undoing` are those that run inside of the
    functions `spared`.
    """

    def __init__(
        self,
        at: Line | None = None,
        fault: Callable[[], None] | None = None,
        spared: frozenset[str] = frozenset(),
    ) -> None:
        self.at, self.fault, self.spared = at, fault, spared
        self.runs: Counter[Place] = Counter()
        self.undoing: set[Line] = set()
        self.fired = False

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        if self.fired or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        entered: set[int] = set()
        heads, safe = (f(frame.f_code.co_filename) for f in (_with_lines, _safe_lines))

        def line(frame: Any, event: str, argument: Any) -> Any:
            if frame.f_lineno in heads:
                if frame.f_lineno in entered:
                    return line
                entered.add(frame.f_lineno)
            if event == "line" and not self.fired and frame.f_lineno not in safe:
                self._line(frame)
            return line

        return line

    def _line(self, frame: Any) -> None:
        place = frame.f_code.co_filename[len(PACKAGE) + 1 :], frame.f_lineno
        line = place, self.runs[place]
        self.runs[place] += 1
        if self.spared and _runs_inside(frame, self.spared):
            self.undoing.add(line)
        if line == self.at:
            self.fired = True
            sys.settrace(None)
            if self.fault is not None:
                self.fault()

    def run(self, operation: Callable[[], Any]) -> BaseException | None:
        """Run an operation, and return what it raised."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            operation()
        except BaseException as error:
            sys.settrace(before)
            error.__traceback__ = None  # frames keep contexts alive
            error.__context__ = None
            return error
        finally:
            sys.settrace(before)
        return None


def sample(lines: Lines, count: int | None, seed: int = 0) -> list[Line]:
    """Choose lines: of so many places one run, or of each place the first, the last and another."""
    generator = random.Random(seed)
    if count is not None:
        places = generator.sample(list(lines.runs), min(count, len(lines.runs)))
        return [(place, generator.randrange(lines.runs[place])) for place in places]
    return [
        (place, run)
        for place, runs in lines.runs.items()
        for run in sorted({0, runs - 1, generator.randrange(runs)})
    ]
