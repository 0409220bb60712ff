"""`adapterhub recipe`: a complete recipe, ready to train."""

import json

from adapterhub.config.yaml import load_yaml
from adapterhub.recipe.recipe import read
from tests.kit.session import refused, succeeded


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
