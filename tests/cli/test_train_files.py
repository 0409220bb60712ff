"""What is given bare: a file of data, a recipe by its content, both, or something mistyped."""

import json

import pytest

from adapterhub.recipe.recipe import read
from tests.kit.selection import long_table
from tests.kit.session import succeeded

RECIPE = {"method": "lora(rank=2)", "seed": 3, "train": {"max_steps": 2, "batch_size": 8}}
STEPS = ("--steps", "2", "--batch-size", "8")


@pytest.fixture
def here(tmp_path, monkeypatch, backbone, data, adapterhub):
    """A folder with data and recipes; the function trains there with the tiny backbone."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine.csv", "mine.txt"):
        (tmp_path / name).write_text(data[0].read_text())
    for name in ("r.yaml", "r.txt", "r.json"):
        (tmp_path / name).write_text(json.dumps(RECIPE))
    rows = [dict(zip(("text", "label"), line.split("\t"), strict=True))
            for line in data[0].read_text().splitlines()[1:]]  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps({"data": rows}))
    (tmp_path / "train.json").write_text(json.dumps({"train": rows}))
    (tmp_path / "columns.json").write_text(
        json.dumps({name: [row[name] for row in rows] for name in ("text", "label")})
    )
    (tmp_path / "whole.yaml").write_text(json.dumps(RECIPE | {"data": "mine.csv"}))
    return lambda *words: adapterhub("train", *words, "--backbone", backbone, "--quiet")


@long_table(
    ("words", "output"),
    [
        (("mine.csv", *STEPS), "runs/mine"),
        (("mine.txt", *STEPS), "runs/mine"),
        (("--data", "mine.csv", *STEPS), "runs/mine"),
        (("data=mine.csv", *STEPS), "runs/mine"),
        (("data.train=mine.csv", *STEPS), "runs/mine"),
        (("mine.csv", "--data=mine.csv", *STEPS), "runs/mine"),
        (("r.yaml", "mine.csv"), "runs/mine"),
        (("mine.csv", "r.txt"), "runs/mine"),
        (("r.json", "mine.csv", "--output", "out"), "out"),
        (("r.json", "mine.csv", "output=out"), "out"),
        (("whole.yaml",), "runs/mine"),
        (("data.json", *STEPS), "runs/data"),
        (("train.json", *STEPS), "runs/train"),
        (("columns.json", *STEPS), "runs/columns"),
    ],
    parts=3,
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_data_and_recipes_are_told_apart_by_content(words, output, here, tmp_path):
    succeeded(here(*words))
    recipe = read(tmp_path / output / "recipe.yaml")
    assert (recipe.train.max_steps, recipe.task) == (2, "classification")
    assert recipe.seed == (3 if any(word.startswith(("r.", "whole")) for word in words) else 0)


def test_each_run_has_a_folder_of_its_own_and_the_newest_is_resumed(here, tmp_path):
    for _ in range(2):
        assert here("mine.csv", *STEPS)[0] == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"mine", "mine-2"}
    assert here("mine.csv", "--resume", "--steps", "2", "--batch-size", "8")[0] == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"mine", "mine-2"}


@pytest.mark.parametrize("flag", ["--from", "--on"])
def test_the_backbone_of_a_trained_adapter_is_taken(flag, here, adapterhub, tmp_path, backbone):
    assert here("mine.csv", *STEPS)[0] == 0
    code, _, err = adapterhub("train", "mine.csv", flag, "runs/mine", *STEPS, "--quiet")
    assert code == 0, err
    assert f"backbone: {backbone} (runs/mine)" in err
    assert read(tmp_path / "runs/mine-2/recipe.yaml").backbone == str(backbone)
