"""What modules and commands must not import: torch and its like take seconds."""

import json
import resource
import subprocess
import sys

import pytest

from adapterhub.cli import ALIASES, COMMANDS
from tests.kit.processes import LATER, SLOW, UNNEEDED, run_commands
from tests.kit.registries import write_sample
from tests.kit.runs import predictions, run_folder
from tests.kit.selection import ALL
from tests.kit.server import write_adapter

LIGHT_MODULES = (
    "adapterhub", "adapterhub.bench.advice", "adapterhub.cli.train", "adapterhub.data.docstrings",
    "adapterhub.data.examples", "adapterhub.files.native", "adapterhub.hub.server",
    "adapterhub.inference.record", "adapterhub.methods.common.base", "adapterhub.registry.hub",
    "adapterhub.registry.lockfile", "adapterhub.registry.search", "adapterhub.registry.tokens",
    "adapterhub.serving.vllm",
    "adapterhub.tasks", "adapterhub.training.run_data", "adapterhub.recipe.recipe",
)  # fmt: skip
# Commands that need no model, and those that do with an argument that is wrong.
WORKING = (
    "--help", "--version", "train --help", "train --schema", "methods", "methods lora",
    "methods --json", "options", "options lora causal-lm", "recipe lora tagging", "sample",
    "sample tickets --rows 3", "tasks", "tasks causal-lm", "backbones", "list", "list --json",
    "trust", "key new key", "registry verify", "hub user hub ada",
)  # fmt: skip
WRONG = (
    "methods nothing", "options nothing", "show nothing", "login https://hub.example.org",
    "logout https://hub.example.org", "hub verify nothing", "lock nothing", "sync",
    "verify nothing", "pull nothing", "publish nothing", "merge nothing --output out",
    "export nothing --output out", "import nothing --output out",
    "combine nothing nothing --output out", "convert nothing --output out",
    "resize nothing --output out --rank 2", "predict nothing text",
    "eval nothing --data nothing.csv", "eval --backbone a/b --task prompted --data nothing.csv",
    "inspect ./nothing",
)  # fmt: skip
LIGHT_COMMANDS = dict.fromkeys(WORKING, 0) | dict.fromkeys(WRONG, 2)
# What is done with a trained adapter without its backbone: one after the other, in one registry.
ADAPTER_COMMANDS = dict.fromkeys((
    "publish {adapter} --name demo", "list", "search demo", "show demo", "show {adapter}",
    "pull demo --to pulled", "tag demo@v1 best", "key new key", "sign demo@v1 --key key",
    "verify demo", "lock demo", "sync", "diff demo {adapter}", "registry verify", "registry index",
    "yank demo@v1 --reason old", "delete demo@v1 --yes --force",
    "token create shop --file tokens.json", "report {run}", "compare {run} {run}",
), 0)  # fmt: skip
ADAPTER_COMMANDS["verify demo"] = 1
# Those that load a backbone; `push` writes peft's files from it.
MODEL_COMMANDS = {
    "train", "bench", "suggest", "eval", "predict", "quickstart", "merge", "combine", "convert",
    "resize", "import", "export", "inspect", "push", "serve",
}  # fmt: skip
MOST_SECONDS = 1.0  # of CPU, more than Python itself takes to start; about 0.2 on a quiet machine


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """The results of modules, then of commands, in one process."""
    words = {module: [f"import:{module}"] for module in LIGHT_MODULES}
    words |= {command: command.split() for command in LIGHT_COMMANDS}
    return run_commands(words, tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="module")
def adapter_commands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    places = {
        "adapter": write_sample(folder / "polite"),
        "run": run_folder(folder / "run", predictions("classes")),
    }
    words = {command: command.format(**places).split() for command in ADAPTER_COMMANDS}
    return run_commands(words, folder)


def test_every_command_is_light_or_loads_a_backbone():
    commands = {**LIGHT_COMMANDS, **ADAPTER_COMMANDS}
    first = {words.split()[0] for words in commands}
    assert first | MODEL_COMMANDS == {*COMMANDS, *ALIASES, "--help", "--version"}
    done = {words.split()[0] for words, code in commands.items() if code != 2}
    assert {*COMMANDS} - MODEL_COMMANDS - done == {"login", "logout"}  # they need a hub


def test_a_command_on_a_trained_adapter_needs_no_torch(adapter_commands, subtests):
    for command, (code, output, slow) in adapter_commands.items():
        scores = command.split()[0] in ("report", "compare")
        with subtests.test(command):
            assert code == ADAPTER_COMMANDS[command], output
            assert not (SLOW - ({"sklearn", "scipy", "pandas"} if scores else set())) & {*slow}
            assert "Traceback" not in output


NOTE_IMPORTS = """
import json, sys
from pathlib import Path
from adapterhub.cli import main

def note(moment):
    Path(f"{moment}.txt").write_text(" ".join(sys.modules))

def run(words, moment):
    sys.argv = ["adapterhub", *words]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
    note(moment)

def first(*_):
    note("first")
    handle.remove()

predict, train = json.loads(sys.argv[1])
run(predict, "prediction")
from torch.optim.optimizer import register_optimizer_step_pre_hook
handle = register_optimizer_step_pre_hook(first)
run(train, "end")
"""


@pytest.fixture(scope="module")
def run(backbone, tmp_path_factory):
    """What a process has imported after a prediction, at a run's first step and at its end."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "data.csv").write_text("text,label\n" + "good,yes\nbad,no\n" * 4)
    predict = ["predict", write_adapter(backbone, folder / "adapter"), "good"]
    train = ["train", "--backbone", str(backbone), "--method", "lora", "--steps", "1"]
    train += ["--train", "data.csv", "--eval", "data.csv", "--output", "run"]
    command = [sys.executable, "-c", NOTE_IMPORTS, json.dumps([predict, train])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.skipif(not ALL, reason="its process takes ten seconds: with ADAPTERHUB_TESTS=all")
def test_a_run_and_a_prediction_import_no_more_than_they_use(run):
    """What comes later is imported after the first step."""
    moments = ("prediction", "first", "end")
    prediction, first, end = ({*(run / f"{each}.txt").read_text().split()} for each in moments)
    for imported in (prediction, first):
        assert "torch" in imported
        assert not (UNNEEDED | LATER) & imported
    assert not UNNEEDED & end
    assert LATER & end


def test_a_module_that_is_read_before_torch_is_needed_is_light(light, subtests):
    for module in LIGHT_MODULES:
        code, output, slow = light[module]
        with subtests.test(module):
            assert code == 0, output
            assert not SLOW & {*slow}


def test_a_command_without_a_model_is_light(light, subtests):
    for command, expected in LIGHT_COMMANDS.items():
        code, output, slow = light[command]
        with subtests.test(command):
            assert code == expected, output
            assert not SLOW & {*slow}
            assert "Traceback" not in output


def cpu_seconds(words):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_command_answers_at_once(tmp_path, monkeypatch, subtests):
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path))
    bare = cpu_seconds(["-c", "pass"])
    for command in ("--help", "list"):
        words = ["-m", "adapterhub", command]
        with subtests.test(command):  # twice only if the machine was busy
            assert any(cpu_seconds(words) - bare < MOST_SECONDS for _ in range(2))
