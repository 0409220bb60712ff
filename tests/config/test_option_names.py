"""Other names of options: which are accepted where, and what is suggested for the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.config.options import OptionNames, from_dict, option
from adapterhub.errors import ConfigError


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


def test_the_option_that_a_word_names(subtests):
    cases = [
        ("lr", "pace.rate"), ("pace.lr", "pace.rate"), ("rate", "pace.rate"),
        ("pace.rate", "pace.rate"), ("name", "name"), ("label", "name"), ("source", "source"),
        ("shared", None), ("source.lr", None), ("a.b.c", None), ("", None),
    ]  # fmt: skip
    for word, path in cases:
        with subtests.test(word=word):
            assert NAMES.own_name(word) == path


keys = st.sampled_from(["name", "source", "pace", "lr", "rate", "label", "file", "shared", "x", ""])
leaves = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.none(), max_size=1)


@given(st.dictionaries(keys, leaves | st.dictionaries(keys, leaves)))
def test_any_data_has_a_normal_form_or_is_a_config_error(data):
    try:
        normal = NAMES.normal_form(data)
    except ConfigError:
        return
    assert NAMES.normal_form(normal) == normal


@pytest.mark.parametrize(
    "data", [{"pace": None, "rate": 1}, {"rate": 1, "pace": None}, {"pace": 3, "lr": 1}]
)
def test_a_group_is_no_value_beside_its_options(data):
    with pytest.raises(ConfigError, match="as a value, and with options of its own"):
        NAMES.normal_form(data)


def test_an_empty_group_changes_nothing():
    assert NAMES.normal_form({"rate": 1, "pace": {}}) == {"pace": {"rate": 1}}
