"""Configurations of other libraries are read strictly."""

from __future__ import annotations

import pytest

from adapterhub.errors import FileError
from adapterhub.files import schema
from adapterhub.interchange.checkpoint_files import (
    TRAINING_ONLY,
    ConfigField,
    config_problems,
    either,
    only,
    optional,
    read_json_object,
)

WORD = schema.text("[a-z]+", "a word")
FIELDS = {
    "kind": ConfigField(WORD, required=True),
    "size": ConfigField(optional(either("a number or a word", schema.number, WORD))),
    "fixed": only(False, None),
    "seed": TRAINING_ONLY,
}


def test_options_are_checked_by_name(subtests):
    cases = [
        ({}, None),
        ({"size": None, "fixed": None, "seed": ["anything"]}, None),
        ({"size": 2.5}, None),
        ({"later": []}, None),
        ({"later": 1}, "at.later: unknown, and not neutral: 1"),
        ({"size": []}, "at.size: a list is not a number or a word"),
        ({"kind": 1}, "at.kind: 1 is not a word"),
        ({"fixed": True}, "at.fixed: True changes what is computed, only False is supported"),
    ]
    for change, problem in cases:
        with subtests.test(change=change):
            assert config_problems({"kind": "a"} | change, FIELDS, "at") == (
                [problem] if problem else []
            )


def test_required_options_must_be_present():
    assert config_problems({}, FIELDS) == ["kind: missing"]


def test_a_file_must_be_a_json_object(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(FileError, match="missing") as caught:
        read_json_object(path, 99, expected="a checkpoint")
    assert caught.value.expected == "a checkpoint"
    path.write_text('{"a": 1}')
    assert read_json_object(path, 99, expected="") == {"a": 1}
    for content in ("[]", '{"a": 1, "a": 2}', '{"a": NaN}'):
        path.write_text(content)
        with pytest.raises(FileError, match="cannot be read"):
            read_json_object(path, 99, expected="")
    path.write_text('{"a": 1}' + " " * 100)
    with pytest.raises(FileError, match="more than 99"):
        read_json_object(path, 99, expected="")
