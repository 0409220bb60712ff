"""Configurations and tensors of other libraries are read strictly."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

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
    read_tensor_file,
)

WORD = schema.text("[a-z]+", "a word")
FIELDS = {
    "kind": ConfigField(WORD, required=True),
    "size": ConfigField(optional(either("a number or a word", schema.number, WORD))),
    "fixed": only(False, None),
    "seed": TRAINING_ONLY,
}


CASES = [
    ({}, None),
    ({"size": None, "fixed": None, "seed": ["anything"]}, None),
    ({"size": 2.5}, None),
    ({"later": []}, None),
    ({"later": 1}, "at.later: unknown, and not neutral: 1"),
    ({"size": []}, "at.size: a list is not a number or a word"),
    ({"kind": 1}, "at.kind: 1 is not a word"),
    ({"fixed": True}, "at.fixed: True changes what is computed, only False is supported"),
]


@pytest.mark.parametrize(("change", "problem"), CASES, ids=str)
def test_options_are_checked_by_name(change, problem):
    found = config_problems({"kind": "a"} | change, FIELDS, "at")
    assert found == ([problem] if problem else [])
    assert config_problems({}, FIELDS) == ["kind: missing"]


def test_a_pickle_must_be_allowed_and_safetensors_are_preferred(tmp_path):
    with pytest.raises(FileError, match="missing"):
        read_tensor_file(tmp_path, *NAMES)
    torch.save(TENSORS, tmp_path / NAMES[1])
    with pytest.raises(FileError, match=r"a\.bin, a pickle"):
        read_tensor_file(tmp_path, *NAMES)
    assert read_tensor_file(tmp_path, *NAMES, allow_pickle=True)["x"].tolist() == [0, 1, 2]
    torch.save([TENSORS], tmp_path / NAMES[1])
    with pytest.raises(FileError, match="not a mapping of names to tensors"):
        read_tensor_file(tmp_path, *NAMES, allow_pickle=True)
    (tmp_path / NAMES[0]).write_bytes(b"x" * 100)
    with pytest.raises(FileError, match="cannot be read"):
        read_tensor_file(tmp_path, *NAMES)
    save_file(TENSORS, tmp_path / NAMES[0])  # the other is not opened
    assert read_tensor_file(tmp_path, *NAMES, allow_pickle=True)["x"].tolist() == [0, 1, 2]


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


# Tensors are read from safetensors, and from a pickle only if allowed.


NAMES = ("a.safetensors", "a.bin")
TENSORS = {"x": torch.arange(3.0)}


INFINITE = "'x': 1 of 2 values are NaN or infinite in fp32"


UNUSABLE = [
    ({}, "no tensors"),
    ({"x": torch.ones(2, dtype=torch.int64)}, "'x': torch.int64 is not a floating-point dtype"),
    ({"x": torch.ones(0, 3)}, "'x': empty, shape (0, 3)"),
    ({"x": torch.tensor([1.0, float("inf")])}, INFINITE),
    ({"x": torch.tensor([1.0, 1e300], dtype=torch.float64)}, INFINITE),
]


@pytest.mark.parametrize(("tensors", "problem"), UNUSABLE)
def test_unusable_tensors_are_listed(tmp_path, tensors, problem):
    save_file(tensors, tmp_path / NAMES[0])
    with pytest.raises(FileError) as caught:
        read_tensor_file(tmp_path, *NAMES)
    assert caught.value.offenders == (problem,)
