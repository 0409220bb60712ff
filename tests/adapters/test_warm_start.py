"""A new adapter starts from the tensors of a saved one, and from its head if the labels match."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.warm_start import start_from
from adapterhub.errors import MismatchError
from adapterhub.files.native import Saved
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import restore_methods
from tests.kit import matrix, tiny_models
from tests.kit.selection import ALL, long_table

FULL = os.environ.get("ADAPTERHUB_MATRIX") == "full"


def saved(folder: Path, method: Any, architecture: str = "bert") -> torch.Tensor:
    """Save an adapter with arbitrary values, and return its outputs."""
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, method, name="first")
    tiny_models.scramble(adapter)
    adapter.save(folder)
    model.eval()
    outputs: torch.Tensor = model(**tiny_models.batch())[0].detach()
    return outputs


CELLS = [cell for cell in matrix.CELLS if FULL or cell[1] == "bert"]
TRIED = [c for c in CELLS if ALL or FULL or c[0] in matrix.representatives().values()]


@long_table(("method", "architecture"), TRIED, 4)
def test_every_method_starts_where_the_other_ended(
    method: str, architecture: str, tmp_path: Path
) -> None:
    outputs = saved(tmp_path / "first", matrix.example(method), architecture)
    model = tiny_models.model(architecture)
    torch.manual_seed(7)
    methods = restore_methods(Saved.at(tmp_path / "first").manifest.methods, "it")
    adapter = ah.attach(model, list(methods), name="second")
    found = start_from(adapter, tmp_path / "first")
    assert found.taken == (adapter.head is not None)
    model.eval()
    torch.testing.assert_close(model(**tiny_models.batch())[0], outputs, atol=1e-5, rtol=1e-5)
    assert any(parameter.requires_grad for parameter in adapter.parameters())


def test_the_cells_are_all_methods() -> None:
    assert {method for method, _ in CELLS} == set(METHODS)
    assert {method for method, _ in TRIED} >= set(matrix.representatives().values())


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("lora(rank=2, dropout=0.3)", ""),  # an option of training alone
        ("lora(rank=4)", "shape|here"),
        ("lora(rank=2, sites=[attn.q])", "only its files have"),
        ("lora(rank=2, alpha=32)", "alpha: 16.0 in its files, here 32.0"),
        ("ia3", "its files lack"),
        ("pfeiffer", "its files lack"),
    ],
)
def test_another_method_or_size_is_refused_and_nothing_changes(
    spec: str, text: str, tmp_path: Path
) -> None:
    saved(tmp_path / "first", "lora(rank=2)")
    model = tiny_models.model("bert")
    adapter = ah.attach(model, spec, name="second")
    before = {name: tensor.clone() for name, tensor in adapter.tensors().items()}
    if not text:
        assert start_from(adapter, tmp_path / "first").taken
        return
    with pytest.raises(MismatchError, match=text) as error:
        start_from(adapter, tmp_path / "first")
    assert "combine" in str(error.value)
    assert all(torch.equal(t, before[n]) for n, t in adapter.tensors().items())
    other = ah.attach(tiny_models.model("bert", seed=1), "lora(rank=2)", name="second")
    with pytest.raises(MismatchError, match="different backbone"):
        start_from(other, tmp_path / "first")


def test_with_other_labels_the_head_is_new(tmp_path: Path) -> None:
    saved(tmp_path / "first", "lora(rank=2)")
    model = tiny_models.model("bert", num_labels=5)
    adapter = ah.attach(model, "lora(rank=2)", name="second")
    head = {n: t.clone() for n, t in adapter.tensors().items() if n.startswith("head.")}
    found = start_from(adapter, tmp_path / "first")
    assert (found.taken, found.reason) == (False, "the labels are others")
    assert all(torch.equal(adapter.tensors()[n], t) for n, t in head.items())
    first = tiny_models.model("bert")
    other = ah.load(first, tmp_path / "first")
    for name, tensor in other.tensors().items():
        if not name.startswith("head."):
            assert torch.equal(adapter.tensors()[name], tensor)


def test_a_new_language_model_head_stays_behind(backbones: Any, tmp_path: Path) -> None:
    """The checkpoint has no head for masked tokens: the first adapter trained one."""
    folder = str(backbones("bert"))
    model, _ = ah.load_backbone(folder, task="masked-lm")
    adapter = ah.attach(model, "lora(rank=2)", name="first")
    tiny_models.scramble(adapter)
    adapter.save(tmp_path / "first")
    trained = adapter.tensors()
    assert any(".fresh." in name for name in trained)
    classifier, _ = ah.load_backbone(folder, task="classification", labels=["no", "yes"])
    second = ah.attach(classifier, "lora(rank=2)", name="second")
    assert not start_from(second, tmp_path / "first").taken
    for name, tensor in second.tensors().items():
        assert name.startswith("head.") or torch.equal(tensor, trained[name])
    again, _ = ah.load_backbone(folder, task="masked-lm")
    third = ah.attach(again, "lora(rank=2)", name="third")
    start_from(third, tmp_path / "first")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in third.tensors().items())


def test_every_training_option_is_an_option() -> None:
    for method in METHODS.values():
        example = method.example()
        assert set(method.training_options) <= set(example.options())
        for name in method.training_options:
            assert replace(example, **{name: getattr(example, name)}) == example  # type: ignore[type-var]
