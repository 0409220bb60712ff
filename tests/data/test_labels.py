"""Names for the labels of a file."""

from __future__ import annotations

import pytest

from adapterhub.config.options import from_dict
from adapterhub.data.options import DataOptions, name_labels, parse_labels, unnamed_note
from adapterhub.errors import ConfigError, DataError

NAMES = {"0": "negative", "1": "positive"}


@pytest.mark.parametrize(
    "spec",
    ["0=negative,1=positive", " 0 = negative , 1=positive ", NAMES, {0: "negative", 1: "positive"}],
)
def test_every_form_gives_the_same_names(spec):
    assert parse_labels(spec) == NAMES
    assert DataOptions(labels=spec) == DataOptions(labels=NAMES)
    assert from_dict(DataOptions, {"labels": spec}).label_names == NAMES


def test_a_list_fixes_the_order():
    assert list(parse_labels("pos,neg")) == ["pos", "neg"]
    assert parse_labels(["pos", "neg"]) == {"pos": "pos", "neg": "neg"}


@pytest.mark.parametrize("spec", [None, "", {}, [], ()])
def test_no_names(spec):
    assert parse_labels(spec) == {}
    assert DataOptions(labels=spec).labels is None


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("0=a,1=a", "the name 'a': 2 times"),
        ("0=a,0=b", "the value '0': 2 times"),
        (["a", "a"], "'a': 2 times"),
        ("0=,1=b", "'0': empty"),
        ("0=1,1=2", "'1' is another value of the file"),
        ("0=a,b", "invalid names"),
        (7, "invalid names"),
        ([["a"]], "invalid names"),
        ({"a": ["b"]}, "invalid names"),
    ],
)
def test_bad_names_are_refused(spec, problem):
    with pytest.raises(ConfigError) as error:
        parse_labels(spec)
    assert problem in str(error.value)
    assert "0=negative,1=positive" in error.value.expected


def test_values_and_names_get_the_name():
    assert name_labels(["0", "positive", "1"], DataOptions(labels=NAMES), "x.csv") == [
        "negative", "positive", "positive",
    ]  # fmt: skip
    assert name_labels(["0", "x"], DataOptions(), "x.csv") == ["0", "x"]


def test_a_value_without_a_name_is_counted():
    with pytest.raises(DataError, match=r"x.csv has labels without a name") as error:
        name_labels(["0", "2", "2"], DataOptions(labels=NAMES), "x.csv")
    assert error.value.offenders == ("'2': 2 times",)
    assert error.value.hint == "--labels 0=negative,1=positive,2=NAME"


@pytest.mark.parametrize(
    ("labels", "note"),
    [
        (("0", "1"), "(0, 1); --labels 0=NAME,1=NAME names them"),
        (tuple("01234"), "(0, 1, 2,...); --labels 0=NAME,1=NAME,2=NAME,... names them"),
        (("0", "good"), None),
        ((), None),
    ],
)
def test_bare_numbers_get_a_note(labels, note):
    notes = unnamed_note(labels)
    assert [n.endswith(note) for n in notes] == ([True] if note else [])
