"""YAML 1.2 core schema, overrides on the command line, quantities."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.config.yaml import (
    MAX_BYTES,
    dump_yaml,
    load_yaml,
    merge_options,
    parse_overrides,
    plain_scalar,
    seconds_of,
    size_in_bytes,
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


def test_the_core_schema(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("rate: 1e-3\nlabels: [no, yes]\nday: 2024-01-01\nempty:\ninf: -.inf\n")
    assert load_yaml(path) == {
        "rate": 1e-3,
        "labels": ["no", "yes"],
        "day": "2024-01-01",
        "empty": None,
        "inf": float("-inf"),
    }


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
        ("a: é".encode() * MAX_BYTES, f"larger than {MAX_BYTES} bytes"),
    ]
    for text, message in cases:
        with subtests.test(text=text):
            path = tmp_path / "recipe.yaml"
            path.write_bytes(text)
            with pytest.raises(ConfigError, match=message):
                load_yaml(path)


def test_a_missing_file_suggests_the_nearest_name(tmp_path):
    (tmp_path / "quickstart.yaml").touch()
    with pytest.raises(ConfigError, match=r"no such file.*did you mean 'quickstart.yaml'"):
        load_yaml(tmp_path / "quickstrat.yaml")
    with pytest.raises(ConfigError, match=r"cannot read .*[Dd]irectory"):
        load_yaml(tmp_path)


@few
@given(st.dictionaries(st.text(min_size=1), st.text() | st.integers() | st.booleans() | st.none()))
def test_load_yaml_inverts_dump_yaml(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("yaml") / "data.yaml"
    path.write_text(dump_yaml(data), encoding="utf-8", newline="")
    assert load_yaml(path) == data


def test_a_plain_scalar_is_resolved_by_the_core_schema(subtests):
    for text, value in [("0o17", 15), (".5e1", 5.0), ("~", None), ("[1", "[1"), ("1_000", "1_000")]:
        with subtests.test(text=text):
            assert plain_scalar(text) == value
            assert type(plain_scalar(text)) is type(value)


def test_a_value_is_yaml_or_a_string(subtests):
    cases = [
        ("1", 1),
        ("010", 10),
        ("0x1f", 31),
        ("1e-3", 1e-3),
        (".5", 0.5),
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


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1024", 1024), ("1.5k", 1500),
     (" 4 mib ", 4 << 20), ("0", None), ("-1", None), ("2 GiBs", None), ("GiB", None),
     ("1e9", None), ("", None)],
)  # fmt: skip
def test_sizes(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("1.5h", 5400), ("2 minutes", 120), ("1d", 86400), ("0s", None), ("30", None),
     ("-1s", None), ("s", None)],
)  # fmt: skip
def test_durations(text, seconds):
    assert seconds_of(text) == seconds
