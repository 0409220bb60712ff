"""Options on the command line, and merging them into a recipe."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.config.yaml import merge_options, parse_overrides
from adapterhub.errors import ConfigError
from tests.kit.selection import ALL

few = settings(max_examples=100 if ALL else 40)

finite = st.floats(allow_nan=False, allow_infinity=False)


def test_a_value_is_yaml_or_a_string(subtests):
    cases = [
        ("1", 1),
        ("-2", -2),
        ("010", 10),
        ("0x1f", 31),
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        (".5", 0.5),
        ("true", True),
        ("no", "no"),
        ("null", None),
        ("", None),
        ("'1'", "1"),
        ("lora(rank=4, alpha=8)", "lora(rank=4, alpha=8)"),
        ("[lora(rank=4, alpha=8), bitfit]", ["lora(rank=4, alpha=8)", "bitfit"]),
        ("{lora: {rank: 16}}", {"lora": {"rank": 16}}),
        ("[1, 2", "[1, 2"),
        ("a: b", "a: b"),
        ("a #b", "a #b"),
        ("*x", "*x"),
        ("2024-01-01", "2024-01-01"),
        ("12:30", "12:30"),
        ('"a": b', '"a": b'),
        ("9" * 5000, "9" * 5000),
        ("a=b", "a=b"),
    ]
    for word, value in cases:
        with subtests.test(word=word):
            read = parse_overrides([f"train.x={word}"])["train"]["x"]
            assert read == value
            assert type(read) is type(value)


@given(st.integers() | finite | st.booleans() | st.none() | st.text("abc.-_/ @").map(str.strip))
def test_a_json_value_is_read_unchanged(value):
    assert parse_overrides([f"x={json.dumps(value)}"]) == {"x": value}


@given(st.text())
def test_any_text_is_read_or_is_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert list(parse_overrides([f"x={text}"])) == ["x"]


def test_paths_nest_and_the_last_value_wins():
    words = ["train.epochs=1", "train.rate=2", "train.epochs=3", "seed = 4"]
    assert parse_overrides(words) == {"train": {"epochs": 3, "rate": 2}, "seed": 4}


def test_one_error_lists_every_invalid_override():
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["epochs", "=1", "train..x=1", "x={a: 1, a: 2}", "fine=1"])
    listed = "\n".join(caught.value.offenders)
    assert len(caught.value.offenders) == 4
    assert "'epochs' has no '='" in listed
    assert "'train..x=1' has an empty name" in listed
    assert "duplicate key 'a'" in listed


def test_merge_recurses_into_mappings_and_leaves_its_arguments_unchanged():
    base = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    override = {"a": {"c": {"d": 4}}, "e": {"f": 5}, "g": 6}
    before = json.dumps([base, override])
    merged = merge_options(base, override)
    assert merged == {"a": {"b": 1, "c": {"d": 4}}, "e": {"f": 5}, "g": 6}
    merged["a"]["b"] = merged["e"]["f"] = 0
    assert json.dumps([base, override]) == before


trees = st.recursive(
    st.integers(),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


@few
@given(trees, trees, trees)
def test_merge_is_idempotent_and_has_a_neutral_element(a, b, c):
    assert merge_options(a, {}) == merge_options({}, a) == merge_options(a, a) == a
    assert merge_options(merge_options(a, b), b) == merge_options(a, b)
    assert merge_options(merge_options(a, b), {"z": c}) == merge_options(
        a, merge_options(b, {"z": c})
    )
