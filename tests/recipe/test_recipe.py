"""Recipes: file, flags and overrides become one recipe, or one error; the tables of other names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from adapterhub.errors import ConfigError
from adapterhub.methods.common.base import parse_methods
from adapterhub.recipe.other_names import ALIASES, MEANINGS
from adapterhub.recipe.recipe import NAMES, Recipe, read, read_draft

REQUIRED: dict[str, Any] = {"backbone": "a/b", "output": "out", "data": {"train": "t.tsv"}}


def recipe(text: str, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_win_over_flags_and_flags_over_the_file(tmp_path):
    path = recipe("seed: 1\nname: file\ntrain: {epochs: 1, warmup: 0.5}\n", tmp_path)
    flags = REQUIRED | {"seed": 2, "train": {"epochs": 2}}
    merged = read(path, ["train.epochs=3"], flags)
    assert (merged.name, merged.seed, merged.train.epochs) == ("file", 2, 3)
    assert merged.train.warmup == 0.5, "options that are not overridden are kept"


def test_a_method_spec_replaces_the_earlier_one_with_its_options(tmp_path):
    path = recipe("method: {lora: {rank: 4}}\n", tmp_path)
    assert read(path, flags=REQUIRED).method == {"lora": {"rank": 4}}
    flags = REQUIRED | {"method": {"prefix": {"length": 3}}}
    assert read(path, flags=flags).method == {"prefix": {"length": 3}}


def test_a_recipe_survives_yaml(tmp_path):
    first = read(None, ["train.learning_rate=1e-3", "new_tokens=[<a>]", "data.rows=5"], REQUIRED)
    assert isinstance(first, Recipe)
    assert read(recipe(first.to_yaml(), tmp_path)) == first


def test_every_missing_option_is_listed():
    with pytest.raises(ConfigError, match="incomplete") as error:
        read(None, ["data.eval=dev.tsv"])
    missing = ("data.train is missing", "output is missing")
    assert error.value.offenders == missing


@pytest.mark.parametrize("word", ["train.lr=1e-3", "lr=1e-3", "learning_rate=1e-3"])
def test_an_alias_is_read_as_its_option(word, tmp_path):
    expected = read(None, ["train.learning_rate=1e-3"], REQUIRED)
    assert read(None, [word], REQUIRED) == expected
    for text in ("{train: {lr: 1e-3}}", "{lr: 1e-3}"):
        assert read(recipe(text, tmp_path), [], REQUIRED) == expected


@pytest.mark.parametrize(("alias", "path"), ALIASES.items())
def test_every_alias_names_an_option_and_is_not_one(alias, path):
    group, _, own = path.rpartition(".")
    for written in {alias, f"{group}.{alias}".lstrip(".")}:
        assert NAMES.own_name(written) == path
    assert NAMES.own_name(path) == path
    assert alias not in MEANINGS
    if group:  # an option of one group only is accepted above it
        assert NAMES.own_name(own) in (path, own)


def test_no_name_with_a_meaning_is_an_option():
    assert len(MEANINGS) > 40
    for name in MEANINGS:
        assert NAMES.own_name(name) is None, name
        assert name == name.lower()
        assert "-" not in name


def test_options_are_accepted_above_their_group():
    words = ["epochs=2", "rows=9", "train=a.csv", "eval=b.csv", "text=body", "bs=4"]
    read_ = read(None, words, REQUIRED)
    assert (read_.train.epochs, read_.train.batch_size, read_.data.rows) == (2, 4, 9)
    assert (read_.data.train, read_.data.eval, read_.data.text) == ("a.csv", "b.csv", "body")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("target_modules=[q]", "target_modules is not an option; try method='lora(sites=["),
        ("train.lora_r=4", "train.lora_r is not an option; try method='lora(rank=8)'"),
        ("warmup_ratio=0.1", "; try train.warmup=0.1"),
        ("train.LR_scheduler_type=linear", "; try train.schedule=cosine"),
        ("data.output_dir=x", "; try output"),
        ("xyzzy=1", "valid options: backbone"),
        ("train=3", "train is 3, expected mapping"),
    ],
)
def test_a_wrong_name_says_what_to_type(word, expected):
    with pytest.raises(ConfigError) as error:
        read(None, [word], REQUIRED)
    assert expected in str(error.value)


def test_a_later_layer_wins_under_any_name():
    flags = REQUIRED | {"train": {"learning_rate": 2.0}}
    assert read(None, ["lr=1"], flags).train.learning_rate == 1.0
    assert read(None, ["train={}", "lr=1"], REQUIRED).train.learning_rate == 1.0


@pytest.mark.parametrize(
    "text", ["train: null\nlr: 1\n", "lr: 1\ntrain: 3\n", "1: 2\n", "data: {2: 1}\n"]
)
def test_data_of_other_shapes_is_a_config_error(text, tmp_path):
    with pytest.raises(ConfigError):
        read(recipe(text, tmp_path), flags=REQUIRED)


def test_specs_need_no_quotes_inside_of_lists_and_words(tmp_path):
    spec = "lora(rank=4, sites=[attn.q, attn.v])"
    same = parse_methods(spec)
    for words in ([f"method={spec}"], [f"method=[{spec}]"]):
        assert parse_methods(read(None, words, REQUIRED).method) == same  # type: ignore[arg-type]
    path = recipe(f"method: {spec}\n", tmp_path)
    assert parse_methods(read(path, flags=REQUIRED).method) == same  # type: ignore[arg-type]
    path = recipe("method: [lora(rank=4, alpha=8), prefix]\n", tmp_path)
    with pytest.raises(ConfigError, match="invalid method spec") as error:
        parse_methods(read(path, flags=REQUIRED).method)  # type: ignore[arg-type]
    assert error.value.hint.startswith("quotes around each")


def several(**options: object) -> dict[str, object]:
    """Return the options of a recipe with two tasks."""
    tasks = {"a": {"data": {"train": "a.tsv"}}, "b": {"task": "regression", "data": {"train": "b"}}}
    return {"backbone": "x/y", "output": "run", "tasks": tasks, **options}


def test_several_tasks_have_their_own_data_and_share_its_other_options(tmp_path):
    recipe = read(None, ["tasks.b.weight=2"], several(data={"rows": 7, "text": "t"}))
    assert {name: own.data.train for name, own in recipe.tasks.items()} == {"a": "a.tsv", "b": "b"}
    assert {own.data.rows for own in recipe.tasks.values()} == {7}
    assert recipe.tasks["b"].weight == 2
    assert recipe.of_task("b").task == "regression"
    assert recipe.of_task("a").task is None
    assert recipe.of_task("a").data.text == "t"
    assert not recipe.of_task("a").tasks
    mixed = read(None, ["mixing=temperature(t=3)"], several(data={"rows": 7}))
    (tmp_path / "recipe.yaml").write_text(mixed.to_yaml(), encoding="utf-8")
    assert read(tmp_path / "recipe.yaml") == mixed
    assert read(tmp_path / "recipe.yaml", ["mixing=equal"]).mixing == "equal"


@pytest.mark.parametrize(
    ("options", "match"),
    [({"data": {"train": "c.tsv"}}, "next to `tasks`"), ({"mixing": "sise"}, "did you mean 'size'"),
     ({"tasks": {"a": {"data": {"train": "a"}, "wieght": 2}}}, "weight"),
     ({"tasks": {"a": {"data": {"trian": "a"}}}}, "train"), ({"tasks": {"a": {}}}, "tasks.a.data"),
     ({"tasks": {"a b": {"data": {"train": "a"}}}}, "'a b'"), ({"tasks": {"a": 3}}, "tasks.a"),
     ({"tasks": {"a": {"data": 4}}}, "tasks.a.data"),
     ({"data": {"test": "c.tsv"}}, "next to `tasks`"),
     ({"tasks": {"test": {"data": {"train": "a"}}}, "data": {"test": 0.1}}, "a task called test")],
)  # fmt: skip
def test_wrong_tasks_are_refused(options, match):
    with pytest.raises(ConfigError) as error:
        read(None, (), several(**options))
    assert match in str(error.value)


def test_the_page_has_every_alias():
    page = (Path(__file__).parents[2] / "docs/guides/options.md").read_text(encoding="utf-8")
    table = page.partition("<!-- aliases:")[2].partition("<!-- /aliases")[0]
    listed = {
        name: path
        for names, path in re.findall(r"^\| (.*) \| `([\w.]+)` \|$", table, re.MULTILINE)
        for name in re.findall(r"\w+", names)
    }
    assert listed == ALIASES


@pytest.mark.parametrize(
    "meaning", [text for text in MEANINGS.values() if "=" in text.split(" ")[0]], ids=str
)
def test_what_a_meaning_says_to_type_is_accepted(meaning):
    """Up to the first comma or colon outside of a value in quotes."""
    if "'" in meaning:
        key, _, value = meaning.partition("='")
        word = f"{key}={value.partition(chr(39))[0]}"
    else:
        word = meaning.partition(",")[0].partition(":")[0]
    key = word.partition("=")[0]
    if key.isupper():
        return  # a variable of the environment
    assert NAMES.own_name(key) == key
    recipe = read_draft(None, [word])
    if key == "method":
        assert parse_methods(recipe.method)  # type: ignore[arg-type]
