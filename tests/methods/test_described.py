"""The catalogue of methods that commands read without torch says what the classes say."""

from __future__ import annotations

import dataclasses
import re

import catalogue
import pytest

from adapterhub.config.options import options_of
from adapterhub.errors import ConfigError
from adapterhub.methods import METHODS
from adapterhub.methods.common import base
from adapterhub.methods.common.base import (
    check_spec,
    describe,
    described_method,
    described_methods,
    parse_methods,
)
from adapterhub.methods.lora import LoRA


def test_the_catalogue_is_up_to_date():
    current = {name: describe(method) for name, method in METHODS.items()}
    assert base.catalogue() == current, "run: make catalogue"
    assert len(current) > 20
    exports = catalogue.EXPORTS.read_text(encoding="utf-8")
    assert catalogue.exports(exports) == exports, "run: make catalogue"
    without = re.sub(r".*(import|methods\.).*LoRA.*\n", "", exports)
    assert without.count("LoRA") < exports.count("LoRA")
    assert catalogue.exports(without) == exports


def test_a_described_method_has_the_options_of_its_class():
    for name, method in METHODS.items():
        assert options_of(described_method(name).options) == options_of(method), name


def test_a_method_in_a_file_that_the_catalogue_lacks_is_described_by_its_class(monkeypatch):
    known = {name: facts for name, facts in base.catalogue().items() if facts.module != "lora"}
    monkeypatch.setattr(base, "catalogue", lambda: known)
    assert described_methods()["lora"] == describe(LoRA)


def test_a_method_of_the_caller_is_described_too(monkeypatch):
    own = dataclasses.make_dataclass("Own", [("size", int, 3)], bases=(LoRA,), frozen=True)
    monkeypatch.setitem(METHODS, "own", own)
    check_spec("own(size=4)")
    with pytest.raises(ConfigError, match="'four'"):
        check_spec("own(size='four')")


def test_an_invalid_spec_has_the_same_error_without_the_classes(subtests):
    cases = [
        "lore",
        "lora(rnk=4)",
        "lora(rank='four')",
        "lora(",
        {"lora": 3},
        [],
        ["lora", "x"],
        3,
        "chosen(names=3)",
    ]
    for case in cases:
        with subtests.test(spec=case):
            with pytest.raises(ConfigError) as built:
                parse_methods(case)
            with pytest.raises(ConfigError) as checked:
                check_spec(case)
            assert str(checked.value) == str(built.value)


def test_every_method_passes_the_check(subtests):
    for name, method in METHODS.items():
        with subtests.test(name):
            check_spec(name)
            check_spec([name, {name: method.example().options()}])
            check_spec(method.example())
