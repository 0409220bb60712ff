"""A short run of the fuzzer, any text as a spec or recipe, and junk in every option of a method."""

import dataclasses
from typing import Any

import fuzz
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import adapterhub as ah
from adapterhub import methods
from adapterhub.config.yaml import load_yaml
from adapterhub.errors import AdapterhubError
from adapterhub.methods.common.base import build_method, parse_methods
from adapterhub.tasks import parse_task
from tests.kit import tiny_models
from tests.kit.selection import ALL, long_table

INPUTS = 600 if ALL else 160
FUZZED = ("lora", "houlsby", "prompt", "bitfit")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of options that an import drops
def test_a_short_fuzzing_run_has_no_findings(tmp_path) -> None:
    outcomes, findings = fuzz.fuzz(tmp_path, seed=0, inputs=INPUTS, seconds=120, methods=FUZZED)
    assert not findings, "\n".join(findings)
    assert sum(counts.total() for counts in outcomes.values()) == INPUTS
    assert sum(counts["accepted"] for counts in outcomes.values()) >= INPUTS / 100
    assert len(set().union(*outcomes.values())) >= INPUTS / 12, "too few kinds of refusal"


@settings(max_examples=300 if ALL else 60)
@given(text=st.text(max_size=60) | st.text("()[]{},='\"-+*#x1.: \n", max_size=60))
@example(text="lora)#")
@example(text="lora)+(x")
def test_any_text_as_a_spec_or_recipe_is_valid_or_refused(tmp_path_factory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for read, argument in ((parse_methods, text), (parse_task, text), (load_yaml, path)):
        try:
            read(argument)
        except AdapterhubError as error:
            str(error).encode()


# Options: refused or valid, and never a crash of Python or torch

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
    for name, cls in sorted(methods.METHODS.items())
    for field in dataclasses.fields(cls)  # type: ignore[arg-type]
]


@pytest.fixture(scope="module")
def backbones():
    return {name: tiny_models.model(name) for name in ("bert", "t5")}


# As many options as a sixteenth of them on both.
@long_table(
    ("method", "option", "name"),
    [(*cell, name) for cell in CELLS for name in ("bert", "t5")],
    parts=32,
    nightly=6,
)
def test_a_junk_option_is_valid_or_refused(backbones, method: str, option: str, name: str) -> None:
    backbone = backbones[name]
    default = getattr(methods.METHODS[method](), option)
    assert type(default) in JUNK, "add junk values for options of this type"
    names = [name for name, _ in backbone.named_modules()]
    for value in JUNK[type(default)]:
        try:
            ah.attach(backbone, build_method(method, {option: value})).detach()
        except AdapterhubError as error:
            str(error).encode()
        assert [name for name, _ in backbone.named_modules()] == names
