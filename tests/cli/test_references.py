"""Every command that takes an adapter takes it in the same ways."""

import shutil

import click
import pytest

from adapterhub import cli
from adapterhub.files.signature import write_key_pair
from tests.kit import registries

# Command lines with the adapter as {}; they succeed, whatever names it.
LINES = {
    "predict": "predict {} text",
    "eval": "eval {} --data dev.tsv",
    "show": "show {}",
    "verify": "verify {}",
    "sign": "sign {} --key key",
    "merge": "merge {} --output out",
    "combine": "combine {} {} --output out",
    "convert": "convert {} --output out",
    "resize": "resize {} --rank 1 --output out",
    "diff": "diff {} {}",
    "export": "export {} --check peft",
    "pull": "pull {} --to out",
    "publish": "publish {}",
}
# These take published versions only (of push, what is pushed is a folder).
PUBLISHED_ONLY = {"lock", "yank", "tag", "delete"}
FOLDERS_ONLY = {"publish", "push", "import"}


def commands():
    """Yield each command with the names of its arguments and options."""
    context = click.Context(cli.group, **cli.group.context_settings)
    for name in cli.COMMANDS:
        command = cli.group.get_command(context, name)
        arguments = {p.name for p in command.params if isinstance(p, click.Argument)}
        options = {o for p in command.params for o in p.opts}
        yield name, arguments, options


def test_the_lines_are_complete():
    taking = {n for n, a, _ in commands() if a & {"reference", "references", "source", "folder"}}
    assert taking == LINES.keys() | PUBLISHED_ONLY | FOLDERS_ONLY
    assert len(LINES) >= 10


def test_each_has_the_option_of_a_registry():
    named = {n for n, a, _ in commands() if a & {"reference", "references", "source"}}
    with_option = {n for n, _, options in commands() if "--registry" in options}
    assert named - {"push"} <= with_option


@pytest.fixture
def named_mine(trained, data, monkeypatch, tmp_path):
    """A working directory with a run called mine, and an empty registry."""
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    shutil.move(trained, "mine")
    shutil.copy(data[1], "dev.tsv")
    registries.new_key()  # or skip
    write_key_pair(here / "key")
    return here


def tried(adapterhub, line, name):
    """Run a line; return its exit code and standard error. No trusted key: verify ends with 1."""
    shutil.rmtree("out", ignore_errors=True)
    code, _, err = adapterhub(*line.format(name, name).split())
    notes = ("rows; columns: ", "evaluation rows: ")
    said = "".join(x for x in err.splitlines(keepends=True) if not any(n in x for n in notes))
    return code - (line.startswith("verify") and code == 1), said


def test_a_folder_is_taken_by_every_command(named_mine, adapterhub, tmp_path):
    for name, line in LINES.items():
        code, error = tried(adapterhub, line, "mine")
        if name == "publish":
            error = error.replace('next: adapterhub predict run@v1 "a text"\n', "")
        assert (code, error) == (0, ""), name
        if name == "publish":
            shutil.rmtree(tmp_path / "registry")


def test_a_published_name_is_taken_by_every_command(named_mine, adapterhub, tmp_path):
    adapterhub("publish", "mine", "--name", "mine", "--registry", tmp_path / "other")
    lines = {name: line for name, line in LINES.items() if name not in FOLDERS_ONLY}
    for name, line in lines.items():
        named = f"{line} --registry {tmp_path / 'other'}"
        assert tried(adapterhub, named, "mine@v1") == (0, ""), name
        assert tried(adapterhub, named, "mine") == (0, ""), "not the folder: the registry is named"
    shutil.rmtree(tmp_path / "other")
    for name, line in lines.items():
        code, err = tried(adapterhub, f"{line} --registry {tmp_path / 'other'}", "mine@v1")
        assert (code, "no registry" in err) == (2, True), name


def test_a_run_is_published_and_signed_by_its_name_wherever_it_is(named_mine, adapterhub):
    assert "run v1, sha256" in adapterhub("sign", "mine", "--key", "key", "--version", "v1")[1]
    _, printed, error = adapterhub("publish", "mine")
    assert "published run@v1 for tiny-bert" in printed, error
    assert adapterhub("show", "./mine")[1].startswith("run, in mine/adapter\n")


def test_what_was_taken_is_said_once(named_mine, adapterhub, recwarn):
    adapterhub("publish", "mine", "--name", "mine")
    assert adapterhub("predict", "mine", "text")[0] == 0
    said = [str(w.message) for w in recwarn if "is the folder" in str(w.message)]
    assert said
    assert {*said} == {"'mine' is the folder ./mine here; write mine@VERSION for the published one"}
