"""The schema of recipes: each recipe fits it, and what it refuses `train` refuses too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapterhub.cli.recipe import commented_recipe
from adapterhub.config.options import options_of, to_dict
from adapterhub.config.yaml import load_yaml, parse_mapping
from adapterhub.errors import ConfigError
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import dump_methods, method_text
from adapterhub.recipe.output_folder import SCHEMA
from adapterhub.recipe.recipe import SCHEMA_LINE, read_draft, recipe_schema, schema_bytes
from adapterhub.tasks import TASKS, dump_task
from tests.kit.compare import problems

RECIPES = Path(__file__).parents[2] / "recipes"
SCHEMA_OF_RECIPES: dict[str, Any] = json.loads(json.dumps(recipe_schema(), allow_nan=False))


def fits(data: Any) -> bool:
    return not problems(data, SCHEMA_OF_RECIPES)


def test_the_recipes_of_the_repository_fit():
    files = sorted(RECIPES.glob("*.yaml"))
    assert len(files) > 10
    for path in files:
        assert problems(load_yaml(path), SCHEMA_OF_RECIPES) == [], path.name


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_fits_in_each_syntax(name):
    method = METHODS[name].example()
    text = method_text(method)
    (normal,) = dump_methods([method])
    specs: list[Any] = [name, f"{name}(layers=all)", text, normal, {name: None}, {name: {}}]
    specs += [[name, f"lora, {name}"], [normal, "bitfit"]]
    for spec in specs:
        assert problems({"method": spec}, SCHEMA_OF_RECIPES) == [], spec
    assert not fits({"method": {name: {"rnak": 4}}})


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_fits_in_each_syntax(name):
    task = TASKS[name]()
    for spec in (name, f"{name}(a=1)", dump_task(task), {name: None}, {name: to_dict(task)}):
        assert problems({"task": spec}, SCHEMA_OF_RECIPES) == [], spec
    assert not fits({"task": {name: {}, "other": {}}})


@pytest.mark.parametrize(
    "data",
    [
        {"method": "lroa"},
        {"method": "lorax(rank=4)"},
        {"method": {"lroa": {}}},
        {"method": {"lora": {"rank": "four"}}},
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
    from adapterhub.methods.common.base import parse_methods
    from adapterhub.tasks import parse_task

    assert not fits(data)

    def parse() -> None:
        recipe = read_draft(flags=data)
        parse_methods(recipe.method)  # type: ignore[arg-type]
        parse_task(recipe.task)

    with pytest.raises(ConfigError):
        parse()


def test_editors_show_help_texts_and_defaults():
    *names, _, objects, _ = SCHEMA_OF_RECIPES["$defs"]["method"]["anyOf"]
    assert [each["const"] for each in names] == sorted(METHODS)
    assert all(each["description"] for each in names)
    for name, cls in METHODS.items():
        properties = objects["properties"][name]["properties"]
        assert list(properties) == [option.name for option in options_of(cls)]
        assert all(option["description"] for option in properties.values())
    assert objects["properties"]["lora"]["properties"]["rank"]["default"] == 8
    assert json.loads(schema_bytes()) == SCHEMA_OF_RECIPES
    assert f"$schema={SCHEMA}\n" in SCHEMA_LINE


def test_a_written_recipe_fits():
    for overrides in ([], ["method=[lora, lora(rank=4)]", "task=seq2seq", "train.max_steps=3"]):
        data = parse_mapping(commented_recipe(read_draft(None, overrides)), "")
        assert problems(data, SCHEMA_OF_RECIPES) == []
