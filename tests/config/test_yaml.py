"""YAML 1.2 core schema: reading, writing and errors with line and column."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.config.yaml import MAX_BYTES, dump_yaml, load_yaml, plain_scalar
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


def test_a_folder_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*[Dd]irectory"):
        load_yaml(tmp_path)


@few
@given(st.dictionaries(st.text(min_size=1), st.text() | st.integers() | st.booleans() | st.none()))
def test_load_yaml_inverts_dump_yaml(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("yaml") / "data.yaml"
    path.write_text(dump_yaml(data), encoding="utf-8", newline="")
    assert load_yaml(path) == data


def test_a_file_over_the_size_limit_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("a: " + "é" * MAX_BYTES, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"larger than {MAX_BYTES} bytes"):
        load_yaml(path)


def test_a_plain_scalar_is_resolved_by_the_core_schema(subtests):
    for text, value in [("0o17", 15), (".5e1", 5.0), ("~", None), ("[1", "[1"), ("1_000", "1_000")]:
        with subtests.test(text=text):
            assert plain_scalar(text) == value
            assert type(plain_scalar(text)) is type(value)
