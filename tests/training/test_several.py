"""Several runs in one process: shared work, own folders, errors and signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapterhub.errors import ConfigError, TrainingError
from adapterhub.loop.processes import Stopped
from adapterhub.loop.report import Evaluated, Reporter, Timing
from adapterhub.recipe.recipe import Recipe
from adapterhub.training import loading, run_data
from adapterhub.training.loading import SharedLoader
from adapterhub.training.run import run
from adapterhub.training.several import run_several
from tests.kit.runs import Notes, Ticks, adapter_bytes, forks, killed, quiet
from tests.kit.selection import part_of


@pytest.fixture
def recipe(recipe_with) -> Recipe:
    words = ["method=lora(rank=2)", "train.max_steps=4", "dtype=fp32", "train.eval_every=2"]
    return recipe_with(*words, "train.tensorboard=false", "train.report=false")


def variants(recipe: Recipe, *methods: str) -> list[Recipe]:
    return [
        replace(recipe, method=method, output=f"{recipe.output}/{number}")
        for number, method in enumerate(methods)
    ]


def assert_ended_as_alone(ended: Iterable[Any], folder: Path) -> None:
    """Each run has its folder and the bytes of a run alone."""
    for number, each in enumerate(ended):
        assert each.error is None
        alone = replace(each.recipe, output=str(folder / f"alone-{number}"))
        run(alone, Reporter())
        assert adapter_bytes(each.recipe.output) == adapter_bytes(alone.output)
        assert each.outcome.folder == Path(each.recipe.output) / "adapter"


def test_each_run_has_its_folder_and_the_bytes_of_a_run_alone(recipe, tmp_path) -> None:
    """A note is given once."""
    said = Notes()
    recipes = variants(recipe, "lora(rank=2)", "pfeiffer", "freeze")
    assert_ended_as_alone(run_several(recipes, lambda recipe: said), tmp_path)
    assert said.notes
    assert len(set(said.notes)) == len(said.notes)


def test_a_run_that_fails_is_told_and_the_next_one_begins(recipe: Recipe) -> None:
    recipes = variants(recipe, "lora", "lora(sites=nowhere)", "full", "pfeiffer")
    wild = replace(recipe.train, learning_rate=1e30)
    recipes[2] = replace(recipes[2], train=wild)
    ended = list(run_several(recipes, quiet))
    assert [each.error is None for each in ended] == [True, False, False, True]
    assert isinstance(ended[2].error, TrainingError)


class Signals(Reporter):
    """Sends itself Ctrl-C at one evaluation."""

    def __init__(self, at: int) -> None:
        self.at = at

    def evaluated(self, line: Evaluated, timing: Timing) -> None:
        if line.step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("at", [2, 4])  # in the middle, and at the end of the first run
def test_ctrl_c_stops_all_and_resume_continues(recipe: Recipe, tmp_path: Path, at: int) -> None:
    recipes = variants(recipe, "lora", "pfeiffer")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped, match="after step 2 of 4" if at == 2 else "after 1 of 2 runs"):
        list(run_several(recipes, lambda recipe: Signals(at)))
    assert signal.getsignal(signal.SIGINT) == before
    assert not Path(recipes[1].output).exists()
    assert_ended_as_alone(run_several(recipes, lambda recipe: Reporter(), resume=True), tmp_path)


def ticking(recipes: list[Recipe], at: int) -> None:
    """Train, killed at a file operation."""
    with pytest.MonkeyPatch.context() as patch:
        Ticks(at).watch_files(patch)
        list(run_several(recipes, quiet))


@forks
def test_killed_at_any_file_before_the_first_checkpoint_and_resumed(
    recipe: Recipe, tmp_path: Path
) -> None:
    recipe = replace(recipe, train=replace(recipe.train, report=True, eval_every=1, max_steps=1))
    (alone,) = variants(replace(recipe, output=str(tmp_path / "alone")), "lora(rank=2)")
    list(run_several([alone], quiet))
    left = set[str]()
    for at in part_of(range(100), 2):  # each file has two: it is written, and put in its place
        recipes = variants(replace(recipe, output=str(tmp_path / f"at{at}")), "lora(rank=2)")
        killed(lambda recipes=recipes, at=at: ticking(recipes, at))
        output = Path(recipes[0].output)
        left |= {name[1:-13] for name in os.listdir(output) if name.endswith(".new")}
        if (output / "checkpoints" / "last").exists():
            break
        (ended,) = run_several(recipes, quiet, resume=True)
        assert ended.error is None
        assert adapter_bytes(recipes[0].output) == adapter_bytes(alone.output), f"killed at {at}"
        assert not [name for name in os.listdir(output) if name.endswith(".new")]
    assert left == {"recipe.yaml", "recipe.schema.json", "predictions.jsonl"}


def test_equal_data_are_read_once_and_options_are_checked_each_time(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_data, calls = run_data.read_data, []

    def counted(recipe: Recipe) -> run_data.RunData:
        calls.append(recipe)
        return read_data(recipe)

    monkeypatch.setattr(loading, "read_data", counted)
    loader = SharedLoader()
    first = loader.data(recipe)
    assert loader.data(replace(recipe, method="mam")) is first
    assert loader.data(replace(recipe, seed=1)).train == first.train
    assert len(calls) == 2
    with pytest.raises(ConfigError, match="metric"):
        loader.data(replace(recipe, seed=1, train=replace(recipe.train, best_metric="bleu")))
