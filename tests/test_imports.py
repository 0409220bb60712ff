"""What modules and commands must not import: torch and its like take seconds."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from fresh_process import run_commands

LIGHT_MODULES = (
    "adapterhub",
    "adapterhub.cli.train",
    "adapterhub.data.docstrings",
    "adapterhub.data.examples",
    "adapterhub.files.native",
    "adapterhub.inference.record",
    "adapterhub.methods._described",
    "adapterhub.registry.hub",
    "adapterhub.registry.lockfile",
    "adapterhub.registry.search",
    "adapterhub.registry.tokens",
    "adapterhub.registry.verify",
    "adapterhub.tasks",
    "adapterhub.training.preflight",
    "adapterhub.training.recipe",
)
# Commands that need no model, and those that do with an argument that is wrong.
LIGHT_COMMANDS = {
    "--help": 0,
    "--version": 0,
    "train --help": 0,
    "train --schema": 0,
    "methods": 0,
    "methods lora": 0,
    "methods --json": 0,
    "methods nothing": 2,
    "options": 0,
    "options lora causal-lm": 0,
    "options nothing": 2,
    "recipe lora tagging": 0,
    "tasks": 0,
    "tasks causal-lm": 0,
    "list": 0,
    "list --json": 0,
    "show nothing": 2,
    "trust": 0,
    "key new key": 0,
    "login https://hub.example.org": 2,
    "logout https://hub.example.org": 2,
    "registry verify": 0,
    "lock nothing": 2,
    "sync": 2,
    "verify nothing": 2,
    "pull nothing": 2,
    "publish nothing": 2,
    "merge nothing --output out": 2,
    "export nothing --output out": 2,
    "import nothing --output out": 2,
    "combine nothing nothing --output out": 2,
    "predict nothing text": 2,
    "eval nothing --data nothing.csv": 2,
    "eval --backbone a/b --task prompted --data nothing.csv": 2,
    "inspect ./nothing": 2,
}
MOST_SECONDS = 1.0  # of CPU, more than Python itself takes to start; about 0.2 on a quiet machine


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    words = {module: [f"import:{module}"] for module in LIGHT_MODULES}
    return run_commands(words, tmp_path_factory.mktemp("modules"))


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    words = {command: command.split() for command in LIGHT_COMMANDS}
    return run_commands(words, tmp_path_factory.mktemp("commands"))


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_module_that_is_read_before_torch_is_needed_is_light(module, modules):
    assert modules[module][2] == []


@pytest.mark.parametrize("command", LIGHT_COMMANDS)
def test_a_command_without_a_model_is_light(command, commands):
    code, output, slow = commands[command]
    assert code == LIGHT_COMMANDS[command], output
    assert slow == []
    assert "Traceback" not in output


def cpu_seconds(words):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("command", ["--help", "methods", "tasks", "list"])
def test_a_command_answers_at_once(command, tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path))
    bare = cpu_seconds(["-c", "pass"])
    seconds = min(cpu_seconds(["-m", "adapterhub", command]) for _ in range(2))
    assert seconds - bare < MOST_SECONDS
