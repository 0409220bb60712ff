"""Reading a checkpoint's tensors from disk."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapterhub.backbones.checkpoint import opened_tensors, take_runs, weight_files
from adapterhub.errors import BackboneError
from tests.kit import tiny_models


def stored_tensors(folder):
    """Yield the tensors of a checkpoint; each is to be read before the next is requested."""
    for file in weight_files(folder):
        with opened_tensors(file) as tensors:
            yield from tensors


def read_all(folder):
    return {name: read([(0, math.prod(shape))]) for name, shape, read in stored_tensors(folder)}


def test_the_tensors_are_those_that_safetensors_reads(tmp_path):
    tiny_models.model("t5").save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    tensors = read_all(tmp_path)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[n], t.reshape(-1)) for n, t in expected.items())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int8, torch.uint8, torch.bool, torch.int64]
)
def test_every_dtype_is_read(dtype, tmp_path):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    tensors = {"a": torch.ones(5), "b": tensor, "empty": torch.empty(0)}
    save_file(tensors, tmp_path / "model.safetensors")
    tensors = read_all(tmp_path)
    assert tensors["b"].dtype == dtype
    assert torch.equal(tensors["b"], tensor.reshape(-1))
    assert tensors["empty"].numel() == 0


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_runs_are_concatenated(suffix, tmp_path):
    tensor = torch.arange(20.0).reshape(4, 5)
    if suffix == "bin":
        torch.save({"a": tensor}, tmp_path / "pytorch_model.bin")
    else:
        save_file({"a": tensor}, tmp_path / "model.safetensors")
    tensors = stored_tensors(tmp_path)  # keeps the file open
    stored = next(tensors)
    assert stored.read([(1, 2), (18, 2)]).tolist() == [1, 2, 18, 19]
    assert take_runs(tensor, [(1, 2), (18, 2)]).tolist() == [1, 2, 18, 19]


def test_safetensors_are_preferred_and_shards_stay_in_the_folder(tmp_path):
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert weight_files(tmp_path) == [tmp_path / "pytorch_model.bin"]
    index = {"weight_map": {"a": "../2.safetensors", "b": "1.safetensors", "c": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    # An index must not lead out of the checkpoint's folder.
    assert weight_files(tmp_path) == [tmp_path / "2.safetensors", tmp_path / "1.safetensors"]


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": [1]}', b"\xff", b"[" * 100_000,
     b'{"weight_map": {"a": "b"}}' + b" " * (100 << 20)],
    ids=lambda data: repr(data[:20]),
)  # fmt: skip
def test_a_broken_index_is_named(tmp_path, data):
    (tmp_path / "model.safetensors.index.json").write_bytes(data)
    with pytest.raises(BackboneError, match=r"model\.safetensors\.index\.json cannot be read"):
        weight_files(tmp_path)


def test_a_header_that_claims_an_absurd_size_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(BackboneError, match=r"header would have 1099511627776 bytes"):
        list(stored_tensors(tmp_path))


def test_a_tensor_with_fewer_bytes_than_its_shape_is_refused(tmp_path):
    header = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}
    data = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + b"\0" * 8)
    tensors = stored_tensors(tmp_path)  # keeps the file open
    stored = next(tensors)
    with pytest.raises(BackboneError, match="shorter than its shape"):
        stored.read([(0, 4)])
