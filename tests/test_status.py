"""What a user who waits sees: stages and bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

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


def test_nothing_is_shown_without_a_display(capsys):
    with status.doing("loading"), status.counting(3, "predicting") as done:
        done(3)
    display = status.Display()
    display.update(display.begin("x", 3), 1)
    display.end(0)
    display.close()
    assert capsys.readouterr() == ("", "")


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


def test_lines_without_stages_tell_only_long_work(clock):
    lines = []
    with (
        status.showing(status.StatusLines(lines.append, stages=False)),
        status.doing("loading torch"),
    ):
        clock.now += 60
        with status.counting(10, "predicting") as done:
            done(5)
    assert lines == []


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


def test_a_stage_that_ends_late_does_not_remove_another():
    progress = Progress(console=terminal())
    with status.showing(status.StatusBar(progress)):
        late = status.counting(3, "generating")
        late.__enter__()
        with status.doing("saving"):
            late.__exit__(None, None, None)
            assert [task.description for task in progress.tasks] == ["saving"]


@pytest.mark.parametrize("total", [None, 8544])
def test_the_line_fits_a_terminal(total):
    progress = status._new_progress()
    progress.add_task("loading sentence-transformers/all-MiniLM-L6-v2", total=total)
    console = Console(file=io.StringIO(), width=80)
    console.print(progress.make_tasks_table(progress.tasks))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 1
    assert ("0/8544" in lines[0]) == (total is not None)


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


def test_a_file_is_read_with_a_stage_and_a_hub_dataset_without(tmp_path, monkeypatch):
    """Control characters of the file's name are escaped."""
    lines = []
    (tmp_path / "a\x1b.csv").write_text("")
    monkeypatch.chdir(tmp_path)
    with status.showing(status.StatusLines(lines.append)):
        for source in ("a\x1b.csv", "glue"):
            with status.reading(source):
                pass
    assert lines == ["reading a\\u001b.csv ..."]
