"""Run an operation, and raise before one line of the package: an interrupt, or an error."""

from __future__ import annotations

import ast
import functools
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import adapterhub

PACKAGE = str(Path(adapterhub.__path__[0]))
Place = tuple[str, int]


def interrupt() -> None:
    """Send a real SIGINT to this process: its handler runs here, in the main thread."""
    signal.raise_signal(signal.SIGINT)


def out_of_memory() -> None:
    """Raise what an allocation raises."""
    raise MemoryError("injected")


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
    """Counts the lines of the package that run, and calls `fault` before line number `at`.

    `spared` are functions whose lines, and those that they call, are not counted.
    """

    def __init__(
        self,
        at: int | None = None,
        fault: Callable[[], None] | None = None,
        spared: frozenset[str] = frozenset(),
    ) -> None:
        self.at, self.fault, self.spared = at, fault, spared
        self.places: list[Place] = []
        self.fired = False

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        if self.fired or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if self.spared and _runs_inside(frame, self.spared):
            return None
        entered: set[int] = set()
        heads = _with_lines(frame.f_code.co_filename)

        def line(frame: Any, event: str, argument: Any) -> Any:
            if frame.f_lineno in heads:
                if frame.f_lineno in entered:
                    return line
                entered.add(frame.f_lineno)
            self._line(frame, event)
            return line

        return line

    def _line(self, frame: Any, event: str) -> None:
        if event == "line" and not self.fired:
            if len(self.places) == self.at:
                self.fired = True
                sys.settrace(None)
                if self.fault is not None:
                    self.fault()
            place = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix(), frame.f_lineno
            self.places.append(place)

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


def sample(places: list[Place], count: int | None, seed: int = 0) -> Iterator[int]:
    """Choose numbers of lines: all, or some, of different places as far as possible."""
    if count is None or count >= len(places):
        return iter(range(len(places)))
    runs: dict[Place, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        runs[place].append(number)
    generator = random.Random(seed)
    chosen = [generator.choice(numbers) for numbers in runs.values()]
    return iter(sorted(generator.sample(chosen, min(count, len(chosen)))))
