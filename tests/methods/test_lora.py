"""LoRA and its variants; their equations are in test_projections.py, but for those of two."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import adapterhub as ah
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.methods import METHODS
from adapterhub.methods.lora import LoRA
from adapterhub.recipe.recipe import TrainOptions
from tests.kit import tiny_models
from tests.kit.tiny_adapters import PROJECTIONS, attach_at

VARIANTS = sorted(name for name, method in METHODS.items() if issubclass(method, LoRA))


def test_dropout_is_active_in_training_only():
    one = attach_at("bert", "encoder.1.attn.q", "lora", dropout=0.5)
    tiny_models.scramble(one.adapter)
    x = torch.randn(4, one.site.d_in)
    assert torch.equal(one.output(x), one.output(x))
    one.module.train()
    assert not torch.equal(one.output(x), one.output(x))


@pytest.mark.parametrize("method", VARIANTS)
def test_variants_stay_in_fp32_on_a_bfloat16_backbone(method):
    model = tiny_models.model("llama").bfloat16()
    adapter = ah.attach(model, method)
    model(**tiny_models.batch()).logits.float().sum().backward()
    for placed in adapter.placed:
        assert {p.dtype for p in placed.module.parameters()} == {torch.float32}
        assert all(p.grad.isfinite().all() for p in placed.module.parameters())


def test_rslora_scales_each_site_by_its_own_rank():
    adapter = ah.attach(tiny_models.model("bert"), "rslora(rank=4, alpha=8, ranks={'attn.v': 16})")
    scales = {p.site.role: p.module.scale for p in adapter.placed}
    assert scales == {"attn.q": 4.0, "attn.v": 2.0}


def test_lora_plus_has_a_higher_learning_rate_for_b():
    adapter = ah.attach(tiny_models.model("bert"), "lora-plus(ratio=8)")
    groups = AdapterTrainee(adapter).param_groups(TrainOptions(learning_rate=1e-3))
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert len(rates) == len(adapter.parameters())
    for placed in adapter.placed:
        assert rates[id(placed.module.A)] == 1e-3
        assert rates[id(placed.module.B)] == 8e-3
    assert len({group["name"] for group in groups}) == len(groups) == 3


def test_the_backward_pass_of_lora_fa_keeps_no_input() -> None:
    one = attach_at("bert", PROJECTIONS["bert"], "lora-fa", rank=3)
    x, y = torch.randn(7, one.site.d_in), torch.randn(7, one.site.d_out)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape), lambda unpacked: None
    ):
        one.module(x, y)
    assert torch.Size((7, 3)) in kept
    assert x.shape not in kept


@pytest.mark.parametrize("architecture", PROJECTIONS)
def test_dora_is_equation_5_with_a_constant_norm(architecture):
    """y = m / ||V|| V x + b with V = W + s B A; gradients do not flow through ||V||."""
    one = attach_at(architecture, PROJECTIONS[architecture], "dora", rank=3, alpha=6)
    tiny_models.scramble(one.adapter)
    module, x = one.module, torch.randn(4, one.site.d_in)
    target = torch.randn(4, one.site.d_out)
    (one.output(x) * target).sum().backward()
    trained = (module.magnitude, module.A, module.B)
    m, a, b = (p.detach().clone().requires_grad_() for p in trained)
    v = one.weight + 2.0 * b @ a
    y = F.linear(x, (m / v.detach().norm(dim=1))[:, None] * v, one.bias)
    (y * target).sum().backward()
    torch.testing.assert_close(one.output(x), y, atol=1e-4, rtol=1e-4)
    for parameter, expected in zip(trained, (m, a, b), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, atol=1e-4, rtol=1e-4)


def test_dora_keeps_no_copy_of_the_weight():
    one = attach_at("bert", "encoder.1.attn.q", "dora", rank=3)
    assert sum(t.numel() for t in one.module.state_dict().values()) < one.weight.numel()
    copied = copy.deepcopy(one.adapter.model).get_submodule(one.site.host)
    with torch.no_grad():
        copied.weight.add_(torch.randn(copied.weight.shape))
    x = torch.randn(2, one.site.d_in)
    assert not torch.allclose(copied(x), one.output(x), atol=1e-3)


@pytest.mark.parametrize("iterations", [0, 8])
@pytest.mark.parametrize("architecture", PROJECTIONS)
def test_pissa_trains_the_principal_components(architecture, iterations):
    """s B0 A0 is the best approximation of W, and y = (W - s B0 A0) x + s B A x + b."""
    one = attach_at(
        architecture, PROJECTIONS[architecture], "pissa", rank=3, alpha=6, iterations=iterations
    )
    module = one.module
    u, s, vh = torch.linalg.svd(one.weight, full_matrices=False)
    best = u[:, :3] * s[:3] @ vh[:3]
    torch.testing.assert_close(2.0 * module.B @ module.A, best, atol=1e-3, rtol=1e-3)
    tiny_models.scramble(one.adapter)
    x = torch.randn(4, one.site.d_in)
    residual = one.weight - 2.0 * module.B0 @ module.A0
    expected = F.linear(x, residual + 2.0 * module.B @ module.A, one.bias)
    torch.testing.assert_close(one.output(x), expected, atol=1e-4, rtol=1e-4)
