"""Commands of adapterhub in two processes, started by torchrun or accelerate, and their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adapterhub import cli
from tests.kit import warm


def run_all(commands):
    """Run commands one after another in this process, which may be one of several."""
    before = sys.argv
    try:
        for words in commands:
            sys.argv = ["adapterhub", *map(str, words)]
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert not ended.value.code, words
    finally:
        sys.argv = before


def in_two(folder, commands):
    """Run commands in two processes, with the environment that torchrun gives them."""
    ended = warm.run(__file__, written(folder, commands), processes=2)
    assert ended.returncode == 0, ended.printed[-4000:]
    return ended.printed


def launch(folder, commands, *launcher):
    """Start commands in two processes by a launcher, which is a module of Python."""
    count = [] if "--num_processes=2" in launcher else ["--nproc-per-node=2"]
    return start(*launcher, *count, __file__, written(folder, commands))


def written(folder, commands):
    path = folder / "commands.json"
    path.write_text(json.dumps([[*map(str, words)] for words in commands]))
    return path


def start(*words):
    """Start a module of Python, such as torchrun, without GPUs."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, words)],
        env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finished(started):
    try:
        printed, _ = started.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        started.terminate()
        printed, _ = started.communicate()
    assert started.returncode == 0, printed[-4000:]
    return printed


def same_adapters(one, two):
    files = (folder / "adapter" / "adapter.safetensors" for folder in (one, two))
    expected, found = map(load_file, files)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=1e-3, msg=name)


def losses(folder):
    """Return the loss of each step of a run, rounded as it was recorded."""
    return [line["loss"] for line in lines_of(folder) if "loss" in line]


def evaluations(folder):
    """Return the metrics of each evaluation of a run."""
    return [line["metrics"] for line in lines_of(folder) if "metrics" in line]


def lines_of(folder):
    return [*map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


if __name__ == "__main__":
    run_all(json.loads(Path(sys.argv[1]).read_text()))
