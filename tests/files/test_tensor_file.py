"""The checks of a tensor file without torch: those that torch makes of the same bytes."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from adapterhub.files.manifest import BackboneRef, Manifest, TensorInfo
from adapterhub.files.tensor_file import tensor_views

NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def manifest_of(dtype: str, count: int) -> Manifest:
    return Manifest(
        name="x",
        methods=({"lora": {}},),
        backbone=BackboneRef("a/b", None, "fp", "bert"),
        tensors={"a": TensorInfo(dtype, (count,))},
    )


@pytest.mark.parametrize("dtype", NAMES)
def test_values_are_finite_as_torch_says(dtype):
    info = torch.finfo(NAMES[dtype])
    values = [0.0, -0.0, info.max, info.min, info.tiny, info.tiny / 4]
    for bad in ([], [float("inf")], [float("nan"), float("-inf")]):
        tensor = torch.tensor([*values, *bad], dtype=NAMES[dtype])
        assert int((~tensor.isfinite()).sum()) == len(bad)
        data = safetensors.torch.save({"a": tensor})
        views, problems = tensor_views(manifest_of(dtype, len(tensor)), data)
        said = [f"a: {len(bad)} of {len(tensor)} values are NaN or infinite"] if bad else []
        assert problems == said
        assert views["a"]["shape"] == [len(tensor)]


def test_numbers_without_an_exponent_are_finite():
    data = safetensors.torch.save({"a": torch.tensor([-1, 2**62])})
    assert tensor_views(manifest_of("I64", 2), data)[1] == []


def test_another_shape_is_a_problem():
    data = safetensors.torch.save({"a": torch.ones(3)})
    assert tensor_views(manifest_of("F32", 2), data)[1] == ["a: F32 [3], the manifest has F32 [2]"]
