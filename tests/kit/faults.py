"""Run an operation, and raise before one line of the package: an interrupt, or an error."""

from __future__ import annotations

import ast
import functools
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapterhub

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
