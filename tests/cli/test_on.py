"""Every command on an adapter that is on top of another one: it brings that one along, or refuses.

A new command must be added to one of the four lists.
"""

import json
import shutil
from pathlib import Path

import pytest

from adapterhub import cli
from adapterhub.registry.local import LocalRegistry
from tests.kit.session import refused, succeeded

# Command lines that work, and fail with a clear error when the adapter below is not there.
BRINGS = {
    "predict": ["predict", "task", "the movie was good"],
    "eval": ["eval", "task", "--data", "DEV"],
    "merge": ["merge", "task", "--output", "merged"],
    "pull": ["pull", "task", "--to", "pulled"],
    "lock": ["lock", "task", "--file", "other.lock"],
    "sync": ["sync", "--to", "restored"],
    "show": ["show", "task"],
    "diff": ["diff", "task", "lang"],
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
    code, _, err = world(
        "train", "--on", "lang", "task", "method=head", "--backbone", "BACKBONE", "--train",
        "TRAIN", "--output", "new", "--dry-run",
    )  # fmt: skip
    assert code == 0, err
    assert "trains on top of lang@v1" in err
    refused(world(
        "train", "--on", "lang", "--on", "nowhere", "--backbone", "BACKBONE", "--train",
        "TRAIN", "--output", "new", "--dry-run",
    ), "nowhere")  # fmt: skip
