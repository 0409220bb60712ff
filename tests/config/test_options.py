"""Options of a dataclass: from data and to data, other names, documentation, JSON schema, YAML."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.config import options
from adapterhub.config.options import OptionNames, from_dict, option
from adapterhub.config.yaml import parse_mapping
from adapterhub.errors import ConfigError
from tests.kit.compare import problems
from tests.kit.selection import ALL

few = settings(max_examples=100 if ALL else 40)


@dataclasses.dataclass(frozen=True)
class Train:
    epochs: int = option(3, "passes over the data")
    rate: float = option(1e-3, "learning rate")
    dropout: bool = option(False, "keep dropout on")
    every: Literal["epoch"] | int = option("epoch", "when to evaluate")

    def __post_init__(self) -> None:
        if self.epochs < 0:
            raise ConfigError(f"epochs is {self.epochs}", expected="0 or more")


@dataclasses.dataclass(frozen=True)
class Recipe:
    name: str
    train: Train = dataclasses.field(default_factory=Train)
    seed: int | None = option(None, "seed")
    sites: tuple[str, ...] = option((), "a help text of many words " * 9)
    first: float | int = 0.0
    span: tuple[int, float] = option((0, 1.0), "two numbers")
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    extra: Train | None = None
    runs: tuple[Train, ...] | None = option(None, "more runs")
    method: object = option(None, "a method spec")
    dtype: Literal["bf16", "fp32"] | None = option(None, "precision")


finite = st.floats(allow_nan=False, allow_infinity=False)
trains = st.builds(
    Train,
    epochs=st.integers(0),
    rate=finite,
    dropout=st.booleans(),
    every=st.just("epoch") | st.integers(),
)
recipes = st.builds(
    Recipe,
    name=st.text(),
    train=trains,
    seed=st.none() | st.integers(),
    sites=st.lists(st.text()).map(tuple),
    span=st.tuples(st.integers(), finite),
    rates=st.dictionaries(st.text(), finite),
    extra=st.none() | trains,
    runs=st.none() | st.lists(trains, max_size=3).map(tuple),
    method=st.none() | st.text() | st.lists(st.integers()),
    dtype=st.sampled_from(["bf16", "fp32", None]),
)


def offenders(data: Mapping[str, object], where: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        from_dict(Recipe, data, where)
    return str(caught.value)


SCHEMA = options.json_schema(Recipe)
# What a schema cannot refuse: whole and large numbers, keys that are no texts, checks in Python.
LOOSE = {"1.0", repr({"rate": 10**400}), "{1.5: 1.0}", "{1: 1.0, '1': 2.0}", "{'epochs': -1}"}


@few
@given(recipes)
def test_to_dict_returns_json_data_that_fits_the_schema(recipe):
    data = json.loads(json.dumps(options.to_dict(recipe)))
    assert from_dict(Recipe, data) == recipe
    assert problems(data, SCHEMA) == []


def test_to_dict_names_values_that_it_cannot_serialize():
    with pytest.raises(ConfigError, match=r"method\.run\[1\].*Path"):
        options.to_dict(Recipe("a", method={"run": [1, Path("x")]}))


def test_one_error_lists_all_problems():
    text = offenders({"train": {"epohcs": 1, "rate": "fast", "dropout": 1}, "seed": "1"})
    assert "train.epohcs is not an option; did you mean 'epochs'?" in text
    for name in ("train.rate is 'fast'", "train.dropout is 1", "seed is '1'", "name is missing"):
        assert f"{name}, expected" in text
    assert "recipe.name is missing" in offenders({}, "recipe")


def test_an_invalid_value_is_reported_with_the_expected_type(subtests):
    cases = [
        ("seed", True, "seed is True, expected int"),
        ("seed", 1.0, "seed is 1.0, expected int"),
        ("name", 5, "name is 5, expected str; put it in quotes"),
        ("name", None, "name is None, expected str"),
        ("sites", "attn.q", "sites is 'attn.q', expected list of str"),
        ("sites", ["a", 1], "sites[1] is 1, expected str"),
        ("span", [1], "span has 1 items, expected 2"),
        ("rates", {"a": "x"}, "rates.a is 'x', expected float"),
        ("rates", {1.5: 1.0}, "rates has the key 1.5"),
        ("rates", {1: 1.0, "1": 2.0}, "rates has the key 1 twice"),
        ("rates", [], "rates is [], expected mapping of float"),
        ("train", 3, "train is 3, expected mapping (epochs, rate"),
        ("train", {"every": "epohc"}, "did you mean 'epoch'?"),
        ("train", {"rate": 10**400}, "expected float"),
        ("train", {"epochs": -1}, "train: epochs is -1"),
        ("train", {"zzz": 1}, "train.zzz is not an option; valid options: epochs, rate"),
        ("extra", {"epohcs": 1}, "extra.epohcs is not an option"),
        ("runs", [{}, {"epochs": "1"}], "runs[1].epochs is '1', expected int"),
        ("dtype", "bf61", "dtype is 'bf61', expected bf16 | fp32 | null; did you mean 'bf16'?"),
    ]
    for key, value, message in cases:
        with subtests.test(key=key):
            assert message in offenders({"name": "a", key: value})
            if repr(value) not in LOOSE:
                assert problems({"name": "a", key: value}, SCHEMA)


def test_a_union_keeps_the_type_of_the_value():
    read = from_dict(Recipe, {"name": "a", "first": 3, "train": {"rate": 1}, "rates": {1: 1.0}})
    assert (type(read.first), type(read.train.rate)) == (int, float)
    assert read.rates == {"1": 1.0}


@dataclasses.dataclass(frozen=True)
class _Ranged:
    size: int = option(3, least=1)
    rate: float | None = option(None, above=0, most=2)
    word: int | str = option(1, least=1)


def test_the_range_of_a_number_belongs_to_its_option():
    assert options.range_problems(_Ranged()) == []
    assert options.range_problems(_Ranged(rate=2.0, word="any")) == []
    assert options.range_problems(_Ranged(size=0, rate=0.0, word=-1)) == [
        "size: 0, must be at least 1",
        "rate: 0.0, must be more than 0 and at most 2",
        "word: -1, must be at least 1",
    ]
    assert options.range_problems(_Ranged(rate=float("nan")))


def test_the_options_are_read_back():
    values = {"name": "a: b", "sites": ["q", "no", "1"], "rates": {"a": 1e-8}, "dtype": "bf16"}
    lines = list(options.commented_options(Recipe, values))
    assert parse_mapping("\n".join(lines), "") == values
    nested = list(options.below("a", options.below("b", lines)))
    assert parse_mapping("\n".join(nested), "") == {"a": {"b": values}}
    assert max(map(len, nested)) <= options.WIDTH
    assert list(options.below("c", [])) == ["c: {}"]


# Other names of options: which are accepted where, and what is suggested for the rest.


@dataclasses.dataclass(frozen=True)
class Source:
    file: str | None = option(None, "the file")
    text: str = option("text", "the column")
    shared: int = option(0, "in both groups")


@dataclasses.dataclass(frozen=True)
class Pace:
    rate: float = option(0.1, "the rate")
    rounds: int = option(1, "how often")
    shared: int = option(0, "in both groups")
    source: str | None = option(None, "also the name of a group")


@dataclasses.dataclass(frozen=True)
class Whole:
    name: str = option("x", "the name")
    source: Source = dataclasses.field(default_factory=Source)
    pace: Pace = dataclasses.field(default_factory=Pace)


NAMES = OptionNames(
    Whole, {"lr": "pace.rate", "label": "name"}, {"gamma": "pace.rate=0.1, times it"}
)


def test_the_normal_form(subtests):
    cases = [
        ({}, {}),
        ({"name": "y", "pace": {"rate": 1}}, {"name": "y", "pace": {"rate": 1}}),
        ({"lr": 1}, {"pace": {"rate": 1}}),
        ({"pace": {"lr": 1, "rounds": 2}}, {"pace": {"rate": 1, "rounds": 2}}),
        ({"rounds": 2, "pace": {"rate": 1}}, {"pace": {"rounds": 2, "rate": 1}}),
        ({"label": "y"}, {"name": "y"}),
        ({"source": "a.csv"}, {"pace": {"source": "a.csv"}}),
        ({"source": {}}, {"source": {}}),
        ({"rate": 1, "pace": {}}, {"pace": {"rate": 1}}),
        # Left for the error of from_dict:
        ({"source": {"lr": 1}}, {"source": {"lr": 1}}),
        ({"shared": 1}, {"shared": 1}),
        ({"pace": {"label": "y"}}, {"pace": {"label": "y"}}),
        ({"gamma": 1}, {"gamma": 1}),
        ({3: 4}, {3: 4}),
    ]
    for data, normal in cases:
        with subtests.test(data=data):
            assert NAMES.normal_form(data) == normal
            assert NAMES.normal_form(normal) == normal


def test_an_option_under_two_names_is_refused():
    with pytest.raises(ConfigError, match="given twice") as error:
        NAMES.normal_form({"lr": 1, "pace": {"lr": 2, "rate": 3}, "name": "x", "label": "y"})
    assert error.value.offenders == (
        "pace.rate: as lr and pace.lr and pace.rate",
        "name: as name and label",
    )


def test_meaning_comes_before_spelling(subtests):
    cases = [
        ("gamma", "; try pace.rate=0.1, times it"),
        ("source.gamma", "; try pace.rate=0.1, times it"),
        ("source.Gamma", "; try pace.rate=0.1, times it"),
        ("source.lr", "; try pace.rate"),
        ("shared", "; try source.shared or pace.shared"),
        ("source.rounds", "; try pace.rounds"),
        ("nmae", "; did you mean 'name'?"),
        ("pace.roudns", "; did you mean 'rounds'?"),
        ("roudns", "; did you mean 'pace.rounds'?"),
        ("xyzzy", ""),
    ]
    for path, suggestion in cases:
        with subtests.test(path=path):
            assert NAMES.suggest(path) == suggestion
            *above, name = path.split(".")
            data: dict[str, Any] = {above[0]: {name: 1}} if above else {name: 1}
            with pytest.raises(ConfigError) as error:
                from_dict(Whole, NAMES.normal_form(data), suggest=NAMES.suggest)
            assert f"{path} is not an option{suggestion}" in error.value.offenders[0]


keys = st.sampled_from(["name", "source", "pace", "lr", "rate", "label", "file", "shared", "x", ""])
leaves = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.none(), max_size=1)


@given(st.dictionaries(keys, leaves | st.dictionaries(keys, leaves)))
def test_any_data_has_a_normal_form_or_is_a_config_error(data):
    try:
        normal = NAMES.normal_form(data)
    except ConfigError:
        return
    assert NAMES.normal_form(normal) == normal
