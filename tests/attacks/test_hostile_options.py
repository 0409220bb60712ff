"""Junk in every option of every method is refused or valid, and never crashes Python or torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import adapterhub as ah
from adapterhub.errors import AdapterhubError
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import build_method
from tests.kit import tiny_models
from tests.kit.selection import long_table

NUMBERS = [-(2**62), -1, 0]
WORDS = ["", "no/such", "*" * 50, "__class__", "0..999999999", "top 9999999999999999", "\x1b[31m"]
JUNK: dict[type, list[Any]] = {
    bool: [True, False, 1],
    int: [*NUMBERS, 1.5, True, "1"],
    float: [-1.0, 0.0, 1e-300, 1e308, -1e308, 2, "1"],
    str: [*WORDS, *NUMBERS, [0, 10**12], [], 10**12],
    tuple: [[], ["*", "*"], ["no.such"], ["\x1b"], ["*a" * 300], [["a"]], "attn.q"],
    dict: [{"*": -1}, {"no.such": 3}, {"\x1b": 1}, {"*": "a"}, [], {"": 0}],
    type(None): [-1, 0, "x", [], {}],
}
CELLS = [
    (name, field.name)
    for name, cls in sorted(METHODS.items())
    for field in dataclasses.fields(cls)  # type: ignore[arg-type]
]


@pytest.fixture(scope="module")
def backbones():
    return {name: tiny_models.model(name) for name in ("bert", "t5")}


# A sixteenth: as many options as an eighth of them on both.
@long_table(
    ("method", "option", "name"),
    [(*cell, name) for cell in CELLS for name in ("bert", "t5")],
    parts=16,
    nightly=3,
)
def test_a_junk_option_is_valid_or_refused(backbones, method: str, option: str, name: str) -> None:
    backbone = backbones[name]
    default = getattr(METHODS[method](), option)
    assert type(default) in JUNK, "add junk values for options of this type"
    names = [name for name, _ in backbone.named_modules()]
    for value in JUNK[type(default)]:
        try:
            ah.attach(backbone, build_method(method, {option: value})).detach()
        except AdapterhubError as error:
            str(error).encode()
        assert [name for name, _ in backbone.named_modules()] == names


def test_many_options_are_covered() -> None:
    assert len(CELLS) >= 60
