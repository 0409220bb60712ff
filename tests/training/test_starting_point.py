"""Runs that start from a trained adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import ConfigError, MismatchError, TrainingError
from adapterhub.files.native import Saved
from adapterhub.loop.report import Reporter
from adapterhub.recipe.recipe import Recipe, read
from adapterhub.training.loading import starting_point
from adapterhub.training.run import prepare, run
from tests.kit.data import write_tsv


class Notes(Reporter):
    """Keeps the notes of a run."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def recipe(recipe_with) -> Recipe:
    words = ["method=lora(rank=2)", "train.max_steps=3", "name=first", "dtype=fp32"]
    return recipe_with(
        *words, "attention=eager", "train.tensorboard=false", "train.report=false", output="first"
    )


@pytest.fixture
def first(recipe: Recipe) -> Path:
    return run(recipe, Reporter()).folder


def second(recipe: Recipe, start: str | Path, **changes: object) -> Recipe:
    output = str(Path(recipe.output).with_name("second"))
    fields = {"method": None, "from_": str(start), "name": "second", "output": output, "seed": 5}
    return replace(recipe, **{**fields, **changes})  # type: ignore[arg-type]


def test_it_begins_with_the_tensors_of_the_other_and_records_it(
    recipe: Recipe, first: Path
) -> None:
    saved = Saved.at(first).tensors()
    prepared = prepare(second(recipe, first))
    assert all(torch.equal(t, saved[n]) for n, t in prepared.adapter.tensors().items())
    reporter = Notes()
    outcome = run(second(recipe, first), reporter)
    assert f"starts from {first}, with its head, since the labels are the same" in reporter.said
    manifest = Saved.at(outcome.folder).manifest
    origin = manifest.training["from"]
    assert (origin["name"], origin["version"]) == ("first", None)
    assert len(origin["digest"]) == 64
    assert manifest.methods == Saved.at(first).manifest.methods
    assert str(first) not in (outcome.folder / "adapter.json").read_text()
    assert "| starts from | first, sha256 " in (outcome.folder / "README.md").read_text()
    assert read(Path(recipe.output).with_name("second") / "recipe.yaml").from_ == str(first)


def test_a_published_one_is_found_by_its_name_and_its_version_recorded(
    recipe: Recipe, first: Path
) -> None:
    ah.publish(first, "helper")
    manifest = Saved.at(run(second(recipe, "helper"), Reporter()).folder).manifest
    assert manifest.training["from"]["name"] == "helper"
    assert manifest.training["from"]["version"] == "v1"


def test_with_other_labels_the_head_is_new(recipe: Recipe, first: Path, tmp_path: Path) -> None:
    rows = [(f"text {n}", f"class{n % 3}") for n in range(60)]
    source = write_tsv(tmp_path / "other.tsv", rows)
    data = replace(recipe.data, train=str(source), eval=None)
    reporter = Notes()
    run(second(recipe, first, data=data), reporter)
    assert any("a newly initialized head: the labels are others" in line for line in reporter.said)


def test_a_killed_run_goes_on_and_another_start_is_another_run(recipe: Recipe, first: Path) -> None:
    whole = run(second(recipe, first), Reporter())
    tensors = (whole.folder / "adapter.safetensors").read_bytes()
    again = run(second(recipe, first), Reporter(), resume=True)
    assert (again.folder / "adapter.safetensors").read_bytes() == tensors
    other = run(replace(recipe, output=f"{recipe.output}-3", seed=3), Reporter()).folder
    with pytest.raises((TrainingError, ConfigError)):
        run(second(recipe, other), Reporter(), resume=True)


def test_another_size_says_how_to_resize(recipe: Recipe, first: Path) -> None:
    with pytest.raises(MismatchError, match="cannot start from") as error:
        prepare(second(recipe, first, method="lora(rank=4)"))
    assert "adapterhub combine ADAPTER --rank" in str(error.value)


def test_the_option_is_called_from_and_takes_the_method_of_the_adapter() -> None:
    recipe = read(None, ["from=helper", "backbone=b", "data.train=t", "output=o"])
    assert (recipe.from_, recipe.method) == ("helper", None)
    assert "\nfrom: helper\n" in recipe.to_yaml()
    assert read(None, ["from=helper", "method=lora", "backbone=b", "data.train=t", "output=o"]
                ).method == "lora"  # fmt: skip


def test_without_one_nothing_is_recorded(recipe: Recipe, first: Path) -> None:
    assert starting_point(recipe) is None
    assert "from" not in Saved.at(first).manifest.training
