"""docs/start.md: its commands run in order, and print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import start

from adapterhub.data.docstrings import load_docstrings

TEXT = start.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, float]]:
    """Run the page with four steps of training, in an empty folder and registry."""
    return start.run_page(TEXT, tmp_path_factory.mktemp("start"), start.few_steps)


def printed(done: list[tuple[str, str, float]], word: str) -> str:
    """Return the output of the first command that has a word."""
    return next(output for command, output, _ in done if word in command)


@pytest.mark.timeout(600)
def test_the_page_runs_from_data_to_a_prediction_elsewhere(done) -> None:
    trained = printed(done, "train --train docstrings.csv")
    assert "docstrings.csv: semicolon-separated" in trained
    assert "guessed: --text summary --label part" in trained
    assert "rows are held out, in the same shares of each label" in trained
    assert "[CLS]" in printed(done, "--show 1")
    assert "lora - head" in printed(done, "compare")
    labels = {example.label for example in load_docstrings()[0]}
    first, second = printed(done, "predict lora").splitlines()
    assert {first.split()[0], second.split()[0]} <= labels
    assert "part@v1" in printed(done, "publish")
    assert printed(done, "predict part").split()[0] in labels
    assert printed(done, "import adapterhub").strip() in labels


def test_the_page_shows_the_output_and_the_time_of_each_command() -> None:
    blocks = re.findall(r"```console\n(.*?)```\n\n\*([\d.]+) s\.\*", TEXT, re.DOTALL)
    assert len(blocks) == TEXT.count("```console") >= 7
    commands = [command for block, _ in blocks for command in start.commands(block)]
    assert len(commands) == TEXT.count("\n$ ")
    assert all(block.strip().splitlines()[-1] for block, _ in blocks)


def test_outputs_are_written_below_their_commands(tmp_path: Path) -> None:
    page = (
        "```console\n$ echo a \\\n    b\n$ true\nold\n```\n\n*9.0 s.*\n\n```python\nprint(1)\n```\n"
    )
    done = start.run_page(page, tmp_path)
    assert [output for _, output, _ in done] == ["a b\n", "", "1\n"]
    once = start.with_outputs(page, done)
    assert once.startswith("```console\n$ echo a \\\n    b\na b\n$ true\n```\n\n*0.")
    assert start.with_outputs(once, start.run_page(once, tmp_path)).count("a b\n") == 1
    with pytest.raises(RuntimeError, match="no-such-command"):
        start.execute("no-such-command", tmp_path)
