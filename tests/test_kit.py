"""The kit of tests: long tables run in part, and forks behave as a new interpreter would."""

import itertools
import time
from pathlib import Path

import pytest

from tests.kit import processes
from tests.kit.selection import part_of


def test_a_part_has_the_first_case_and_each_value():
    cases = list(itertools.product("ab", range(8), ["x", "y", "z"]))
    part = part_of(cases)
    assert part == [case for case in cases if case in part]
    assert len(part) == 6
    assert part[0] == cases[0]
    assert {c[0] for c in part} == {*"ab"}
    assert len({c[1] for c in part}) == 6
    assert {c[2] for c in part} == {*"xyz"}


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("number", [0, 1, 2, 7, 8, 9, 250])
def test_a_part_is_as_large_as_it_should_be_and_does_not_change(number, parts):
    cases = [pytest.param(str(i), [i], id=f"case {i}") for i in range(number)]
    part = part_of(cases, parts)
    assert len(part) == max(min(number, 1), number // parts)
    assert part == part_of(cases, parts)
    assert {id(case) for case in part} <= {id(case) for case in cases}


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.apart
def test_a_fork_has_its_own_words_folder_environment_and_main(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'", encoding="utf-8")
    text = (
        "import os, sys, threading, beside\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv[1:], os.getcwd(), os.environ['OWN'], beside.WORD)\n"
        "    print(repr(sys.stdin.read()), 'torch' in sys.modules, threading.active_count())\n"
    )
    ended = processes.run(script(tmp_path, text), "a", 1, folder=tmp_path, environment={"OWN": "x"})
    assert ended.printed == f"['a', '1'] {tmp_path} x found\n'' True 1\n"
    assert ended.returncode == 0
    ended = processes.run(
        script(tmp_path, "import os\nprint('OWN' in os.environ)"), folder=tmp_path
    )
    assert ended.printed == "False\n"


@pytest.mark.apart
@pytest.mark.parametrize(
    ("text", "code", "printed"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit; atexit.register(print, 'at the end')", 0, "at the end"),
    ],
)
def test_how_a_script_ends_is_told(text: str, code: int, printed: str, tmp_path: Path) -> None:
    ended = processes.run(script(tmp_path, text))
    assert ended.returncode == code
    assert printed in ended.printed


@pytest.mark.apart
def test_of_two_processes_one_that_fails_ends_the_other(tmp_path: Path) -> None:
    text = "import os, time\nprint(os.environ['WORLD_SIZE'])\nos.environ['RANK'] == '1' and 1 / 0\n"
    start = time.monotonic()
    ended = processes.run(script(tmp_path, text + "time.sleep(100)"), processes=2)
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.printed
    assert time.monotonic() - start < 60
    assert processes.run(script(tmp_path, text), processes=2).returncode == 1
