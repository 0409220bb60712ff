"""Several runs, and runs of stages: shared work, own folders, errors, signals and kills."""

import hashlib
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from adapterhub.config.yaml import dump_yaml, load_yaml
from adapterhub.errors import ConfigError
from adapterhub.loop.checkpoint import folder_of
from adapterhub.loop.processes import Stopped
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import Recipe
from adapterhub.training import loading
from adapterhub.training.loading import SharedLoader
from adapterhub.training.run import run
from adapterhub.training.several import run_several
from tests.kit.data import WORDS
from tests.kit.processes import fork_command
from tests.kit.runs import Notes, Ticks, adapter_bytes, forks, killed, quiet
from tests.kit.selection import ALL, part_of
from tests.kit.session import refused, succeeded, wait_until


@pytest.fixture
def recipe(recipe_with) -> Recipe:
    words = ["method=lora(rank=2)", "train.max_steps=4", "dtype=fp32", "train.eval_every=2"]
    return recipe_with(*words, "train.tensorboard=false", "train.report=false")


def test_ctrl_c_stops_all_and_resume_continues(recipe, tmp_path):
    """In the middle, and at the end of the first run."""
    methods = ("lora", "pfeiffer")
    for method in methods:
        run(replace(recipe, method=method, output=str(tmp_path / method)), Reporter())
    for at, words in ((2, "after step 2 of 4"), (4, "after 1 of 2 runs")):
        output = tmp_path / f"at{at}"
        recipes = [replace(recipe, method=m, output=str(output / m)) for m in methods]
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(Stopped, match=words):
            list(run_several(recipes, lambda recipe, at=at: Notes(at - 1, signal.SIGINT)))
        assert signal.getsignal(signal.SIGINT) == before
        assert not Path(recipes[1].output).exists()
        said = Notes()
        for each in run_several(recipes, lambda recipe, said=said: said, resume=True):
            assert each.error is None
            assert each.outcome.folder == Path(each.recipe.output) / "adapter"
            alone = tmp_path / each.recipe.method
            assert adapter_bytes(each.recipe.output) == adapter_bytes(alone)
        assert len(set(said.notes)) == len(said.notes) > 0, "a note is given once"


@forks
def test_killed_at_any_file_before_the_first_checkpoint_and_resumed(recipe, tmp_path):
    recipe = replace(recipe, train=replace(recipe.train, report=True, eval_every=1, max_steps=1))
    list(run_several([recipe], quiet))

    def ticking(cut: Recipe, at: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            Ticks(at).watch_files(patch)
            list(run_several([cut], quiet))

    left = set[str]()
    # Each file has two: it is written, and put in its place. The checkpoint has the last ones.
    for at in (*range(7), *part_of(range(7, 100), 2)) if ALL else (1, 3, 5, 9, 20):
        output = tmp_path / f"at{at}"
        cut = replace(recipe, output=str(output))
        killed(lambda cut=cut, at=at: ticking(cut, at))
        left |= {name[1:-13] for name in os.listdir(output) if name.endswith(".new")}
        if (output / "checkpoints" / "last").exists():
            break
        (ended,) = run_several([cut], quiet, resume=True)
        assert ended.error is None
        assert adapter_bytes(output) == adapter_bytes(recipe.output), f"killed at {at}"
        assert not [name for name in os.listdir(output) if name.endswith(".new")]
    assert left == {"recipe.yaml", "recipe.schema.json", "predictions.jsonl"}


def test_equal_data_are_read_once_and_options_are_checked_each_time(recipe, monkeypatch):
    counted = Mock(wraps=loading.read_data)
    monkeypatch.setattr(loading, "read_data", counted)
    loader = SharedLoader()
    first = loader.data(recipe)
    assert loader.data(replace(recipe, method="mam")) is first
    assert loader.data(replace(recipe, seed=1)).train == first.train
    assert counted.call_count == 2
    with pytest.raises(ConfigError, match="metric"):
        loader.data(replace(recipe, seed=1, train=replace(recipe.train, best_metric="bleu")))


@pytest.fixture
def staged(backbone, data, tmp_path):
    """Write a recipe of two stages."""
    lines = [" ".join((WORDS * 2)[i : i + 9]) for i in range(18)]
    (tmp_path / "text.txt").write_text("\n\n".join(lines * 4))
    train, dev = map(str, data)
    stages = [
        {"name": "domain", "task": "masked-lm", "train": {"epochs": 4, "save_every": 2},
         "data": {"train": str(tmp_path / "text.txt"), "stream": True}},
        {"name": "task", "from": "domain", "data": {"train": train, "eval": dev}},
    ]  # fmt: skip
    options = {"report": False, "tensorboard": False, "frozen_cache": "off",
               "epochs": 2, "max_length": 16, "batch_size": 8, "save_every": 3}  # fmt: skip
    common = {"backbone": str(backbone), "output": str(tmp_path / "run"), "train": options}
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_yaml({**common, "method": "lora(rank=2)", "stages": stages}))
    return path


def killed_at(staged: Path, output: Path, when: Path) -> None:
    """Start a run in a process of its own, and kill it when a file exists."""
    child = fork_command("train", staged, "--quiet", "--resume", "--output", output)
    try:
        wait_until(when.exists, 120)
    finally:
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@forks
def test_killed_in_each_stage_and_resumed_gives_the_same_bytes(staged, adapterhub, tmp_path):
    succeeded(adapterhub("train", staged, "--quiet"))
    cut = tmp_path / "cut"
    killed_at(staged, cut, folder_of(cut / "domain", "last"))
    assert not (cut / "stages.json").exists()
    killed_at(staged, cut, folder_of(cut / "task", "last"))
    assert json.loads((cut / "stages.json").read_text()).keys() == {"domain"}
    before = (cut / "domain" / "metrics.jsonl").stat().st_mtime_ns
    out = succeeded(adapterhub("train", "--resume", "--output", cut, "--quiet"))
    assert "finished before" in out
    assert (cut / "domain" / "metrics.jsonl").stat().st_mtime_ns == before, "not run again"
    for part in ("domain", "task", "."):  # of each stage, and the whole run
        assert adapter_bytes(cut / part) == adapter_bytes(tmp_path / "run" / part)
    assert (cut / "adapter" / "adapter.json").is_file()


def test_a_finished_stage_that_changed_is_refused(staged, adapterhub, tmp_path):
    """The run was killed after its first stage."""
    data, finished = load_yaml(staged), tmp_path / "run"
    first = tmp_path / "first.yaml"
    first.write_text(dump_yaml({**data, "stages": data["stages"][:1]}))
    succeeded(adapterhub("train", first, "--quiet"))
    shutil.rmtree(finished / "adapter")
    changed = staged.read_text().replace("epochs: 4", "epochs: 5")
    (tmp_path / "changed.yaml").write_text(changed)
    result = adapterhub("train", tmp_path / "changed.yaml", "--resume")
    refused(result, "the stage 'domain' is finished", "train.epochs: 4 then, 5 now")
    text = tmp_path / "text.txt"
    content = text.read_text()
    text.write_text(content + "\n\nmore")
    refused(adapterhub("train", staged, "--resume"), "the stage 'domain' is finished", "bytes: ")
    text.write_text(content)
    file = finished / "domain" / "adapter" / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    refused(adapterhub("train", staged, "--resume"), "is missing or was changed")
    (finished / "stages.json").write_text("{")
    refused(adapterhub("train", staged, "--resume"), "stages.json is broken")


def test_the_dry_run_and_what_is_refused_before_the_first_stage(staged, data, adapterhub, tmp_path):
    """Flags of one run, missing data, and an output folder that is used already."""
    assert "masked-lm" in succeeded(adapterhub("train", staged, "--dry-run"))
    for flag in ("--sweep", "seed=0,1"), ("--show", "1"), ("--open",):
        refused(adapterhub("train", staged, *flag), "a recipe of stages trains several runs")
    data[0].rename(tmp_path / "elsewhere")
    refused(adapterhub("train", staged), "train.tsv")
    assert not (tmp_path / "run").exists()
    (tmp_path / "elsewhere").rename(data[0])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_text("")
    refused(adapterhub("train", staged), "exists")


def test_a_stage_may_be_on_top_of_an_earlier_one(staged, adapterhub, tmp_path):
    """MAD-X: the adapter of the domain stays frozen below that of the task."""
    options = load_yaml(staged)
    del options["stages"][1]["from"]
    options["stages"][1]["on"] = ["domain"]
    staged.write_text(dump_yaml(options))
    succeeded(adapterhub("train", staged, "--quiet"))
    run = tmp_path / "run"
    manifest = json.loads((run / "adapter" / "adapter.json").read_text())
    domain = hashlib.sha256((run / "domain" / "adapter" / "adapter.json").read_bytes())
    assert [each["digest"] for each in manifest["on"]] == [domain.hexdigest()]
    succeeded(adapterhub("predict", run, WORDS[0]))
    code, out, _ = adapterhub("train", "--resume", "--output", run, "--quiet")
    assert code == 0
    assert out.count("finished before") == 2
    shutil.rmtree(run / "adapter")
    succeeded(adapterhub("train", "--resume", "--output", run, "--quiet"))
    assert (run / "adapter").is_dir()
