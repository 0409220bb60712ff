"""Progress reports for the user: stages, and the progress of long work.

Library code reports its work through `doing` and `counting`. A command chooses the display through
`showing`. Without a command, nothing is shown.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from adapterhub.errors import one_line

MODEL_LOCK = threading.RLock()
"""Lock held while a model is created, since models are created one at a time.

During creation, transformers and accelerate patch torch for all threads of the process. If two
models were created at once, one would get parameters without values, and the patches of the first
would never be removed.
"""
QUICK = 1.0  # seconds; faster work does not show a bar
PLAIN_EVERY = 10.0  # seconds between two lines about the same work without a terminal


class Display:
    """Shows nothing; subclasses show the most recent unfinished work."""

    def begin(self, text: str, total: int | None) -> int:
        """Show that a stage or a number of items begins, and return an id for it."""
        return 0

    def update(self, work: int, done: int) -> None:
        """Show how many items of this work are done."""

    def end(self, work: int) -> None:
        """Remove this work, if it is still there."""

    def close(self) -> None:
        """Remove all work, including work left behind by an error."""

    def pause(self) -> None:
        """Clear the line until `resume`."""

    def resume(self) -> None:
        """Show unfinished work again."""


_DISPLAY: ContextVar[Display | None] = ContextVar("display", default=None)
_STAGE: ContextVar[str] = ContextVar("stage", default="")


@contextlib.contextmanager
def showing(display: Display) -> Iterator[None]:
    """Show the work inside on a display, and leave a clean terminal at the end."""
    token = _DISPLAY.set(display)
    try:
        yield
    finally:
        _DISPLAY.reset(token)
        display.close()


@contextlib.contextmanager
def doing(text: str) -> Iterator[None]:
    """Report the current activity inside the context, such as "loading torch"."""
    display = _DISPLAY.get() or Display()
    work = display.begin(one_line(text), None)  # file names may contain control characters
    token = _STAGE.set(text)
    try:
        yield
    finally:
        _STAGE.reset(token)
        display.end(work)


def reading(source: str) -> contextlib.AbstractContextManager[None]:
    """Report that a file is being read; datasets from the Hub show their own bars."""
    return doing(f"reading {source}") if os.path.isfile(source) else contextlib.nullcontext()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pause the display inside the context, for a library that shows its own bars."""
    display = _DISPLAY.get() or Display()
    display.pause()
    try:
        yield
    finally:
        display.resume()


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Suppress the reports and progress bars of transformers while it loads or saves."""
    import transformers

    # A new task head is always missing from the checkpoint; reporting it would only alarm.
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


@contextlib.contextmanager
def counting(total: int, text: str) -> Iterator[Callable[[int], None]]:
    """Report work on `total` items; yield a function to call with each number done.

    The work is named after the enclosing stage, or `text` if there is none.
    """
    display, done = _DISPLAY.get() or Display(), 0
    work = display.begin(_STAGE.get() or text, total)

    def add(items: int) -> None:
        nonlocal done
        done += items
        display.update(work, done)

    try:
        yield add
    finally:
        display.end(work)


class StatusLines(Display):
    """Plain lines for logs and pipes: one when a stage begins, then one every ten seconds."""

    def __init__(self, write: Callable[[str], None], *, stages: bool = True) -> None:
        self._write, self._stages = write, stages
        self._work: list[tuple[str, int | None]] = []
        self._last = time.monotonic()

    def begin(self, text: str, total: int | None) -> int:
        """Print a line for a stage."""
        self._work.append((text, total))
        self._last = time.monotonic()
        if total is None and self._stages:
            self._write(f"{text} ...")
        return len(self._work) - 1

    def update(self, work: int, done: int) -> None:
        """Print a line if the last one is old."""
        text, total = self._work[work]
        if time.monotonic() - self._last >= PLAIN_EVERY and done < (total or 0):
            self._last = time.monotonic()
            self._write(f"{text}: {done:,} of {total:,}")


class StatusBar(Display):
    """A spinner with the stage, or a bar, on the last line of a terminal; removed at the end.

    `progress` is a rich progress display that is already shown for other work, as task `behind`;
    that task is hidden meanwhile. Without one, a line is added when work begins and removed when it
    ends.
    """

    def __init__(self, progress: Any = None, behind: Any = None) -> None:
        self._progress, self._is_own, self._behind = progress, progress is None, behind
        self._work: dict[int, float] = {}  # rich tasks and their start times

    def begin(self, text: str, total: int | None) -> int:
        """Show a stage at once, and items if they take long."""
        if self._progress is None:
            self._progress = _new_progress()
        if total is None and self._behind is not None:
            return -1  # the bar of the other work stays and shows the same
        task: int = self._progress.add_task(text, total=total, visible=total is None)
        self._work[task] = time.monotonic()
        if self._is_own and len(self._work) == 1:
            self._progress.start()
        return task

    def update(self, work: int, done: int) -> None:
        """Move the bar; replace the stage by it if the work is slow."""
        if work in self._work and time.monotonic() - self._work[work] >= QUICK:
            self._show_only(work)
            self._progress.update(work, completed=done)

    def end(self, work: int) -> None:
        """Remove this work; remove the line when no work is left."""
        if self._work.pop(work, None) is None:
            return
        self._progress.remove_task(work)
        if self._work or self._behind is not None:
            self._show_only(max(self._work) if self._work else self._behind)
        elif self._is_own:
            self._progress.stop()

    def pause(self) -> None:
        """Clear the line."""
        if self._is_own and self._work:
            self._progress.stop()

    def resume(self) -> None:
        """Show the line again."""
        if self._is_own and self._work:
            self._progress.start()

    def _show_only(self, work: int) -> None:
        for other in (*self._work, self._behind):
            if other is not None:
                self._progress.update(other, visible=other == work)

    def close(self) -> None:
        """Remove all work."""
        for work in [*self._work]:
            self.end(work)


def display_for_terminal(*, stages: bool = True) -> Display:
    """Return the display of a command: on a terminal a spinner or bar, elsewhere plain lines.

    `stages`: whether plain lines include the stages.
    """
    if sys.stderr is not None and sys.stderr.isatty():
        return StatusBar()
    return StatusLines(lambda text: print(text, file=sys.stderr, flush=True), stages=stages)


def _new_progress() -> Any:
    """Return rich's progress with a spinner and a text, and for counted work a bar and numbers."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )

    class Counted(ProgressColumn):
        """A column that is left empty for stages, whose length is unknown."""

        def __init__(self, column: ProgressColumn) -> None:
            super().__init__()
            self.column = column

        def render(self, task: Task) -> Any:
            return "" if task.total is None else self.column.render(task)

    console = Console(stderr=True, highlight=False)
    is_unicode = console.encoding.startswith("utf")
    counted = map(Counted, (BarColumn(30), MofNCompleteColumn(), TimeRemainingColumn()))
    return Progress(
        SpinnerColumn("dots" if is_unicode else "line"),
        TextColumn("{task.description}", markup=False),
        *counted,
        console=console,
        transient=True,
        redirect_stdout=False,  # rich would send the results of a pipe to the terminal
    )
