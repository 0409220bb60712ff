"""The form of error messages."""

import errno
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub import errors


def test_a_message_has_problem_offenders_expected_and_hint() -> None:
    error = errors.AdapterhubError("bad", offenders=["a", "b"], expected="c", hint="d")
    assert str(error) == "bad\n  - a\n  - b\n  expected: c\n  try: d"
    assert str(errors.AdapterhubError("bad")) == "bad"


def test_a_long_message_is_cut() -> None:
    lines = str(errors.AdapterhubError("x" * 10**6, offenders=["y"] * 10**4)).splitlines()
    assert len(lines) == 1 + errors.MOST_LINES + 1
    assert len(lines[0]) == errors.MOST_CHARACTERS + len("...")
    assert lines[-1] == f"  - and {10**4 - errors.MOST_LINES} more"


def test_control_characters_are_escaped() -> None:
    assert str(errors.AdapterhubError("\x1b[31m\u202etext\ud800")) == r"\u001b[31m\u202etext\ud800"


@given(st.text(st.characters(exclude_categories=[])))
def test_printable_text_can_be_encoded_and_is_the_same_json(text: str) -> None:
    escaped = errors.printable(text)
    escaped.encode()
    assert "\x1b" not in escaped
    assert json.loads(errors.printable(json.dumps(text, ensure_ascii=False))) == text


def test_unknown_suggests_the_nearest_and_lists_all_choices() -> None:
    error = errors.unknown("method", "lroa", ["bitfit", "lora"], hint="adapterhub methods")
    assert isinstance(error, errors.ConfigError)
    assert error.problem == "unknown method 'lroa'; did you mean 'lora'?"
    assert (error.expected, error.hint) == ("one of bitfit, lora", "adapterhub methods")
    error = errors.unknown("method", "qlora", ["lora"], meaning="lora on a quantized backbone")
    assert error.problem == "unknown method 'qlora': lora on a quantized backbone"


def test_read_problem_has_the_reason_and_the_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").touch()
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "trian.tsv").read_bytes()
    problem = errors.read_problem(tmp_path / "trian.tsv", caught.value)
    assert problem.startswith("no such file: ")
    assert "did you mean 'train.tsv'?" in problem
    denied = PermissionError(errno.EACCES, "Permission denied")
    assert errors.read_problem(Path("a.csv"), denied) == "cannot read a.csv: Permission denied"


@pytest.mark.parametrize(
    ("name", "choices", "near"),
    [
        ("LoRA", ["lora", "dora", "rslora"], ["lora"]),
        ("scaled_parallel", ["scaled-parallel", "parallel"], ["scaled-parallel"]),
        ("Text", ["text", "TEXT", "label"], ["TEXT", "text"]),
        ("xyzzy", ["lora"], []),
    ],
)
def test_names_that_differ_in_case_hyphens_and_underscores_are_near(name, choices, near):
    assert errors.nearest(name, choices) == near
    assert bool(errors.did_you_mean(name, choices)) == bool(near)
