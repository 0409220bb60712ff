"""Runs of stages: killed at any of them and resumed, they end with the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from adapterhub.config.yaml import dump_yaml, load_yaml
from adapterhub.loop.checkpoint import folder_of
from tests.kit.data import WORDS
from tests.kit.processes import fork_command
from tests.kit.runs import adapter_bytes, forks
from tests.kit.session import refused, wait_until

QUIET = {"report": False, "tensorboard": False, "frozen_cache": "off"}


@pytest.fixture
def recipe(backbone, data, tmp_path):
    """Write a recipe of two stages."""
    lines = [" ".join((WORDS * 2)[i : i + 9]) for i in range(18)]
    (tmp_path / "text.txt").write_text("\n\n".join(lines * 4))
    train, dev = map(str, data)
    stages = [
        {"name": "domain", "task": "masked-lm", "train": {"epochs": 4, "save_every": 2},
         "data": {"train": str(tmp_path / "text.txt"), "stream": True}},
        {"name": "task", "from": "domain", "data": {"train": train, "eval": dev}},
    ]  # fmt: skip
    options = {**QUIET, "epochs": 2, "max_length": 16, "batch_size": 8, "save_every": 3}
    common = {"backbone": str(backbone), "output": str(tmp_path / "run"), "train": options}
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_yaml({**common, "method": "lora(rank=2)", "stages": stages}))
    return path


def tensors_of(output: Path) -> list[bytes]:
    """Return the tensors of the adapter of each stage, and of the whole run."""
    return [adapter_bytes(folder) for folder in (output / "domain", output / "task", output)]


def killed_at(recipe: Path, output: Path, when: Path) -> None:
    """Start a run in a process of its own, and kill it when a file exists."""
    child = fork_command("train", recipe, "--quiet", "--resume", "--output", output)
    try:
        wait_until(when.exists, 120)
    finally:
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@forks
def test_killed_in_each_stage_and_resumed_gives_the_same_bytes(recipe, adapterhub, tmp_path):
    code, _, err = adapterhub("train", recipe, "--quiet")
    assert code == 0, err
    cut = tmp_path / "cut"
    killed_at(recipe, cut, folder_of(cut / "domain", "last"))
    assert not (cut / "stages.json").exists()
    killed_at(recipe, cut, folder_of(cut / "task", "last"))
    assert json.loads((cut / "stages.json").read_text()).keys() == {"domain"}
    before = (cut / "domain" / "metrics.jsonl").stat().st_mtime_ns
    code, out, err = adapterhub("train", "--resume", "--output", cut, "--quiet")
    assert code == 0, err
    assert "finished before" in out
    assert (cut / "domain" / "metrics.jsonl").stat().st_mtime_ns == before, "not run again"
    assert tensors_of(cut) == tensors_of(tmp_path / "run")
    assert (cut / "adapter" / "adapter.json").is_file()


@pytest.fixture
def finished(recipe, adapterhub, tmp_path):
    """Train only the first stage, as if the run had been killed after it."""
    data = load_yaml(recipe)
    first = tmp_path / "first.yaml"
    first.write_text(dump_yaml({**data, "stages": data["stages"][:1]}))
    code, _, err = adapterhub("train", first, "--quiet")
    assert code == 0, err
    shutil.rmtree(tmp_path / "run" / "adapter")
    return tmp_path / "run"


def test_stages_go_on_and_predict(recipe, finished, adapterhub):
    code, out, err = adapterhub("train", recipe, "--resume", "--quiet")
    assert code == 0, err
    assert "finished before" in out
    code, out, err = adapterhub("predict", finished, "the movie was good")
    assert (code, err) == (0, "")
    code, out, _ = adapterhub("train", recipe, "--resume", "--quiet")
    assert out.count("finished before") == 2
    shutil.rmtree(finished / "adapter")
    assert adapterhub("train", recipe, "--resume", "--quiet")[0] == 0
    assert (finished / "adapter").is_dir()


def test_a_finished_stage_that_changed_is_refused(recipe, finished, adapterhub, tmp_path):
    changed = recipe.read_text().replace("epochs: 4", "epochs: 5")
    (tmp_path / "changed.yaml").write_text(changed)
    result = adapterhub("train", tmp_path / "changed.yaml", "--resume")
    refused(result, "the stage 'domain' is finished", "train.epochs: 4 then, 5 now")
    text = tmp_path / "text.txt"
    content = text.read_text()
    text.write_text(content + "\n\nmore")
    refused(adapterhub("train", recipe, "--resume"), "the stage 'domain' is finished", "bytes: ")
    text.write_text(content)
    file = finished / "domain" / "adapter" / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    refused(adapterhub("train", recipe, "--resume"), "is missing or was changed")
    (finished / "stages.json").write_text("{")
    refused(adapterhub("train", recipe, "--resume"), "stages.json is broken")


def test_the_dry_run_lists_all_stages_and_writes_nothing(recipe, adapterhub, tmp_path):
    code, out, err = adapterhub("train", recipe, "--dry-run")
    assert code == 0, err
    for word in ("domain", "masked-lm", "task", "by the data", "lora(rank=2)"):
        assert word in out
    assert not (tmp_path / "run").exists()


def test_what_is_refused_before_the_first_stage(recipe, data, adapterhub, tmp_path):
    """Missing data, and an output folder that is used already."""
    content = data[0].read_text()
    data[0].unlink()
    refused(adapterhub("train", recipe), "train.tsv")
    assert not (tmp_path / "run").exists()
    data[0].write_text(content)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_text("")
    refused(adapterhub("train", recipe), "exists")


@pytest.mark.parametrize("flag", [("--sweep", "seed=0,1"), ("--show", "1"), ("--open",)])
def test_flags_of_one_run_are_refused(recipe, adapterhub, flag):
    refused(adapterhub("train", recipe, *flag), "a recipe of stages trains several runs")


def test_a_stage_may_be_on_top_of_an_earlier_one(recipe, adapterhub, tmp_path):
    """MAD-X: the adapter of the domain stays frozen below that of the task."""
    options = load_yaml(recipe)
    del options["stages"][1]["from"]
    options["stages"][1]["on"] = ["domain"]
    recipe.write_text(dump_yaml(options))
    code, _, err = adapterhub("train", recipe, "--quiet")
    assert code == 0, err
    run = tmp_path / "run"
    manifest = json.loads((run / "adapter" / "adapter.json").read_text())
    domain = hashlib.sha256((run / "domain" / "adapter" / "adapter.json").read_bytes())
    assert [each["digest"] for each in manifest["on"]] == [domain.hexdigest()]
    code, out, err = adapterhub("predict", run, WORDS[0])
    assert code == 0, err
    code, out, _ = adapterhub("train", "--resume", "--output", run, "--quiet")
    assert code == 0
    assert out.count("finished before") == 2
