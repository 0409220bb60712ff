"""Torch's own files; tests/attacks/test_bombs.py attacks them."""

from __future__ import annotations

import io

import pytest
import torch

from adapterhub.backbones.checkpoint import load_torch_file


@pytest.mark.parametrize("new", [True, False], ids=["zip", "before 1.6"])
def test_tensors_of_both_formats_are_read_from_disk_and_from_memory(tmp_path, new):
    tied = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": tied, "b": tied, "c": torch.ones(2, dtype=torch.bfloat16), "d": tied.T}
    torch.save(tensors, tmp_path / "x.bin", _use_new_zipfile_serialization=new)
    for source in (tmp_path / "x.bin", io.BytesIO((tmp_path / "x.bin").read_bytes())):
        read = load_torch_file(source)
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": torch.zeros(1).expand(10**12)}, "more values than are stored"),
        ({"a": torch.zeros(1).expand(4)}, "more values than are stored"),
        ({"a": torch.eye(2).to_sparse()}, "not a plain tensor"),
        ({"a": 3}, "not a mapping"),
        ([torch.ones(2)], "not a mapping"),
        ({1: torch.ones(2)}, "not a mapping"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_plain_tensor_is_refused(tmp_path, value, words):
    torch.save(value, tmp_path / "x.bin")
    with pytest.raises(ValueError, match=words):
        load_torch_file(tmp_path / "x.bin")


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        load_torch_file(tmp_path / "x.bin")
