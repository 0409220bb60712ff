"""Finite numbers that would be infinite on the model: refused before the model is touched."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.adapters.state import find_state
from adapterhub.errors import MismatchError
from adapterhub.files.native import Saved, write_adapter
from tests.kit import tiny_models
from tests.kit.selection import long_table

METHODS = ("lora", "full", "prefix", "bitfit", "prompt", "ia3", "pfeiffer", "compacter", "head")
# (dtype of the file, number, dtype of the backbone) and whether it is refused.
NUMBERS = {
    ("F64", 1e300, "fp32"): True, ("F64", 3.5e38, "fp32"): True, ("F64", 1e300, "bf16"): True,
    ("F64", 1e5, "fp16"): True, ("F32", 1e5, "fp16"): True, ("F32", 3.4e38, "bf16"): True,
    ("BF16", 1e5, "fp16"): True, ("I64", 10**9, "fp16"): True,
    ("F64", 3e38, "fp32"): False, ("F64", 65000.0, "fp16"): False, ("F32", 3e38, "bf16"): False,
    ("I64", 60000, "fp16"): False,
}  # fmt: skip
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64,
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One adapter of each method."""
    folder = tmp_path_factory.mktemp("saved")
    for method in METHODS:
        adapter = ah.attach(tiny_models.model("bert"), method, name="a")
        tiny_models.scramble(adapter)
        adapter.save(folder / method)
    return {method: folder / method for method in METHODS}


def with_number(source: Path, target: Path, dtype: str, number: float) -> str:
    """Save an adapter with one number changed; return the name of its tensor."""
    manifest, tensors = Saved.at(source).read()
    name = next((n for n in tensors if not n.startswith("head.")), next(iter(tensors)))
    changed = tensors[name].to(DTYPES[dtype])
    changed.view(-1)[-1] = number
    bare = dataclasses.replace(manifest, tensors={}, files={})
    write_adapter(target, bare, {**tensors, name: changed})
    return name


@long_table(
    ("file", "number", "backbone", "method"),
    [(*number, method) for number, method in itertools.product(NUMBERS, METHODS)],
)
def test_a_number_that_becomes_infinite_is_refused(saved, tmp_path, method, file, number, backbone):
    is_refused = NUMBERS[file, number, backbone]
    if method == "head":  # a head computes in fp32
        is_refused = is_refused and number > torch.finfo(torch.float32).max
    name = with_number(saved[method], tmp_path / "a", file, number)
    model = tiny_models.model("bert").to(DTYPES[backbone])
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    if is_refused:
        with pytest.raises(MismatchError, match="become infinite") as error:
            ah.load(model, tmp_path / "a", any_backbone=True)
        (offender,) = error.value.offenders
        assert offender.startswith(f"{name}: ")
        first = torch.float32 if number > 3.41e38 or method == "head" else DTYPES[backbone]
        assert offender.endswith(f" in {DTYPES[file]}, infinite in {first}")
        assert not find_state(model) or not find_state(model).adapters
    else:
        adapter = ah.load(model, tmp_path / "a", any_backbone=True)
        assert all(bool(tensor.isfinite().all()) for tensor in adapter.tensors().values())
        ah.detach(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_files_of_other_libraries_too(tmp_path: Path) -> None:
    """In half precision; test_hostile_foreign.py has numbers beyond fp32."""
    ah.attach(tiny_models.model("bert"), "lora(rank=2)").export(tmp_path / "a")
    path = tmp_path / "a" / "adapter_model.safetensors"
    save_file(
        {n: torch.full_like(v, 1e5) for n, v in load_file(path).items()}, path, {"format": "pt"}
    )
    with pytest.raises(MismatchError, match="become infinite on this model"):
        ah.load(tiny_models.model("bert").half(), path.parent, any_backbone=True, head=False)


def test_the_sources_of_a_fusion_too(saved: dict[str, Path], tmp_path: Path) -> None:
    with_number(saved["pfeiffer"], tmp_path / "b", "F64", 1e300)
    sources = [str(saved["pfeiffer"]), str(tmp_path / "b")]
    with pytest.raises(MismatchError, match="become infinite"):
        ah.attach(tiny_models.model("bert"), {"adapterfusion": {"adapters": sources}})
