"""What a user who waits sees: stages and bars on a terminal, plain lines elsewhere."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from adapterhub import status


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(status, "time", clock)
    return clock


def test_lines_tell_stages_and_work_every_ten_seconds(clock):
    lines = []
    display = status.StatusLines(lines.append)
    with (
        status.showing(display),
        status.doing("evaluating"),
        status.counting(2000, "predicting") as done,
    ):
        for _ in range(20):
            clock.now += 4
            done(100)
    assert lines == ["evaluating ...", *(f"evaluating: {n * 300:,} of 2,000" for n in range(1, 7))]


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=80)


def test_a_bar_shows_the_stage_and_leaves_no_trace(clock, monkeypatch):
    console = terminal()
    monkeypatch.setattr(status, "_new_progress", lambda: Progress(console=console, transient=True))
    display = status.StatusBar()
    with status.showing(display), status.doing("loading torch"):
        assert display._progress.live.is_started
        assert [task.description for task in display._progress.tasks] == ["loading torch"]
    assert not display._progress.live.is_started
    assert not display._progress.tasks
    written = console.file.getvalue()
    assert "loading torch" in written
    assert "\x1b[2K" in written  # the line is erased
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h")  # the cursor is shown again


def test_a_bar_is_shown_only_when_the_work_is_long(clock):
    progress = Progress(console=terminal())
    with status.showing(status.StatusBar(progress)), status.counting(4, "predicting") as done:
        done(1)
        assert not progress.tasks[0].visible
        clock.now += 2
        done(1)
        assert progress.tasks[0].visible
        assert (progress.tasks[0].completed, progress.tasks[0].total) == (2, 4)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_leaves_a_clean_terminal(error):
    progress = Progress(console=terminal())

    def batches():
        with status.counting(9, "predicting") as done:
            for _ in range(9):
                yield 1
                done(1)

    left = batches()

    def evaluate():
        with status.showing(status.StatusBar(progress)), status.doing("evaluating"):
            for _ in left:
                raise error

    with pytest.raises(error):
        evaluate()
    assert not progress.tasks
    left.close()  # later than the display: nothing to remove


def test_an_evaluation_takes_the_place_of_the_bar_of_the_run(clock):
    progress = Progress(console=terminal())
    run = progress.add_task("loss 0.5", total=100)
    with status.showing(status.StatusBar(progress, behind=run)), status.doing("evaluating"):
        assert [task.visible for task in progress.tasks] == [True]
        with status.counting(40, "predicting") as done:
            clock.now += 2
            done(10)
            assert [(t.description, t.visible) for t in progress.tasks] == [
                ("loss 0.5", False),
                ("evaluating", True),
            ]
        assert [(t.description, t.visible) for t in progress.tasks] == [("loss 0.5", True)]


def test_another_library_has_the_terminal_while_it_is_paused(monkeypatch):
    console = terminal()
    monkeypatch.setattr(status, "_new_progress", lambda: Progress(console=console, transient=True))
    display = status.StatusBar()
    with status.showing(display):
        with status.paused():  # nothing is shown yet
            assert display._progress is None
        with status.doing("loading a backbone"):
            with status.paused():
                assert not display._progress.live.is_started
            assert display._progress.live.is_started
