"""`adapterhub options`, `methods` and `tasks`, by names in any case, and `recipe` of them."""

import json

import pytest

from adapterhub.config.options import help_in_words, options_of
from adapterhub.config.yaml import load_yaml
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import spec_options
from adapterhub.recipe.recipe import NAMES, TrainOptions, read
from adapterhub.tasks import TASKS, parse_task
from tests.kit.session import refused, succeeded


def words_of(text):
    return " ".join(text.split())


def test_methods_and_tasks_are_listed(adapterhub):
    for command, registry, text in (
        ("methods", METHODS, "2106.09685"),
        ("tasks", TASKS, "classification"),
    ):
        succeeded(adapterhub(command), text, *(f" {name} " for name in registry))
        assert json.loads(adapterhub(command, "--json")[1]).keys() == registry.keys()
    assert METHODS.keys().isdisjoint(TASKS), "no name means two things"
    assert {"recipe", "data", "train"}.isdisjoint(METHODS.keys() | TASKS.keys())
    out = succeeded(adapterhub("tasks", "ner"), "also called ner, token-classification")
    assert out.startswith("tagging: ")


@pytest.mark.parametrize("name", sorted([*METHODS, *TASKS, "train", "data", "recipe"]))
def test_each_name_has_its_options_in_80_columns_in_any_case(name, adapterhub):
    of_recipes = {"train": TrainOptions, "data": DataOptions}
    cls = METHODS.get(name) or TASKS.get(name) or of_recipes.get(name)
    out = succeeded(adapterhub("options", name))
    assert out.startswith(name)
    assert max(map(len, out.splitlines())) <= 80
    prefix = f"{name}." if name in of_recipes else ""
    for option in options_of(cls) if cls else ():
        assert f"  {prefix}{option.name} " in out
        assert words_of(help_in_words(option)[0]) in words_of(out)
    if cls and not prefix:
        assert adapterhub("options", name.upper())[1] == out
        command = "methods" if name in METHODS else "tasks"
        assert adapterhub(command, name.replace("-", "_").title())[1] == out


@pytest.mark.parametrize(
    ("word", "option"),
    [
        *((word, "train.learning_rate") for word in ("LR", "train.lr", "learning-rate")),
        ("Train.Max-Steps", "train.max_steps"),
        ("METHOD", "method"),
    ],
)
def test_an_option_is_found_by_any_of_its_names(word, option, adapterhub):
    assert NAMES.own_name(word) == option
    assert succeeded(adapterhub("options", word)).startswith(f"{option}\n")
    section, _, inner = word.rpartition(".")
    *above, name = option.split(".")
    expected = {above[0]: {name: 3}} if above else {name: 3}
    assert NAMES.normal_form({section: {inner: 3}} if section else {word: 3}) == expected


def test_specs_are_read_in_any_case(adapterhub):
    assert spec_options("LoRA") == spec_options(["Lora"]) == spec_options({"LORA": {}})
    assert spec_options("BitFit, LoRA(Rank=4)") == spec_options(["bitfit", "lora(rank=4)"])
    assert adapterhub("recipe", "LoRA", "Seq2Seq")[0] == 0
    task = parse_task("Classification(Class-Weights=balanced)")
    assert task == parse_task({"classification": {"class_weights": "balanced"}})
    with pytest.raises(ConfigError, match="given twice"):
        spec_options("lora(rank=3, Rank=4)")


# `adapterhub recipe`: a complete recipe, ready to train


def test_a_recipe_is_written_to_a_file_and_trained(adapterhub, backbones, data, tmp_path):
    words = ("--method", "lora", "--task", "seq2seq", "--backbone", backbones("t5"))
    files = ("--train", data[0], "--eval", data[1], "--output", tmp_path / "run")
    out = succeeded(adapterhub("recipe", *words, *files, "--epochs", 1, "train.tensorboard=false"))
    (tmp_path / "my.yaml").write_text(out, encoding="utf-8")
    succeeded(adapterhub("train", tmp_path / "my.yaml", "--steps", 1, "--quiet"))
    assert read(tmp_path / "run" / "recipe.yaml").train.max_steps == 1


def test_names_and_flags_and_words_give_the_same_recipe(adapterhub, tmp_path):
    out = succeeded(adapterhub("recipe", "prefix", "causal-lm", "lr=1e-3"))
    assert out.startswith("# yaml-language-server: $schema=recipe.schema.json\n# adapterhub train")
    assert max(map(len, out.splitlines())) <= 80
    words = ("method=prefix", "--task", "causal-lm", "train.learning_rate=1e-3")
    assert adapterhub("recipe", *words)[1] == out
    (tmp_path / "one.yaml").write_text(out, encoding="utf-8")
    assert adapterhub("recipe", tmp_path / "one.yaml")[1] == out
    other = adapterhub("recipe", tmp_path / "one.yaml", "lora")[1]
    assert "  lora:\n" in other
    assert "  prefix:\n" not in other


def test_save_writes_the_schema_beside_the_recipe(adapterhub, tmp_path):
    file = tmp_path / "my.yaml"
    succeeded(adapterhub("recipe", "--save", file), f"next: adapterhub train {file}")
    assert load_yaml(file)["train"]["log_every"]
    schema = json.loads((tmp_path / "recipe.schema.json").read_text(encoding="utf-8"))
    assert "train" in schema["properties"]
    refused(adapterhub("recipe", "--save", file), "exists", "another --save")
    refused(adapterhub("recipe", "--save", tmp_path / "no" / "my.yaml"), "No such file")


def test_json(adapterhub):
    train, lora = json.loads(succeeded(adapterhub("options", "train", "lora", "--json"))).values()
    (every,) = (option for option in train if option["name"] == "train.log_every")
    assert (every["type"], every["default"], bool(every["help"])) == ("int", 10, True)
    assert "rank" in [option["name"] for option in lora]
