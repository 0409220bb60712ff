"""`adapterhub options`."""

from __future__ import annotations

import json

import pytest

from adapterhub.config.options import help_in_words, options_of
from adapterhub.data.options import DataOptions
from adapterhub.methods import METHODS
from adapterhub.recipe.recipe import TrainOptions
from adapterhub.tasks import TASKS
from tests.kit.session import refused, succeeded


def words_of(text):
    return " ".join(text.split())


def test_all_options_of_a_recipe_are_listed(adapterhub):
    out = succeeded(adapterhub("options"))
    assert max(map(len, out.splitlines())) <= 80
    for prefix, cls in (("data.", DataOptions), ("train.", TrainOptions)):
        for option in options_of(cls):
            assert f"  {prefix}{option.name} " in out
            assert words_of(help_in_words(option)[0]) in words_of(out)
    assert "text; required" in out
    assert "adapterhub recipe > recipe.yaml" in out


def test_each_name_fits_80_columns(adapterhub, subtests):
    for name in (*sorted(METHODS), *sorted(TASKS), "train", "data", "recipe"):
        code, out, _ = adapterhub("options", name)
        cls = METHODS.get(name) or TASKS.get(name)
        with subtests.test(name):
            assert code == 0
            assert out.startswith(name)
            assert max(map(len, out.splitlines())) <= 80
            assert all(f"  {option.name} " in out for option in (options_of(cls) if cls else ()))


def test_no_name_means_two_things():
    assert METHODS.keys().isdisjoint(TASKS)
    assert {"recipe", "data", "train"}.isdisjoint(METHODS.keys() | TASKS.keys())


def test_methods_and_tasks_print_the_same(adapterhub):
    assert adapterhub("methods", "lora") == adapterhub("options", "lora")
    assert adapterhub("tasks", "seq2seq") == adapterhub("options", "seq2seq")


@pytest.mark.parametrize("name", ["lr", "train.lr", "learning_rate", "train.learning_rate"])
def test_an_option_by_any_of_its_names(adapterhub, name):
    out = succeeded(adapterhub("options", name))
    assert out.startswith("train.learning_rate\n")
    assert "peak learning rate" in out


def test_json(adapterhub):
    out = succeeded(adapterhub("options", "train", "lora", "--json"))
    train, lora = json.loads(out).values()
    (every,) = (option for option in train if option["name"] == "train.log_every")
    assert every | {"help": ""} == {
        "name": "train.log_every", "type": "int", "default": 10, "help": ""
    }  # fmt: skip
    assert "rank" in [option["name"] for option in lora]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lorra", "did you mean 'lora'"),
        ("train.epohcs", "'train.epochs'"),
        ("target_modules", "sites=[attn.q, attn.v]"),
        ("warmup_ratio", "train.warmup=0.1"),
        ("qlora", "--method lora --quantize nf4"),
    ],
)
def test_an_unknown_name(adapterhub, name, expected):
    refused(adapterhub("options", name), expected)
