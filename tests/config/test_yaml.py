"""YAML 1.2 core schema, overrides on the command line, quantities, the call syntax of specs."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.config import yaml
from adapterhub.config.yaml import (
    MAX_CHARACTERS,
    call_text,
    load_yaml,
    merge_options,
    parse_calls,
    parse_overrides,
)
from adapterhub.errors import ConfigError
from tests.kit.selection import ALL

few = settings(max_examples=100 if ALL else 40)

finite = st.floats(allow_nan=False, allow_infinity=False)
printable = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]))


@few
@given(
    data=st.dictionaries(printable, st.integers() | finite | printable | st.lists(printable)),
    bom=st.booleans(),
)
def test_json_is_valid_yaml(tmp_path_factory, data, bom):
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    text = json.dumps(data, ensure_ascii=False, indent=1)
    path.write_text(text, encoding="utf-8-sig" if bom else "utf-8")
    assert load_yaml(path) == data


def test_invalid_yaml_is_reported_with_its_location(tmp_path, subtests):
    cases = [
        (b"a: 1\nb: [1, 2\n", r"recipe.yaml, line 3, column 1: "),
        (b"a: 1\nb: 2\na: 3\n", r"recipe.yaml, line 3, column 1: duplicate key 'a'"),
        (b"a:\n  b: 1\n  b: 2\n", r"line 3, column 3: duplicate key 'b'"),
        (b"a: &x 1\nb: *x\n", r"line 2, column 4: aliases"),
        (b"a: !!python/object:os.system x\n", r"line 1, column 4: .*tags"),
        (b"a: 1\nb: \x07\n", r"line 2, column 4: "),
        (b"\xff\xfea: 1", r"not UTF-8"),
        (b"", r"is empty"),
        (b"- 1\n", r"contains a list"),
        (b"a: 1\n---\nb: 2\n", r"line 2, column 1"),
        (b"a: " + b"[" * 5000, r"nested too deeply"),
        ("a: é".encode() * yaml.MAX_BYTES, f"larger than {yaml.MAX_BYTES} bytes"),
    ]
    for text, message in cases:
        with subtests.test(text=text):
            path = tmp_path / "recipe.yaml"
            path.write_bytes(text)
            with pytest.raises(ConfigError, match=message):
                load_yaml(path)


@few
@given(st.dictionaries(st.text(min_size=1), st.text() | st.integers() | st.booleans() | st.none()))
def test_load_yaml_inverts_dump_yaml(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("yaml") / "data.yaml"
    path.write_text(yaml.dump_yaml(data), encoding="utf-8", newline="")
    assert load_yaml(path) == data


def test_a_plain_scalar_is_resolved_by_the_core_schema(subtests):
    for text, value in [("0o17", 15), (".5e1", 5.0), ("~", None), ("[1", "[1"), ("1_000", "1_000")]:
        with subtests.test(text=text):
            assert yaml.plain_scalar(text) == value
            assert type(yaml.plain_scalar(text)) is type(value)


def test_a_value_is_yaml_or_a_string(subtests):
    cases = [
        ("1", 1),
        ("010", 10),
        (".5", 0.5),
        ("no", "no"),
        ("-.inf", float("-inf")),
        ("null", None),
        ("", None),
        ("'1'", "1"),
        ("[lora(rank=4, alpha=8), bitfit]", ["lora(rank=4, alpha=8)", "bitfit"]),
        ("{lora: {rank: 16}}", {"lora": {"rank": 16}}),
        ("[1, 2", "[1, 2"),
        ("a: b", "a: b"),
        ("a #b", "a #b"),
        ("*x", "*x"),
        ("2024-01-01", "2024-01-01"),
        ('"a": b', '"a": b'),
        ("9" * 5000, "9" * 5000),
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


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1024", 1024), ("1.5k", 1500),
     (" 4 mib ", 4 << 20), ("0", None), ("-1", None), ("2 GiBs", None), ("GiB", None),
     ("1e9", None), ("", None)],
)  # fmt: skip
def test_sizes(text, size):
    assert yaml.size_in_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("1.5h", 5400), ("2 minutes", 120), ("1d", 86400), ("0s", None), ("30", None),
     ("-1s", None), ("s", None)],
)  # fmt: skip
def test_durations(text, seconds):
    assert yaml.seconds_of(text) == seconds


# The call syntax of specs.


def parse(text: str) -> list[tuple[str, dict[str, Any]]]:
    return parse_calls(text, "method", "lora, lora(rank=16)")


def test_calls_are_parsed(subtests):
    cases = [
        ("lora", [("lora", {})]),
        ("lora(rank=16, alpha=-0.5)", [("lora", {"rank": 16, "alpha": -0.5})]),
        ("lora, causal-lm(data=text)", [("lora", {}), ("causal-lm", {"data": "text"})]),
        ("a(b=int8-weight)", [("a", {"b": "int8-weight"})]),
        (
            "lora(sites=[attn.q, encoder.0.attn.v], rank=8)",
            [("lora", {"sites": ["attn.q", "encoder.0.attn.v"], "rank": 8})],
        ),
        (
            "a(layers=top 4), b(layers=0..3)",
            [("a", {"layers": "top 4"}), ("b", {"layers": "0..3"})],
        ),
        ("a(b=[true, null, 1e-3, x])", [("a", {"b": [True, None, 1e-3, "x"]})]),
        ("a(b='(x', c=\"]\"), d", [("a", {"b": "(x", "c": "]"}), ("d", {})]),
        ("a(b='it\\'s, x'),", [("a", {"b": "it's, x"})]),
        ("a(\n  b=1,\n)", [("a", {"b": 1})]),
    ]
    for text, calls in cases:
        with subtests.test(text=text):
            assert parse(text) == calls


def test_other_text_is_refused_with_examples(subtests):
    cases = [
        "",
        "lora(",
        "lora(rank=)",
        "lora(rank=1+x)",
        "lora(rank=__import__('os').name)",
        "a.b(c=1)",
        "a) + (b",
        "a(b=1, b=2)",
        "a(b=[1)]",
        "a(b=[x, x: 1, {])",
        "a(b='x)",
        "a,, b",
        "a(b=x y=z)",
        "a b",
        "a" * (MAX_CHARACTERS + 1),
        "a(b=" + "[" * 1000 + "]" * 1000 + ")",
        "a\0",
    ]
    for text in cases:
        with subtests.test(text=text):
            with pytest.raises(ConfigError, match="invalid method spec") as caught:
                parse(text)
            assert caught.value.expected == "lora, lora(rank=16)"
            assert len(str(caught.value)) < 400


@given(st.text("ab=(),-[]{}'\"1.: \n"))
def test_any_text_is_parsed_or_is_a_config_error(text):
    try:
        calls = parse(text)
    except ConfigError:
        return
    assert all(isinstance(name, str) and isinstance(options, dict) for name, options in calls)


names = st.from_regex("[a-z][a-z0-9_]*", fullmatch=True)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["attn.q", "encoder.0.attn.v", "top 4", "0..3", "no", "*.bias", "1_0", "..."])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@few
@given(
    st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3)
)
def test_every_call_that_is_written_is_read_back(calls):
    text = ", ".join(call_text(name, options) for name, options in calls)
    if len(text) <= MAX_CHARACTERS:
        assert parse(text) == calls
