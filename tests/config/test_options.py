from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.config.options import (
    from_dict,
    merge_options,
    option,
    options_of,
    parse_overrides,
    to_dict,
    type_text,
)
from adapterhub.config.yaml import dump_yaml, load_yaml
from adapterhub.errors import ConfigError


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
    sites: tuple[str, ...] = option((), "sites")
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
    return "\n".join(caught.value.offenders)


@given(recipes)
def test_what_to_dict_writes_from_dict_reads_back(recipe: Recipe) -> None:
    assert from_dict(Recipe, to_dict(recipe)) == recipe


@given(recipes)
def test_to_dict_is_json(recipe: Recipe) -> None:
    assert from_dict(Recipe, json.loads(json.dumps(to_dict(recipe)))) == recipe


def test_to_dict_names_what_it_cannot_write() -> None:
    with pytest.raises(ConfigError, match=r"method\.run\[1\].*Path"):
        to_dict(Recipe("a", method={"run": [1, Path("x")]}))


def test_all_offenders_are_in_one_error() -> None:
    text = offenders({"train": {"epohcs": 1, "rate": "fast", "dropout": 1}, "seed": "1"})
    assert "train.epohcs is not an option; did you mean 'epochs'?" in text
    assert "train.rate is 'fast', expected float" in text
    assert "train.dropout is 1, expected bool" in text
    assert "seed is '1', expected int | null" in text
    assert "name is missing, expected str" in text


def test_an_unknown_key_near_no_other_lists_the_keys() -> None:
    assert "train.zzz is not an option; there is epochs, rate" in offenders(
        {"name": "a", "train": {"zzz": 1}}
    )


def test_where_is_put_before_each_path() -> None:
    assert "recipe.name is missing" in offenders({}, "recipe")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", True, "seed is True, expected int"),
        ("seed", 1.0, "seed is 1.0, expected int"),
        ("name", 5, "name is 5, expected str; put it in quotes"),
        ("name", None, "name is None, expected str"),
        ("sites", "attn.q", "sites is 'attn.q', expected list of str"),
        ("sites", ["a", 1], "sites[1] is 1, expected str"),
        ("span", [1], "span has 1 items, expected 2"),
        ("rates", {"a": "x"}, "rates.a is 'x', expected float"),
        ("rates", {1: 1.0}, "rates has the key 1"),
        ("rates", [], "rates is [], expected mapping of float"),
        ("train", 3, "train is 3, expected mapping (epochs, rate"),
        ("train", {"every": "epohc"}, "did you mean 'epoch'?"),
        ("train", {"rate": 10**400}, "expected float"),
        ("train", {"epochs": -1}, "train: epochs is -1"),
        ("extra", {"epohcs": 1}, "extra.epohcs is not an option"),
        ("runs", [{}, {"epochs": "1"}], "runs[1].epochs is '1', expected int"),
        ("dtype", "bf61", "dtype is 'bf61', expected bf16 | fp32 | null; did you mean 'bf16'?"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(
    key: str, value: object, message: str
) -> None:
    assert message in offenders({"name": "a", key: value})


def test_an_int_is_taken_for_a_float() -> None:
    rate = from_dict(Recipe, {"name": "a", "train": {"rate": 1}}).train.rate
    assert type(rate) is float


@dataclasses.dataclass(frozen=True)
class Unions:
    first: float | int = 0.0
    second: str | bool | None = None


def test_a_union_keeps_the_type_of_the_value() -> None:
    built = from_dict(Unions, {"first": 3, "second": True})
    assert type(built.first) is int
    assert built.second is True


def test_an_annotation_that_no_data_can_fill_is_a_programming_error() -> None:
    cls = dataclasses.make_dataclass("Odd", [("path", Path)])
    with pytest.raises(TypeError, match="annotated"):
        from_dict(cls, {"path": "x"})


def test_options_of_tells_name_type_default_and_help() -> None:
    docs = {doc.name: doc for doc in options_of(Recipe)}
    assert list(docs) == [field.name for field in dataclasses.fields(Recipe)]
    assert docs["name"].default is dataclasses.MISSING
    assert (docs["seed"].type, docs["seed"].default, docs["seed"].help) == (
        "int | null",
        None,
        "seed",
    )
    assert docs["rates"].default == {}
    assert docs["dtype"].type == "bf16 | fp32 | null"


def test_type_text_of_any() -> None:
    assert type_text(Any) == type_text(object) == "anything"


@pytest.mark.parametrize(
    ("word", "value"),
    [
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
    ],
)
def test_an_override_is_read_as_yaml_or_stays_text(word: str, value: object) -> None:
    read = parse_overrides([f"train.x={word}"])["train"]["x"]
    assert read == value
    assert type(read) is type(value)


@given(st.integers() | finite | st.booleans() | st.none() | st.text("abc.-_/ @").map(str.strip))
def test_an_override_of_a_json_value_reads_the_same(value: object) -> None:
    assert parse_overrides([f"x={json.dumps(value)}"]) == {"x": value}


@given(st.text())
def test_any_value_is_read_or_is_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert list(parse_overrides([f"x={text}"])) == ["x"]


def test_overrides_nest_and_the_last_wins() -> None:
    words = ["train.epochs=1", "train.rate=2", "train.epochs=3", "seed = 4"]
    assert parse_overrides(words) == {"train": {"epochs": 3, "rate": 2}, "seed": 4}


def test_every_broken_override_is_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["epochs", "=1", "train..x=1", "x={a: 1, a: 2}", "fine=1"])
    listed = "\n".join(caught.value.offenders)
    assert len(caught.value.offenders) == 4
    assert "'epochs' has no '='" in listed
    assert "'train..x=1' has an empty name" in listed
    assert "'a' is given twice" in listed


def test_merge_goes_into_mappings_and_changes_neither() -> None:
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


@given(trees, trees, trees)
def test_merge_is_idempotent_and_has_a_neutral_element(a: Any, b: Any, c: Any) -> None:
    assert merge_options(a, {}) == merge_options({}, a) == merge_options(a, a) == a
    assert merge_options(merge_options(a, b), b) == merge_options(a, b)
    assert merge_options(merge_options(a, b), {"z": c}) == merge_options(
        a, merge_options(b, {"z": c})
    )


printable = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]))


@given(
    data=st.dictionaries(printable, st.integers() | finite | printable | st.lists(printable)),
    bom=st.booleans(),
)
def test_json_in_a_yaml_file_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, object], bom: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    text = json.dumps(data, ensure_ascii=False, indent=1)
    path.write_text(text, encoding="utf-8-sig" if bom else "utf-8")
    assert load_yaml(path) == data


def test_yaml_is_read_by_the_core_schema(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("rate: 1e-3\nlabels: [no, yes]\nday: 2024-01-01\nempty:\ninf: -.inf\n")
    assert load_yaml(path) == {
        "rate": 1e-3,
        "labels": ["no", "yes"],
        "day": "2024-01-01",
        "empty": None,
        "inf": float("-inf"),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: 1\nb: [1, 2\n", r"recipe.yaml, line 3, column 1: "),
        (b"a: 1\nb: 2\na: 3\n", r"recipe.yaml, line 3, column 1: 'a' is given twice"),
        (b"a:\n  b: 1\n  b: 2\n", r"line 3, column 3: 'b' is given twice"),
        (b"a: &x 1\nb: *x\n", r"line 2, column 4: aliases"),
        (b"a: !!python/object:os.system x\n", r"line 1, column 4: .*tags"),
        (b"a: 1\nb: \x07\n", r"line 2, column 4: "),
        (b"\xff\xfea: 1", r"not UTF-8"),
        (b"", r"is empty"),
        (b"- 1\n", r"holds a list"),
        (b"a: 1\n---\nb: 2\n", r"line 2, column 1"),
        (b"a: " + b"[" * 5000, r"nested too deeply"),
    ],
)
def test_a_broken_yaml_file_is_one_error(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        load_yaml(path)


def test_a_missing_yaml_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").touch()
    with pytest.raises(ConfigError, match=r"did you mean 'quickstart.yaml'"):
        load_yaml(tmp_path / "quickstrat.yaml")


def test_a_folder_is_no_yaml_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_yaml(tmp_path)


@given(st.dictionaries(st.text(min_size=1), st.text() | st.integers() | st.booleans() | st.none()))
def test_written_yaml_is_read_as_the_same_data(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("yaml") / "data.yaml"
    path.write_text(dump_yaml(data), encoding="utf-8", newline="")
    assert load_yaml(path) == data
