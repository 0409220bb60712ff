"""LoRA-FA: its equation, and what trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import adapterhub as ah
from tests.kit import tiny_models
from tests.kit.data import train
from tests.kit.tiny_adapters import PROJECTIONS, attach_at


@pytest.mark.parametrize("architecture", PROJECTIONS)
def test_only_the_second_factor_trains(architecture: str) -> None:
    one = attach_at(architecture, PROJECTIONS[architecture], "lora-fa", rank=3, alpha=6)
    drawn = one.module.A.clone()
    train(one.adapter, 3)
    assert torch.equal(one.module.A, drawn)
    assert one.module.B.abs().sum() > 0
    x = torch.randn(4, one.site.d_in)
    weight = one.weight + 2.0 * one.module.B @ one.module.A
    expected = torch.nn.functional.linear(x, weight, one.bias)
    torch.testing.assert_close(one.output(x), expected, atol=1e-5, rtol=1e-5)


def test_the_backward_pass_keeps_no_input() -> None:
    one = attach_at("bert", PROJECTIONS["bert"], "lora-fa", rank=3)
    x, y = torch.randn(7, one.site.d_in), torch.randn(7, one.site.d_out)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape), lambda unpacked: None
    ):
        one.module(x, y)
    assert torch.Size((7, 3)) in kept
    assert x.shape not in kept


@pytest.mark.filterwarnings("ignore:the files or the model do not name their backbone")
def test_peft_gets_a_lora(tmp_path: Path) -> None:
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora-fa(rank=3)")
    tiny_models.scramble(adapter)
    with torch.no_grad():
        expected = model(**tiny_models.batch()).logits
    adapter.export(tmp_path / "peft")
    again = tiny_models.model("bert")
    loaded = ah.load(again, tmp_path / "peft")
    assert next(method.name for method in loaded.methods) == "lora"
    with torch.no_grad():
        torch.testing.assert_close(again(**tiny_models.batch()).logits, expected)
