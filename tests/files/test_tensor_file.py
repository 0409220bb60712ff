"""The checks of a tensor file without torch: those that torch makes of the same bytes."""

from __future__ import annotations

import hashlib
import json

import pytest
import safetensors.torch
import torch

from adapterhub.errors import FileError
from adapterhub.files import atomic
from adapterhub.files.manifest import BackboneRef, Manifest, TensorInfo
from adapterhub.files.native import TENSORS_FILE, open_tensors
from tests.kit.registries import IDENTITY

NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def problems_of(folder, dtype, count, data):
    """Return the problems of a file for a manifest with one tensor, and the digest of the file."""
    manifest = Manifest(
        name="x",
        methods=({"lora": {}},),
        backbone=BackboneRef("a/b", None, "fp", "bert", identity=IDENTITY),
        tensors={"a": TensorInfo(dtype, (count,))},
        files={TENSORS_FILE: hashlib.sha256(data).hexdigest()},
    )
    (folder / TENSORS_FILE).write_bytes(data)
    try:
        with open_tensors(folder, manifest) as file:
            file.check()
            assert b"".join(file.pieces()) == data
            assert len(b"".join(file.values("a", 8))) == manifest.nbytes
    except FileError as error:
        return list(error.offenders)
    return []


@pytest.mark.parametrize("dtype", NAMES)
def test_values_are_finite_as_torch_says(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.pieces_of, "__defaults__", (16,))  # several pieces
    info = torch.finfo(NAMES[dtype])
    values = [0.0, -0.0, info.max, info.min, info.tiny, info.tiny / 4]
    for bad in ([], [float("inf")], [float("nan"), float("-inf")]):
        tensor = torch.tensor([*values, *bad], dtype=NAMES[dtype])
        assert int((~tensor.isfinite()).sum()) == len(bad)
        data = safetensors.torch.save({"a": tensor})
        said = [f"a: {len(bad)} of {len(tensor)} values are NaN or infinite"] if bad else []
        assert problems_of(tmp_path, dtype, len(tensor), data) == said


def test_numbers_without_an_exponent_are_finite(tmp_path):
    data = safetensors.torch.save({"a": torch.tensor([-1, 2**62])})
    assert problems_of(tmp_path, "I64", 2, data) == []


def file_of(header, numbers=bytes(8)):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
OTHER_SIZES = {
    "another shape": ({"a": {**ENTRY, "shape": [3]}}, 8, "a: F32 [3], the manifest has F32 [2]"),
    "a shape of no numbers": ({"a": {**ENTRY, "shape": [2.0]}}, 8, "a: F32 [2.0], the manifest"),
    "no shape": ({"a": {**ENTRY, "shape": "x" * 999}}, 8, "a: F32 xxx"),
    "another dtype": ({"a": {**ENTRY, "dtype": ["F32"]}}, 8, "a: ['F32'] [2], the manifest"),
    "other bytes": ({"a": {**ENTRY, "data_offsets": [8, 16]}}, 16, "a: its bytes are not those"),
    "no offsets": ({"a": {**ENTRY, "data_offsets": {"0": 8}}}, 8, "a: its bytes are not those"),
    "more bytes": ({"a": ENTRY}, 12, "bytes, its header and manifest declare"),
    "another tensor": ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [8, 16]}}, 16, "'b': unexpect"),
    "no text": ({"a": ENTRY, "__metadata__": {"x": 1}}, 8, "__metadata__ is not an object"),
    "another field": ({"a": {**ENTRY, "x": 1}}, 8, "header: 'a': its fields must be exactly"),
}


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_sizes_are_compared_before_a_value_is_read(name, tmp_path):
    header, size, said = OTHER_SIZES[name]
    (problem,) = problems_of(tmp_path, "F32", 2, file_of(header, bytes(size)))
    assert said in problem
    assert len(problem) < 300


def test_all_differences_are_listed(tmp_path):
    problems = problems_of(tmp_path, "F32", 2, file_of({"b": ENTRY}))
    assert problems == ["a: missing", "'b': unexpected"]
