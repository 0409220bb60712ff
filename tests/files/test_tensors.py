"""The tensors of the native format; test_native.py has the rest of the format."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch

from adapterhub.files.manifest import BackboneRef, Manifest
from adapterhub.files.native import (
    TENSORS_FILE,
    checked_copies,
    is_same_tensor,
    open_tensors,
    tensor_bytes,
    verified_tensors,
)
from adapterhub.files.native import tensor_info as info_of
from tests.kit.registries import IDENTITY

BACKBONE = BackboneRef("a/b", None, "fp", "bert", identity=IDENTITY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_tensors_return_from_their_bytes(dtype, tmp_path):
    live = {"b": torch.ones(2, 3).to(dtype), "a": torch.zeros(1).to(dtype)}
    manifest = Manifest(name="x", methods=({"lora": {}},), backbone=BACKBONE)
    copies = checked_copies(manifest, live)
    data = tensor_bytes(copies)
    (tmp_path / TENSORS_FILE).write_bytes(data)
    filled = replace(
        manifest,
        tensors={name: info_of(tensor) for name, tensor in copies.items()},
        files={TENSORS_FILE: hashlib.sha256(data).hexdigest()},
    )
    with open_tensors(tmp_path, filled) as file:
        tensors = verified_tensors(file)
    assert list(tensors) == ["a", "b"]
    assert all(is_same_tensor(tensors[name], live[name]) for name in live)


def test_equal_values_of_another_dtype_or_sign_of_zero_are_not_the_same():
    zero = torch.zeros(2)
    assert is_same_tensor(zero, zero.clone())
    assert not is_same_tensor(zero, -zero)
    assert not is_same_tensor(zero, zero.double())
