"""The command line itself: help texts, start-up time, unknown commands."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from adapterhub import cli


def seconds_of_children():
    """Return the CPU time of child processes, which barely depends on how busy the machine is."""
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize(
    "code",
    [
        "import adapterhub",
        "import sys; sys.argv=['adapterhub','--help']; from adapterhub.cli import main; main()",
    ],
)
def test_import_and_help_are_fast_and_do_not_load_torch(code):
    report = "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"
    child = f"import sys, atexit; {report}; {code}"
    best = 9.0
    for _ in range(3):
        start = seconds_of_children()
        done = subprocess.run(
            [sys.executable, "-c", child], capture_output=True, text=True, check=True
        )
        best = min(best, seconds_of_children() - start)
    assert done.stderr.strip() == "False"
    assert best < 0.5


VERBS = ("verify", "index", "gc")
COMMAND_LINES = [
    (),
    *((name,) for name in cli.COMMANDS),
    *(("registry", verb) for verb in VERBS),
]


def test_each_help_text_fits_80_columns(subtests):
    for words in COMMAND_LINES:
        result = CliRunner().invoke(cli.group, [*words, "--help"], prog_name="adapterhub")
        with subtests.test(" ".join(words)):
            assert result.exit_code == 0, result.exception
            assert result.output.startswith(f"Usage: {' '.join(('adapterhub', *words))} ")
            assert max(map(len, result.output.splitlines())) <= 80


def test_each_command_has_an_example_that_is_a_command_line(subtests):
    """Its options exist."""
    for name in cli.COMMANDS:
        with subtests.test(name):
            check_examples(name)


def check_examples(name):
    result = CliRunner().invoke(cli.group, [name, "--help"], prog_name="adapterhub")
    examples = result.output.partition("  Examples:\n")[2].partition("\n\n")[0]
    examples = examples.replace("\\\n", "")
    lines = [re.split(" {3}| > ", line.strip())[0] for line in examples.splitlines()]
    assert [line for line in lines if line.startswith(f"adapterhub {name}")], result.output
    for line in lines:
        if not line.startswith("adapterhub "):  # another program, such as curl
            continue
        _, called, *words = shlex.split(line)
        command = cli.group.get_command(None, called)
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        command.make_parser(click.Context(command, **command.context_settings)).parse_args(words)


def test_each_help_text_says_where_to_go_on(subtests):
    """By commands that exist, and once, also if the command is looked up twice."""
    for name in cli.COMMANDS:
        with subtests.test(name):
            check_where_to_go_on(name)


def check_where_to_go_on(name):
    for _ in range(2):
        result = CliRunner().invoke(cli.group, [name, "--help"], prog_name="adapterhub")
    _, *said = result.output.split("  See also: ")
    assert len(said) == 1, result.output
    places = re.split(r"[,;] (?!which |for |with |to )", " ".join(said[0].split()).rstrip("."))
    named = [place.split()[0].rstrip(",") for place in places]
    assert named
    assert set(named) <= set(cli.COMMANDS) - {name}


def test_the_list_of_commands_says_where_to_go_on():
    result = CliRunner().invoke(cli.group, ["--help"], prog_name="adapterhub")
    end = " ".join(result.output.split())
    assert end.endswith("has the options and examples of one. New here: `adapterhub quickstart`.")


def test_the_help_of_train_shows_the_most_used_options_and_where_the_others_are():
    result = CliRunner().invoke(cli.group, ["train", "--help"], prog_name="adapterhub")
    lines = result.output.splitlines()
    assert len(lines) <= 69, "the most used, not all"
    for flag in ("--backbone", "--method", "--train", "--output", "--epochs", "--lr"):
        assert sum(line.strip().startswith(flag) for line in lines) >= 1
    assert "options" in lines[-1] + lines[-2]
    assert "recipe" in lines[-1] + lines[-2]


def test_every_command_is_under_one_heading():
    assert sorted(name for names in cli.HEADINGS.values() for name in names) == sorted(cli.COMMANDS)


def test_each_command_is_one_line_in_the_list_of_commands():
    importlib.import_module("adapterhub.cli.list")  # binds `list` in the package to a module
    result = CliRunner().invoke(cli.group, ["--help", "--all"], prog_name="adapterhub")
    lines = result.output.splitlines()
    assert result.exit_code == 0, result.exception
    for name, summary in cli.COMMANDS.items():
        assert f"  {name:10}  {summary}" in lines


def test_every_command_module_is_listed():
    modules = {path.stem for path in Path(cli.__file__).parent.glob("[!_]*.py")}
    assert modules == cli.COMMANDS.keys()


def test_an_os_error_is_one_line_without_a_traceback(adapterhub, monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device", "run/adapter")

    monkeypatch.setattr(cli, "group", full)
    assert adapterhub("train") == (2, "", "error: run/adapter: No space left on device\n")
