"""Run the commands of docs/start.md in an empty folder, and write their output and time below them.

    python scripts/start.py [--check]

`--check` runs them with four steps of training each and writes nothing; the tests do that.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "start.md"
_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```\n(?:\n\*.*? s\.\*\n)?", re.M | re.S)
_LONGEST = 16  # lines of an output that are shown; of a longer one, the first and the last
_HEAD, _TAIL = 8, 12
_HOMES = ("CACHE", "CONFIG", "DATA", "STATE")  # of users: nothing of theirs is read or written


def commands(block: str) -> list[str]:
    """Return the commands of a console block, each with its continuation lines."""
    lines = iter(block.splitlines())
    found = []
    for line in lines:
        if line.startswith("$ "):
            while line.endswith("\\"):
                line += "\n" + next(lines)
            found.append(line.removeprefix("$ "))
    return found


def execute(words: list[str] | str, folder: Path) -> str:
    """Run a command in a folder and return what it prints.

    Raises:
        RuntimeError: it fails.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "COLUMNS": "80", "PYTHONWARNINGS": "ignore"}
    environment |= {f"XDG_{name}_HOME": str(folder / ".home") for name in _HOMES}
    result = subprocess.run(
        words, cwd=folder, shell=isinstance(words, str), env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if result.returncode:
        raise RuntimeError(f"{words} failed:\n{result.stdout}")
    return result.stdout


def run_page(
    text: str, folder: Path, change: Callable[[str], str] = str
) -> list[tuple[str, str, float]]:
    """Run the blocks of a page in order.

    Args:
        text: the page.
        folder: the working directory.
        change: changes a command before it is run.

    Returns:
        Each command as it is in the page, what it printed, and its seconds.
    """
    done = []
    for kind, block in _BLOCK.findall(text):
        for command in [block] if kind == "python" else commands(block):
            start = time.perf_counter()
            if kind == "python":
                output = execute([sys.executable, "-c", block], folder)
            else:
                output = execute(change(command), folder)
            done.append((command, output, time.perf_counter() - start))
    return done


def few_steps(command: str) -> str:
    """Shorten the training of a command."""
    is_training = command.startswith("adapterhub train") and "--show" not in command
    return f"{command} train.max_steps=4" if is_training else command


def shortened(output: str) -> str:
    """Return the first and last lines of an output that is long."""
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    if len(lines) > _LONGEST + 4:
        lines = [*lines[:_HEAD], "...", *lines[-_TAIL:]]
    return "\n".join(lines) + "\n" if lines else ""


def with_outputs(text: str, done: list[tuple[str, str, float]]) -> str:
    """Return the page with the outputs and the times of its commands."""
    results = iter(done)

    def filled(match: re.Match[str]) -> str:
        kind, block = match.groups()
        if kind == "python":
            _, output, _ = next(results)
            return f"```python\n{block}```\n"
        parts, seconds = [], 0.0
        for command in commands(block):
            _, output, took = next(results)
            parts.append(f"$ {command}\n{shortened(output)}")
            seconds += took
        return f"```console\n{''.join(parts)}```\n\n*{seconds:.1f} s.*\n"

    return _BLOCK.sub(filled, text)


def main() -> None:
    """Run the page, and write it unless it is only checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        done = run_page(text, Path(folder), few_steps if options.check else str)
    if not options.check:
        PAGE.write_text(with_outputs(text, done), encoding="utf-8")
    print(f"{len(done)} commands and blocks, {sum(seconds for *_, seconds in done):.0f} s")


if __name__ == "__main__":
    main()
