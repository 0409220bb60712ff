"""Every command that takes an adapter takes it in the same ways, with those below it."""

import json
import shutil
from pathlib import Path

import click
import pytest

from adapterhub import cli
from adapterhub.files.signature import write_key_pair
from adapterhub.registry.local import LocalRegistry
from tests.kit import registries
from tests.kit.session import refused, succeeded

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


def test_the_lines_are_complete_and_each_has_the_option_of_a_registry():
    context = click.Context(cli.group, **cli.group.context_settings)
    taking = set()
    for name in cli.COMMANDS:
        params = cli.group.get_command(context, name).params
        arguments = {p.name for p in params if isinstance(p, click.Argument)}
        if arguments & {"reference", "references", "source", "folder"}:
            taking.add(name)
        if arguments & {"reference", "references", "source"} and name != "push":
            assert "--registry" in {o for p in params for o in p.opts}, name
    assert taking == LINES.keys() | PUBLISHED_ONLY | FOLDERS_ONLY


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
        said = 'next: adapterhub predict run@v1 "a text"\n' if name == "publish" else ""
        assert (code, error) == (0, said), name
        shutil.rmtree(tmp_path / "registry", ignore_errors=True)


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
    said = {str(w.message) for w in recwarn if "is the folder" in str(w.message)}
    assert said == {"'mine' is the folder ./mine here; write mine@VERSION for the published one"}


# Every command on an adapter that is on top of another one: it brings that one along, or refuses.


# Command lines that work, and fail with a clear error when the adapter below is not there.
BRINGS = {
    "predict": ["predict", "task", "the movie was good"],
    "eval": ["eval", "task", "--data", "DEV"],
    "merge": ["merge", "task", "--output", "merged"],
    "pull": ["pull", "task", "--to", "pulled"],
    "lock": ["lock", "task", "--file", "other.lock"],
    "sync": ["sync", "--to", "restored"],
    "show": ["show", "task"],
    "diff": ["diff", "task", "lang", "task"],
    "suggest": ["suggest", "task", "--backbone", "BACKBONE", "--train", "TRAIN"],
    "train": ["train", "--on", "task", "--backbone", "BACKBONE", "--train", "TRAIN", "--dry-run",
              "--output", "higher"],
}  # fmt: skip
# Command lines that fail, with the words of their error.
REFUSES = {
    "export": (["export", "task", "--output", "peft"], "it is on top of lang"),
    "combine": (["combine", "task", "task@v1", "--output", "both"], "on top of others"),
    "convert": (["convert", "task", "--output", "lora"], "on top of others"),
    "resize": (["resize", "task", "--rank", "1", "--output", "small"], "on top of others"),
    "publish": (["publish", "RUN", "--registry", "empty"], "not published with it"),
    "bench": (
        ["bench", "--methods", "from task", "--backbone", "BACKBONE", "--train", "TRAIN",
         "--output", "study", "--steps", "1", "--seeds", "1", "--rates", "1"],
        "other adapters are below it",
    ),
}  # fmt: skip
# They read or change the files of one adapter only; `push` is as `publish`, in tests/registry.
ONE_ADAPTER = {
    "push", "list", "sign", "verify", "tag", "yank", "delete", "registry", "report", "compare",
    "serve",
}  # fmt: skip
NO_ADAPTER = {
    "quickstart", "sample", "recipe", "options", "methods", "tasks", "backbones", "inspect",
    "login", "logout",
    "key", "trust", "import", "token", "hub",
}  # fmt: skip


def test_every_command_is_listed_once():
    names = [*BRINGS, *REFUSES, *ONE_ADAPTER, *NO_ADAPTER]
    assert sorted(names) == sorted(cli.COMMANDS), "say what the command does with such an adapter"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An empty folder, where the first test puts what it has made."""
    return tmp_path_factory.mktemp("made") / "world"


@pytest.fixture
def world(adapterhub, backbone, data, tmp_path, monkeypatch, made):
    """A registry with `lang` and `task` on it; return a function that runs a command line."""
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.setenv("ADAPTERHUB_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    places = {"BACKBONE": backbone, "TRAIN": data[0], "DEV": data[1]}
    places["RUN"] = tmp_path / "runs" / "task"

    def typed(*words):
        return adapterhub(*(places.get(word, word) for word in words))

    if made.exists():
        shutil.copytree(made, tmp_path, dirs_exist_ok=True)
        return typed
    common = ["--backbone", "BACKBONE", "--train", "TRAIN", "--eval", "DEV", "--steps", "2"]
    common += ["train.tensorboard=false", "train.report=false", "dtype=fp32", "attention=eager"]
    for name, on in (("lang", []), ("task", ["--on", "lang"])):
        words = ["--method", "lora(rank=2)", "--name", name, "--output", f"runs/{name}"]
        succeeded(typed("train", *words, *common, *on))
        succeeded(typed("publish", f"runs/{name}"))
    assert typed("lock", "task")[0] == 0
    shutil.copytree(tmp_path, made)
    return typed


def test_commands_bring_it_along_or_say_what_is_missing(world):
    for name, words in BRINGS.items():
        out = succeeded(world(*words))
        if name in ("show", "lock", "diff"):
            assert "lang@v1" in out
    (copy,) = Path("pulled", "on").iterdir()
    assert (copy / "adapter.json").is_file()
    pins = json.loads(Path("adapterhub.lock").read_text())["adapters"]
    assert [each["reference"] for each in pins["task"]["on"]] == ["lang@v1"]
    LocalRegistry().delete("lang", "v1")
    new = {"merged", "pulled", "restored", "higher", "other.lock"}
    for name, words in BRINGS.items():
        code, _, err = world(*(f"{word}-2" if word in new else word for word in words))
        assert code == 2, name
        assert "was trained on lang@v1, which cannot be used" in err, (name, err)


def test_commands_that_cannot_use_it_refuse(world):
    for name, (words, text) in REFUSES.items():
        code, out, err = world(*words)
        assert code == 2, (name, out, err)
        assert text in " ".join(err.split()), (name, err)


def test_several_values_follow_one_flag(world):
    where = ("--backbone", "BACKBONE", "--train", "TRAIN", "--output", "new", "--dry-run")
    code, _, err = world("train", "--on", "lang", "task", "method=head", *where)
    assert (code, "trains on top of lang@v1" in err) == (0, True), err
    refused(world("train", "--on", "lang", "--on", "nowhere", *where), "nowhere")
