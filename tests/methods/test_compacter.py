"""Compacter: its equations, its size, and the parameter that all sites share."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file

import adapterhub as ah
from adapterhub.errors import ConfigError
from adapterhub.methods.compacter import KroneckerLinear, SharedFactors
from tests.kit import tiny_models

A = "encoder.0.attn.compacter.shared.A"


def attached(architecture="bert", method="compacter(size=8)"):
    adapter = ah.attach(tiny_models.model(architecture), method)
    tiny_models.scramble(adapter)
    return adapter


def test_a_weight_is_the_sum_of_kronecker_products():
    torch.manual_seed(0)
    shared = SharedFactors(4)
    layer = KroneckerLinear(shared, 12, 8, rank=2)
    products = [torch.kron(shared.A[i], layer.s[i] @ layer.t[i]) for i in range(4)]
    x = torch.randn(3, 12)
    expected = x @ sum(products) + layer.bias
    torch.testing.assert_close(layer(x), expected, atol=1e-6, rtol=1e-5)


def test_a_site_computes_the_bottleneck():
    adapter = attached()
    module = adapter.placed[0].module
    x, y = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    middle = torch.nn.functional.gelu(y @ module.down.weight() + module.down.bias)
    expected = y + middle @ module.up.weight() + module.up.bias
    torch.testing.assert_close(module(x, y), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_all_sites_share_one_parameter(architecture):
    adapter = attached(architecture)
    modules = [m for p in adapter.placed for m in (p.module.down, p.module.up)]
    assert len(modules) >= 8
    assert {id(m.shared[0].A) for m in modules} == {id(adapter.tensors()[A])}
    assert [name for name in adapter.tensors() if name.endswith(".A")] == [A]
    assert len(adapter.parameters()) == len({id(p) for p in adapter.parameters()})


def test_the_shared_parameter_is_saved_once_and_restored(tmp_path):
    adapter = attached()
    adapter.save(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter.safetensors")
    assert [name for name in saved if name.endswith(".A")] == [A]
    loaded = ah.load(tiny_models.model("bert"), tmp_path / "adapter")
    modules = [m for p in loaded.placed for m in (p.module.down, p.module.up)]
    assert len({id(m.shared[0].A) for m in modules}) == 1
    assert torch.equal(modules[-1].shared[0].A, adapter.tensors()[A])


def test_a_copied_model_keeps_the_tie():
    adapter = attached()
    other = copy.deepcopy(adapter.model)
    layers = [m for m in other.modules() if isinstance(m, KroneckerLinear)]
    assert len({id(m.shared[0].A) for m in layers}) == 1
    shared = {id(p) for name, p in other.named_parameters() if name.endswith(".A")}
    assert shared == {id(layers[0].shared[0].A)} != {id(adapter.tensors()[A])}


def test_an_n_that_does_not_divide_the_widths_is_refused():
    with pytest.raises(ConfigError, match="does not divide 8, 32"):
        attached(method="compacter(size=8, n=3)")


def test_the_count_is_its_formula():
    """n^3 once, and (2 rank + 1)(d + size) per site."""
    adapter = attached(method="compacter(size=8, rank=2, n=4)")
    assert adapter.count() == 4**3 + 2 * 2 * (2 * 2 + 1) * (32 + 8)
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)
