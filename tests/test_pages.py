"""Every page of documentation runs: its code, its commands and its files, from top to bottom."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pages
import pytest

from adapterhub.data.docstrings import load_docstrings
from tests.kit import processes

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def is_run(page: str) -> bool:
    if pages.IN_COPY in text(page):
        return False  # by tests/test_guides.py
    if pages.ON_TRAINED_WEIGHTS in text(page):
        return False  # by tests/real/test_trained_pages.py
    return any(block.kind not in pages.SHOWN for block in pages.blocks(text(page)))


RUN = [page for page in PAGES if is_run(page)]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], list[dict]]:
    """Return a function that runs a page in a process of its own: what each block printed."""
    from tests.kit import stand_ins

    stand_ins.serve()

    def run(page: str) -> list[dict]:
        record = tmp_path / "done.json"
        words = ("scripts/pages.py", page, "--quick", "--record", record)
        ended = processes.run(*words, folder=ROOT)
        assert ended.returncode == 0, ended.printed
        return json.loads(record.read_text(encoding="utf-8"))

    return run


@pytest.mark.apart
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page: str, run) -> None:
    done = run(page)
    assert len(done) == len(pages.blocks(text(page)))
    if page == "docs/start.md":
        check_start(done)


def check_start(done: list[dict]) -> None:
    """The first half hour prints what its text promises."""
    printed = "".join(output for block in done for output in block["outputs"])
    assert "docstrings.csv: semicolon-separated" in printed
    assert "guessed: --text summary --label part" in printed
    assert "rows are held out, in the same shares of each label" in printed
    assert "[CLS]" in printed
    assert "lora - head" in printed
    assert "part@v1" in printed
    labels = {example.label for example in load_docstrings()[0]}
    predicted = [
        output for block in done for output in block["outputs"] if output.strip() in labels
    ]
    assert predicted, "the last block predicts in Python"


def test_the_first_half_hour_shows_the_time_of_each_command() -> None:
    page = text("docs/start.md")
    times = re.findall(r"```\n\n\*[\d.]+ s\.\*", page)
    assert len(times) == page.count("```console") >= 7


def test_every_block_runs_or_is_of_a_language_that_is_only_shown() -> None:
    shown = [b for page in PAGES for b in pages.blocks(text(page)) if not b.title]
    assert {b.kind for b in shown} <= {"python", "console", *pages.SHOWN}
    fences = sum(len(re.findall(r"^ *```", text(page), re.MULTILINE)) for page in PAGES)
    setups = sum(text(page).count("\n<!-- setup\n") for page in PAGES)
    assert fences == 2 * (sum(len(pages.blocks(text(page))) for page in PAGES) - setups)


def test_outputs_are_written_below_their_commands(tmp_path: Path) -> None:
    page = (
        "```console\n$ echo a \\\n    b\n$ true\nold\n```\n\n*9.0 s.*\n\n"
        "<!-- setup\none = 1\n-->\n```python\nprint(one)\n```\n"
        '```text title="output"\nold\n```\n'
    )
    done = pages.run_page("page", page, tmp_path)
    assert [one.outputs for one in done] == [["a b\n", ""], [""], ["1\n"], []]
    once = pages.with_outputs(page, done)
    assert once.startswith("```console\n$ echo a \\\n    b\na b\n$ true\n```\n\n*0.")
    assert once.endswith('```text title="output"\n1\n```\n')
    assert pages.with_outputs(once, pages.run_page("page", once, tmp_path)).count("a b\n") == 1


def test_a_failing_block_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)page:2: no-such-command failed"):
        pages.run_page("page", "```console\n$ no-such-command\n```\n", tmp_path)
    with pytest.raises(RuntimeError, match="page:3: division"):
        pages.run_page("page", "\n```python\n1 / 0\n```\n", tmp_path)
    page = '```python\nprint(1)\n```\n```text title="output"\n2\n```\n'
    with pytest.raises(RuntimeError, match="the page shows"):
        pages.run_page("page", page, tmp_path, quick=True)
    varying = page.replace('"output"', '"output, numbers vary"')
    assert pages.run_page("page", varying, tmp_path, quick=True)
    with pytest.raises(RuntimeError, match="the page shows"):
        pages.run_page("page", varying.replace("\n2\n", "\ntwo\n"), tmp_path, quick=True)
    answers = varying.replace("numbers vary", "a model's words").replace("1", "'it: 1, 2'")
    assert pages.run_page("page", answers.replace("\n2\n", "\nit: so\n"), tmp_path, quick=True)
    for other in ("\nthat: so\n", "\nit: so\nit: so\n"):
        with pytest.raises(RuntimeError, match="the page shows"):
            pages.run_page("page", answers.replace("\n2\n", other), tmp_path, quick=True)
    with pytest.raises(RuntimeError, match="without a title"):
        pages.run_page("page", "```\nx\n```\n", tmp_path)
