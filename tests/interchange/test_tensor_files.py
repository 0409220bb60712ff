"""Tensors are read from safetensors, and from a pickle only if allowed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from adapterhub.errors import FileError
from adapterhub.interchange.checkpoint_files import read_tensor_file

NAMES = ("a.safetensors", "a.bin")
TENSORS = {"x": torch.arange(3.0)}


def test_safetensors_are_preferred(tmp_path):
    save_file(TENSORS, tmp_path / NAMES[0])
    (tmp_path / NAMES[1]).write_bytes(b"not opened")
    assert read_tensor_file(tmp_path, *NAMES, allow_pickle=True)["x"].tolist() == [0, 1, 2]


def test_a_pickle_must_be_allowed(tmp_path):
    torch.save(TENSORS, tmp_path / NAMES[1])
    with pytest.raises(FileError, match=r"a\.bin, a pickle"):
        read_tensor_file(tmp_path, *NAMES)
    assert read_tensor_file(tmp_path, *NAMES, allow_pickle=True)["x"].tolist() == [0, 1, 2]
    torch.save([TENSORS], tmp_path / NAMES[1])
    with pytest.raises(FileError, match="not a mapping of names to tensors"):
        read_tensor_file(tmp_path, *NAMES, allow_pickle=True)


def test_a_missing_or_damaged_file_is_refused(tmp_path):
    with pytest.raises(FileError, match="missing"):
        read_tensor_file(tmp_path, *NAMES)
    (tmp_path / NAMES[0]).write_bytes(b"x" * 100)
    with pytest.raises(FileError, match="cannot be read"):
        read_tensor_file(tmp_path, *NAMES)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({}, "no tensors"),
        ({"x": torch.ones(2, dtype=torch.int64)}, "'x': torch.int64 is not a floating-point dtype"),
        ({"x": torch.ones(0, 3)}, "'x': empty, shape (0, 3)"),
        (
            {"x": torch.tensor([1.0, float("inf")])},
            "'x': 1 of 2 values are NaN or infinite in fp32",
        ),
        (
            {"x": torch.tensor([1.0, 1e300], dtype=torch.float64)},
            "'x': 1 of 2 values are NaN or infinite in fp32",
        ),
    ],
)
def test_unusable_tensors_are_listed(tmp_path, tensors, problem):
    save_file(tensors, tmp_path / NAMES[0])
    with pytest.raises(FileError) as caught:
        read_tensor_file(tmp_path, *NAMES)
    assert caught.value.offenders == (problem,)
