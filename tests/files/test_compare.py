"""Differences between two adapters: fields of the manifests, and values of the tensors."""

import hashlib
import json
import math
from dataclasses import replace

import pytest
import torch

from adapterhub.errors import FileError
from adapterhub.files import compare
from adapterhub.files.compare import TensorDifference, manifest_differences, tensor_differences
from adapterhub.files.manifest import BackboneRef, Manifest
from adapterhub.files.native import Saved, write_adapter
from tests.kit.registries import IDENTITY


def saved(folder, tensors, **fields):
    """Write an adapter, and read it."""
    backbone = BackboneRef("acme/bert", None, f"v2-{'0' * 64}", "bert", identity=IDENTITY)
    options = {"methods": ({"lora": {"rank": 2}},), **fields}
    write_adapter(folder, Manifest(name="polite", backbone=backbone, **options), tensors)
    return Saved.at(folder)


def test_fields_that_differ_are_named(tmp_path):
    recipe = {"method": "lora", "train": {"epochs": 3}}
    first = saved(tmp_path / "a", {"x": torch.ones(2)}, labels=("a", "b"), task="classification",
                  training={"recipe": recipe, "seed": 1}, metrics={"accuracy": 0.5})  # fmt: skip
    other = {"method": "mam", "train": {"epochs": 4, "learning_rate": 0.1}}
    second = saved(tmp_path / "b", {"x": torch.ones(3)}, labels=("a", "c"), task="classification",
                   methods=({"mam": {}},), training={"recipe": other, "seed": 1})  # fmt: skip
    assert manifest_differences(first.manifest, second.manifest) == {
        "methods.lora.rank": (2, None),
        "labels": (["a", "b"], ["a", "c"]),
        "training.recipe.train.epochs": (3, 4),
        "training.recipe.train.learning_rate": (None, 0.1),
        "metrics.accuracy": (0.5, None),
        "parameters": (2, 3),
        "bytes": (8, 12),
    }
    assert manifest_differences(first.manifest, first.manifest) == {}
    assert compare.value_text("my-" + "a" * 64, 99) == "my-" + "a" * 12
    assert (second.manifest.parameters, second.manifest.nbytes) == (3, 12)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
     torch.int16, torch.int8, torch.uint8, torch.bool],
)  # fmt: skip
def test_distances_are_those_of_torch(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(compare, "_CHUNK", 7)  # several chunks
    numbers = [torch.randn(5, 4) * 50 for _ in range(2)]
    a, b = ((n.abs() if not dtype.is_signed else n).to(dtype) for n in numbers)
    first = saved(tmp_path / "a", {"same": a, "x": a})
    second = saved(tmp_path / "b", {"same": a, "x": b})
    differences = tensor_differences(first, second)
    assert differences["same"] == TensorDifference((5, 4), (5, 4), 0.0)
    expected = (a.double() - b.double()).norm() / a.double().norm()
    assert differences["x"].distance == pytest.approx(float(expected), rel=1e-12)


def test_names_and_shapes_that_differ(tmp_path):
    first = saved(tmp_path / "a", {"x": torch.ones(2, 3), "y": torch.ones(1), "z": torch.zeros(2)})
    second = saved(tmp_path / "b", {"x": torch.ones(3, 2), "w": torch.ones(()), "z": torch.ones(2)})
    rows = {name: vars(difference) for name, difference in tensor_differences(first, first).items()}
    assert json.loads(json.dumps(rows))["z"] == {"first": [2], "second": [2], "distance": 0.0}
    assert tensor_differences(first, second) == {
        "w": TensorDifference(None, ()),
        "x": TensorDifference((2, 3), (3, 2)),
        "y": TensorDifference((1,), None),
        "z": TensorDifference((2,), (2,), math.sqrt(2)),
    }


def test_values_beyond_all_numbers_are_refused(tmp_path):
    """A forged adapter, whose digests are those of its files."""
    first = saved(tmp_path / "a", {"x": torch.ones(2)})
    path = first.folder / "adapter.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + b"\x00\x00\x80\x7f" * 2)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = replace(first.manifest, files={"adapter.safetensors": digest})
    forged = replace(first, manifest=manifest)
    with pytest.raises(FileError, match="finite values"):
        tensor_differences(forged, forged)
