"""Recipes: file, flags and overrides become one recipe, or an error; names; several tasks."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.errors import ConfigError
from adapterhub.methods.common.base import parse_methods
from adapterhub.recipe import recipe as recipes
from adapterhub.recipe.other_names import ALIASES, MEANINGS
from adapterhub.recipe.recipe import NAMES, read, read_draft

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

    path = recipe("method: {lora: {rank: 4}}\n", tmp_path)
    flags = REQUIRED | {"method": {"prefix": {"length": 3}}}
    assert read(path, flags=flags).method == {"prefix": {"length": 3}}, "with its options"


def test_a_recipe_survives_yaml(tmp_path):
    first = read(None, ["train.learning_rate=1e-3", "new_tokens=[<a>]", "data.rows=5"], REQUIRED)
    assert read(recipe(first.to_yaml(), tmp_path)) == first


def test_every_missing_option_is_listed():
    with pytest.raises(ConfigError, match="incomplete") as error:
        read(None, ["data.eval=dev.tsv"])
    assert error.value.offenders == ("data.train is missing", "output is missing")


def test_an_alias_is_read_as_its_option(tmp_path):
    expected = read(None, ["train.learning_rate=1e-3"], REQUIRED)
    for word in ("train.lr=1e-3", "lr=1e-3", "learning_rate=1e-3"):
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


# Several tasks: their own options, and the share of the steps of each.

SIZES = st.lists(st.integers(1, 10**7), min_size=1, max_size=8).map(
    lambda sizes: {f"t{n}": size for n, size in enumerate(sizes)}
)
MIXES = st.sampled_from(["size", "size(limit=100)", "equal", "temperature(t=3.5)",
                         "temperature(t=2, limit=1000)"])  # fmt: skip


@given(SIZES, MIXES)
def test_shares_add_up_and_keep_the_order_of_sizes(sizes, spec):
    shares = recipes.mixture_shares(recipes.parse_mixing(spec), sizes)
    assert list(shares) == list(sizes)
    assert math.isclose(sum(shares.values()), 1)
    assert all(share > 0 for share in shares.values())
    ordered = sorted(sizes, key=sizes.__getitem__)
    for small, large in itertools.pairwise(ordered):
        assert shares[small] <= shares[large] * (1 + 1e-12)


@given(SIZES, st.integers(1, 10**6))
def test_temperatures_lie_between_size_and_equal(sizes, limit):
    """Raffel et al. 2020, section 3.5.2: T = 1 is proportional, a large T is equal."""
    by_size = recipes.mixture_shares(recipes.parse_mixing({"size": {"limit": limit}}), sizes)
    cold = recipes.mixture_shares(recipes.ByTemperature(t=1, limit=limit), sizes)
    hot = recipes.mixture_shares(recipes.ByTemperature(t=1e9, limit=limit), sizes)
    equal = recipes.mixture_shares(recipes.parse_mixing("equal"), sizes)
    for name in sizes:
        assert math.isclose(cold[name], by_size[name])
        assert math.isclose(hot[name], equal[name], rel_tol=1e-6)
        warm = recipes.mixture_shares(recipes.ByTemperature(t=2, limit=limit), sizes)
        spread = [max(each.values()) - min(each.values()) for each in (by_size, warm, equal)]
        assert spread[0] >= spread[1] - 1e-12 >= spread[2] - 2e-12


def test_size_counts_at_most_the_limit():
    for spec, share in ("size(limit=10)", 0.5), ("size", 0.25):
        shares = recipes.mixture_shares(recipes.parse_mixing(spec), {"a": 10, "b": 30})
        assert shares == {"a": share, "b": 1 - share}


@given(SIZES, MIXES, st.integers(0, 9), st.integers(0, 9))
def test_draws_depend_on_seed_and_epoch_alone_and_follow_the_shares(sizes, spec, seed, epoch):
    shares = list(recipes.mixture_shares(recipes.parse_mixing(spec), sizes).values())
    drawn = recipes.draw_tasks(shares, 400, seed, epoch)
    assert drawn == recipes.draw_tasks(shares, 400, seed, epoch)
    assert set(drawn) <= set(range(len(shares)))
    for number, share in enumerate(shares):
        deviation = 6 * math.sqrt(400 * share * (1 - share)) + 1
        assert abs(drawn.count(number) - 400 * share) <= deviation
    if len(shares) > 1 and min(shares) > 0.05:
        assert drawn != recipes.draw_tasks(shares, 400, seed + 1, epoch)
        assert drawn != recipes.draw_tasks(shares, 400, seed, epoch + 1)


@pytest.mark.parametrize(
    ("spec", "match"),
    [("temprature", "temperature"), ("temperature(t=0.5)", "from 1"), ("size(limit=0)", "from 1"),
     ("size(limt=4)", "limit"), ("size, equal", "invalid mixing spec"),
     ({"size": 4}, "invalid mixing spec")],
)  # fmt: skip
def test_a_wrong_mixing_is_refused(spec, match):
    with pytest.raises(ConfigError) as error:
        recipes.parse_mixing(spec)
    assert match in str(error.value)


def test_names_and_weights_are_checked():
    recipes.check_task_names(["rte", "a-2", "9_x"])
    with pytest.raises(ConfigError) as error:
        recipes.check_task_names(["rte", "a.b", "", "x/y", "é"])
    assert len(error.value.offenders) == 4
    with pytest.raises(ConfigError, match="weight"):
        recipes.TaskOptions(weight=0)


def several(**options):
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
     ({"data": {"test": "c.tsv"}}, "next to `tasks`"),
     ({"tasks": {"test": {"data": {"train": "a"}}}, "data": {"test": 0.1}}, "a task called test")],
)  # fmt: skip
def test_wrong_tasks_are_refused(options, match):
    with pytest.raises(ConfigError) as error:
        read(None, (), several(**options))
    assert match in str(error.value)
