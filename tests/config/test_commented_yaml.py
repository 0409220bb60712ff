"""YAML with comments is read back, fits 80 columns, and names values and defaults."""

from __future__ import annotations

import dataclasses
from typing import Literal

from adapterhub.config.options import (
    WIDTH,
    OptionDoc,
    below,
    comment,
    commented_options,
    option,
    options_of,
    values_text,
)
from adapterhub.config.yaml import parse_mapping


@dataclasses.dataclass(frozen=True)
class Inner:
    count: int = option(1, "how many")


@dataclasses.dataclass(frozen=True)
class Outer:
    path: str
    mode: Literal["no", "yes"] = option("no", "the mode")
    sites: tuple[str, ...] = option(("attn.q", "{x}"), "a help text of many words " * 9)
    rates: dict[str, float] = option({}, "by name")
    inner: Inner = dataclasses.field(default_factory=Inner)


VALUES = {"path": "a: b", "mode": "yes", "sites": ["q", "no", "1"], "rates": {"a": 1e-8}}


def test_the_options_are_read_back():
    lines = list(commented_options(Outer, VALUES))
    assert parse_mapping("\n".join(lines), "") == VALUES
    nested = list(below("a", below("b", lines)))
    assert parse_mapping("\n".join(nested), "") == {"a": {"b": VALUES}}
    assert max(map(len, nested)) <= WIDTH
    assert list(below("c", [])) == ["c: {}"]


def test_comments_name_the_values_and_the_default():
    lines = list(commented_options(Outer, {"mode": "yes"}))
    assert lines == ["# the mode", "#   no | yes, default no", "mode: yes"]
    lines = list(commented_options(Outer, {"mode": "yes"}, required=["mode"]))
    assert lines[1] == "#   no | yes, required"
    assert comment("") == []
    texts = [values_text(each) for each in options_of(Outer)[:4]]
    assert texts == [
        "str, required", "no | yes, default no", "list of str, default [attn.q, '{x}']",
        "mapping of float, default {}",
    ]  # fmt: skip
    assert values_text(OptionDoc("x", "int | null", None, "")) == "int | null, default null"
