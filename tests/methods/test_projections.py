"""The methods that change a projection compute their equations, by hand in tiny_adapters.py."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import adapterhub as ah
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.recipe import TrainOptions
from tests.kit import tiny_models
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import EQUATIONS, PROJECTIONS, attach_at, road

CELLS = [(method, architecture) for method in EQUATIONS for architecture in PROJECTIONS]


@long_table(("method", "architecture"), CELLS, parts=3)
def test_the_weight_is_that_of_the_equation(method, architecture):
    equation, options = EQUATIONS[method]
    one = attach_at(architecture, PROJECTIONS[architecture], method, **options)
    fixed = {n: b.clone() for n, b in one.module.named_buffers()}
    tiny_models.scramble(one.adapter)
    with torch.no_grad():
        for name, buffer in one.module.named_buffers():
            buffer.copy_(fixed[name])
        one.adapter.model.eval()
        x = torch.randn(2, 5, one.site.d_in)
        weight: Tensor = equation(one.weight, one.module, **options)
        bias = one.bias
        if method == "road" and bias is not None:
            bias = road(bias[:, None], one.module)[:, 0]
        if method == "ssf" and bias is not None:
            bias = one.module.scale * bias + one.module.shift
        if method == "beft":
            bias = one.module.b if bias is None else bias + one.module.b
        if method == "adamss" and bias is not None:
            bias = equation(bias, one.module, **options)
        if method == "glora" and bias is not None:
            c = one.module.C.left @ one.module.C.right
            bias = bias * (1 + one.module.D.value) + one.module.E.value + (one.weight @ c)[:, 0]
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(one.output(x), expected, atol=2e-4, rtol=2e-4)


def test_osf_trains_in_directions_that_are_orthogonal_to_the_kept_ones():
    one = attach_at("bert", PROJECTIONS["bert"], "osf", kept=0.75)
    module = one.module
    tiny_models.scramble(one.adapter)
    one.output(torch.randn(2, 3, one.site.d_in)).square().sum().backward()
    assert module.U.grad.abs().max() > 0.1
    assert (module.left_kept.T @ module.U.grad).abs().max() < 1e-4
    assert (module.V.grad @ module.right_kept.T).abs().max() < 1e-4


def test_the_series_of_cayley_is_near_the_exact_rotation():
    outputs = []
    for terms in (0, 12, 5):
        one = attach_at("bert", PROJECTIONS["bert"], "oft", block=8, terms=terms)
        tiny_models.scramble(one.adapter, std=0.05)
        outputs.append(one.output(torch.ones(1, 3, one.site.d_in)))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=1e-6)
    difference = (outputs[2] - outputs[0]).abs().max()
    assert 0 < difference < 0.02


def test_a_kept_matrix_is_that_of_the_parameters():
    """A computed D is kept in `eval()`, and is computed again once a byte of it changes."""
    one = attach_at("bert", PROJECTIONS["bert"], "loha", rank=2)
    module = one.module.eval().requires_grad_(False)
    tiny_models.scramble(one.adapter)
    x, y = torch.randn(3, one.site.d_in), torch.randn(3, one.site.d_out)
    calls = []
    original = type(module).delta
    type(module).delta = lambda self: calls.append(1) or original(self)
    try:
        first = module(x, y)
        assert torch.equal(module(x, y), first)
        assert len(calls) == 1
        module.A2.data[0, 0] += 1  # no version counter shows this
        assert not torch.equal(module(x, y), first)
        assert len(calls) == 2
        module.requires_grad_(True)
        module(x, y).sum().backward()
        assert module.A1.grad is not None
        assert len(calls) == 3
    finally:
        type(module).delta = original


# LoRA and its variants.


def test_dropout_is_active_in_training_only():
    one = attach_at("bert", "encoder.1.attn.q", "lora", dropout=0.5)
    tiny_models.scramble(one.adapter)
    x = torch.randn(4, one.site.d_in)
    assert torch.equal(one.output(x), one.output(x))
    one.module.train()
    assert not torch.equal(one.output(x), one.output(x))


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
