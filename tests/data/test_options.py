"""Options of the data."""

from __future__ import annotations

import pytest

from adapterhub.config.options import from_dict
from adapterhub.data.options import DataOptions, name_labels, parse_labels, unnamed_note
from adapterhub.errors import ConfigError, DataError

# Names for the labels of a file.


NAMES = {"0": "negative", "1": "positive"}


def test_options_of_the_data():
    options = DataOptions(train_target="a.de", eval_target="b.de")
    assert (options.target("train"), options.target("eval")) == ("a.de", "b.de")
    for choices, expected in (("options", "options"), (["a", "b"], ("a", "b"))):
        assert from_dict(DataOptions, {"choices": choices}).choices == expected
    with pytest.raises(ConfigError, match="did you mean 'jsonl'"):
        from_dict(DataOptions, {"format": "json"})


FORMS = (
    "0=negative,1=positive",
    " 0 = negative , 1=positive ",
    NAMES,
    {0: "negative", 1: "positive"},
)


@pytest.mark.parametrize("spec", FORMS)
def test_every_form_gives_the_same_names(spec):
    assert parse_labels(spec) == NAMES
    assert DataOptions(labels=spec) == DataOptions(labels=NAMES)
    assert from_dict(DataOptions, {"labels": spec}).label_names == NAMES


def test_a_list_fixes_the_order_and_nothing_names_nothing():
    assert list(parse_labels("pos,neg")) == ["pos", "neg"]
    assert parse_labels(["pos", "neg"]) == {"pos": "pos", "neg": "neg"}
    for spec in (None, "", {}, [], ()):
        assert parse_labels(spec) == {}
        assert DataOptions(labels=spec).labels is None


BAD = [
    ("0=a,1=a", "the name 'a': 2 times"),
    ("0=a,0=b", "the value '0': 2 times"),
    (["a", "a"], "'a': 2 times"),
    ("0=,1=b", "'0': empty"),
    ("0=1,1=2", "'1' is another value of the file"),
    *((spec, "invalid names") for spec in ("0=a,b", 7, [["a"]], {"a": ["b"]})),
]


@pytest.mark.parametrize(("spec", "problem"), BAD)
def test_bad_names_are_refused(spec, problem):
    with pytest.raises(ConfigError) as error:
        parse_labels(spec)
    assert problem in str(error.value)
    assert "0=negative,1=positive" in error.value.expected


def test_values_and_names_get_the_name():
    named = name_labels(["0", "positive", "1"], DataOptions(labels=NAMES), "x.csv")
    assert named == ["negative", "positive", "positive"]
    assert name_labels(["0", "x"], DataOptions(), "x.csv") == ["0", "x"]
    with pytest.raises(DataError, match=r"x.csv has labels without a name") as error:
        name_labels(["0", "2", "2"], DataOptions(labels=NAMES), "x.csv")
    assert error.value.offenders == ("'2': 2 times",)
    assert error.value.hint == "--labels 0=negative,1=positive,2=NAME"
    for labels, note in (
        (("0", "1"), "(0, 1); --labels 0=NAME,1=NAME names them"),
        (tuple("01234"), "(0, 1, 2,...); --labels 0=NAME,1=NAME,2=NAME,... names them"),
    ):
        (found,) = unnamed_note(labels)
        assert found.endswith(note)
    assert not [*unnamed_note(("0", "good")), *unnamed_note(())]
