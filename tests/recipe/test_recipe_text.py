"""A recipe with every option and comments is read back as the same recipe, and fits its schema."""

import dataclasses
import json
from dataclasses import fields
from pathlib import Path

import pytest

from adapterhub.cli.recipe import commented_recipe
from adapterhub.config.options import options_of, to_dict
from adapterhub.config.yaml import load_yaml, parse_mapping
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import dump_methods, method_text, parse_methods
from adapterhub.recipe import recipe as recipes
from adapterhub.recipe.recipe import Recipe, TrainOptions, read, read_draft
from adapterhub.recipe.sweep import read_staged
from adapterhub.tasks import TASKS, dump_task, parse_task
from adapterhub.tasks.common.infer_task import DEFAULT, usual_method
from tests.kit.compare import problems
from tests.kit.selection import long_table

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
SCHEMA_OF_RECIPES = json.loads(json.dumps(recipes.recipe_schema(), allow_nan=False))


def fits(data):
    return not problems(data, SCHEMA_OF_RECIPES)


def normal(recipe):
    usual = usual_method(parse_task(recipe.task or DEFAULT).head)
    task = None if recipe.task is None else parse_task(recipe.task)
    return dataclasses.replace(recipe, method=parse_methods(recipe.method or usual), task=task)


def check(recipe, folder):
    text = commented_recipe(recipe)
    assert max(map(len, text.splitlines())) <= 80
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    assert normal(read_draft(folder / "recipe.yaml")) == normal(recipe)
    data = parse_mapping(text, "")
    assert fits(data)
    return data


def names_of(cls):
    return [option.name for option in options_of(cls)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_recipe_and_each_stage_of_the_repository(path, tmp_path):
    assert fits(load_yaml(path))
    staged = read_staged(path)
    for recipe in staged.stages.values() if staged else [read(path)]:
        data = check(recipe, tmp_path)
        assert list(data["train"]) == names_of(TrainOptions)
        assert list(data["data"]) == names_of(DataOptions)
        assert sorted(data) == sorted(names_of(Recipe))


@long_table("name", sorted(METHODS), 3)
def test_each_method_in_each_syntax(name, tmp_path):
    method = METHODS[name].example()
    text = method_text(method)
    data = check(read_draft(flags={"method": text}), tmp_path)
    assert list(data["method"][name]) == names_of(METHODS[name])
    (normal,) = dump_methods([method])
    specs = [name, f"{name}(layers=all)", text, normal, {name: None}, {name: {}}]
    for spec in [*specs, [name, f"lora, {name}"], [normal, "bitfit"]]:
        assert problems({"method": spec}, SCHEMA_OF_RECIPES) == [], spec
    assert not fits({"method": {name: {"rnak": 4}}})


@pytest.mark.parametrize("name", sorted(TASKS))
def test_each_task_in_each_syntax(name, tmp_path):
    data = check(read_draft(flags={"task": name}), tmp_path)
    # What is left out of files while it has its default is left out here, too.
    later = {field.name for field in fields(TASKS[name]) if field.metadata.get("omitted")}
    assert list(data["task"][name]) == [n for n in names_of(TASKS[name]) if n not in later]
    task = TASKS[name]()
    for spec in (name, f"{name}(a=1)", dump_task(task), {name: None}, {name: to_dict(task)}):
        assert problems({"task": spec}, SCHEMA_OF_RECIPES) == [], spec
    assert not fits({"task": {name: {}, "other": {}}})


def test_several_methods_and_one_twice(tmp_path):
    data = check(read_draft(flags={"method": ["prefix", "lora(rank=4)"]}), tmp_path)
    assert list(data["method"]) == ["prefix", "lora"]
    twice = ["lora(sites=[attn.q])", "lora(sites=[attn.v], rank=2)"]
    data = check(read_draft(flags={"method": twice}), tmp_path)
    assert [each["lora"]["rank"] for each in data["method"]] == [8, 2]


# Its schema


@pytest.mark.parametrize(
    "data",
    [
        {"method": "lorax(rank=4)"},
        {"method": {"lroa": {}}},
        {"method": {"lora": {"layers": 1.5}}},
        {"method": []},
        {"method": {}},
        {"task": ["classification"]},
        {"task": {}},
        {"train": {"epohcs": 3}},
        {"train": {"schedule": "linaer"}},
        {"seed": True},
        {"name": 3},
    ],
)
def test_what_it_refuses_train_refuses_too(data):
    assert not fits(data)
    with pytest.raises(ConfigError):  # noqa: PT012
        recipe = read_draft(flags=data)
        parse_methods(recipe.method)  # type: ignore[arg-type]
        parse_task(recipe.task)
