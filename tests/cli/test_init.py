"""The command line itself: help texts, and words of other programs."""

import re
import shlex
from pathlib import Path

import click
import pytest

from adapterhub import cli
from adapterhub.cli import ALIASES, COMMANDS, HEADINGS, OTHER_FLAGS, OTHER_WORDS, group
from adapterhub.cli._format import bytes_text, seconds_text
from adapterhub.methods import METHODS
from adapterhub.tasks import TASKS
from tests.kit.session import refused, succeeded

YAML = re.compile(
    r"\bnull\b|mapping of|\banything\b|\b(str|int|bool|float) [|,]|list of (str|int)|\(s\)"
)


def command_of(words):
    """Return a command, and the words behind its name."""
    name, *words = words
    command = group.get_command(click.Context(group, **group.context_settings), name)
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    return command, words


def pages(words):
    """Return the words of a command, and of those below it."""
    command, _ = command_of(words)
    below = command.commands if isinstance(command, click.Group) else ()
    return [words, *(page for name in below for page in pages((*words, name)))]


def test_each_help_text_fits_80_columns_without_words_of_yaml(adapterhub, subtests):
    found = [(), *(page for name in COMMANDS for page in pages((name,)))]
    others = [("--help", "--all"), *(("options", *name) for name in zip([*METHODS, *TASKS]))]
    for words in (*((*page, "--help") for page in found), ("options",), *others):
        with subtests.test(" ".join(words)):
            out = succeeded(adapterhub(*words))
            assert max(map(len, out.splitlines())) <= 80
            assert not YAML.search(out), YAML.findall(out)
            if words[-1] == "--help":
                assert out.startswith(f"Usage: {' '.join(('adapterhub', *words[:-1]))} ")


def test_each_command_has_an_example_and_says_where_to_go_on(adapterhub, subtests):
    """The options of the example exist, and so do the commands, which are named once."""
    for name in COMMANDS:
        with subtests.test(name):
            out = succeeded(adapterhub(name, "--help"))
            examples = out.partition("  Examples:\n")[2].partition("\n\n")[0].replace("\\\n", "")
            lines = [re.split(" {3}| > ", line.strip())[0] for line in examples.splitlines()]
            assert [line for line in lines if line.startswith(f"adapterhub {name}")], out
            for line in lines:
                if line.startswith("adapterhub "):  # not another program, such as curl
                    command, words = command_of(shlex.split(line)[1:])
                    context = click.Context(command, **command.context_settings)
                    command.make_parser(context).parse_args(words)
            (said,) = succeeded(adapterhub(name, "--help")).split("  See also: ")[1:]
            places = re.split(r"[,;] (?!which |for |with |to )", " ".join(said.split()).rstrip("."))
            assert {place.split()[0].rstrip(",") for place in places} <= set(COMMANDS) - {name}


def test_every_command_has_a_module_and_is_under_one_heading():
    assert sorted(name for names in HEADINGS.values() for name in names) == sorted(COMMANDS)
    modules = {path.stem for path in Path(cli.__file__).parent.glob("[!_]*.py")}
    assert modules == COMMANDS.keys()


def test_an_os_error_is_one_line_without_a_traceback(adapterhub, monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device", "run/adapter")

    monkeypatch.setattr(cli, "group", full)
    assert adapterhub("train") == (2, "", "error: run/adapter: No space left on device\n")


def test_words_of_other_programs_name_a_command_or_its_absence(adapterhub, subtests):
    assert not OTHER_WORDS.keys() & {*COMMANDS, *ALIASES}
    for word, meant in OTHER_WORDS.items():
        with subtests.test(word):
            refused(adapterhub(word), meant)
            named = re.findall(r"adapterhub ([a-z]+)", meant)
            assert set(named) <= COMMANDS.keys()
            assert named or meant in ("adapterhub --version", "adapterhub --help --all")


@pytest.mark.parametrize("command", ["predict", "serve", "merge", "eval", "pull", "train"])
def test_flags_of_other_programs_have_a_hint(adapterhub, subtests, command):
    flags = {name for option in command_of([command])[0].params for name in option.opts}
    for flag, meant in OTHER_FLAGS.items():
        fits = not meant.startswith("--") or meant.split()[0] in flags
        if len(flag) > 1 and f"--{flag}" not in flags and fits and command != "train":
            with subtests.test(flag):
                code, _, err = adapterhub(command, "x", f"--{flag}", "1")
                assert (code, meant in " ".join(err.split())) == (2, True)
    refused(adapterhub(command, "x", "--gpu", "0"), "CUDA_VISIBLE_DEVICES")


def test_bytes_and_durations():
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 317_700: "318 kB", 1_540_000: "1.5 MB",
             2.5e9: "2.50 GB", 25e9: "25.0 GB", 3e12: "3.0 TB"}  # fmt: skip
    assert {size: bytes_text(size) for size in sizes} == sizes
    assert seconds_text(59.4) == "59.4 s"
    assert seconds_text(75.2) == "1 min 15 s"
