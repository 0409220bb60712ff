"""LoRA's siblings against their equations, written out with whole matrices."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import adapterhub as ah
from adapterhub.backbones.weights import read_bias, read_weight
from adapterhub.errors import SiteError
from adapterhub.methods import METHODS, pissa
from adapterhub.methods.lora import LoRA

SIBLINGS = sorted(name for name, method in METHODS.items() if issubclass(method, LoRA))
HOSTS = {"bert": "encoder.1.attn.q", "gpt2": "decoder.1.attn.v", "llama": "decoder.0.ffn.down"}


def site_of(architecture, method, **options):
    """A model with the method at one site, the site module, and the host's W and b."""
    model = tiny_models.model(architecture)
    spec = {method: {"rank": 3, "sites": [HOSTS[architecture]], **options}}
    adapter = ah.attach(model, spec)
    (placed,) = adapter.placed
    host = model.get_submodule(placed.site.host)
    part = placed.site.part
    return adapter, placed, read_weight(host, part), read_bias(host, part)


def outputs(adapter, placed, x):
    """What the host computes for x, in the features of the site."""
    y = adapter.model.get_submodule(placed.site.host)(x)
    return y if placed.site.part is None else placed.site.part.read(y)


def test_there_are_siblings():
    assert {"lora", "rslora", "lora-plus", "dora", "pissa"} <= set(SIBLINGS)


def test_weights_are_read_as_they_compute():
    for architecture in HOSTS:
        model = tiny_models.model(architecture)
        for site in ah.anatomy_of(model).sites.values():
            if site.kind == "linear":
                host = model.get_submodule(site.host)
                x = torch.randn(2, site.d_in)
                y = host(x) if site.part is None else site.part.read(host(x))
                weight, bias = read_weight(host, site.part), read_bias(host, site.part)
                assert weight.dtype == torch.float32
                assert weight.shape == (site.d_out, site.d_in)
                torch.testing.assert_close(F.linear(x, weight, bias), y, atol=1e-5, rtol=1e-5)


def test_a_weight_that_cannot_be_read_is_refused():
    with pytest.raises(SiteError, match="LayerNorm cannot be read"):
        read_weight(torch.nn.LayerNorm(4))


@pytest.mark.parametrize("architecture", HOSTS)
def test_dora_is_its_equation_with_a_constant_norm(architecture):
    adapter, placed, weight, bias = site_of(architecture, "dora", alpha=6)
    tiny_models.scramble(adapter)
    own, x = placed.module, torch.randn(4, placed.site.d_in)
    target = torch.randn(4, placed.site.d_out)
    (outputs(adapter, placed, x) * target).sum().backward()
    m, a, b = (p.detach().clone().requires_grad_() for p in (own.magnitude, own.A, own.B))
    v = weight + 2.0 * b @ a
    y = F.linear(x, (m / v.detach().norm(dim=1))[:, None] * v, bias)
    (y * target).sum().backward()
    torch.testing.assert_close(outputs(adapter, placed, x), y, atol=1e-4, rtol=1e-4)
    for found, expected in ((own.magnitude, m), (own.A, a), (own.B, b)):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-4, rtol=1e-4)


def test_dora_holds_no_second_copy_of_the_weight():
    adapter, placed, weight, _ = site_of("bert", "dora")
    assert sum(t.numel() for t in placed.module.state_dict().values()) < weight.numel()
    copied = copy.deepcopy(adapter.model).get_submodule(placed.site.host)
    with torch.no_grad():
        copied.weight.add_(torch.randn(copied.weight.shape))
    x = torch.randn(2, placed.site.d_in)
    assert not torch.allclose(copied(x), outputs(adapter, placed, x), atol=1e-3)


@pytest.mark.parametrize("iterations", [0, 8])
@pytest.mark.parametrize("architecture", HOSTS)
def test_pissa_trains_the_principal_components(architecture, iterations):
    options = {"alpha": 6, "iterations": iterations}
    adapter, placed, weight, bias = site_of(architecture, "pissa", **options)
    own = placed.module
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    best = u[:, :3] * s[:3] @ vh[:3]
    torch.testing.assert_close(2.0 * own.B @ own.A, best, atol=1e-3, rtol=1e-3)
    tiny_models.scramble(adapter)
    x = torch.randn(4, placed.site.d_in)
    residual = weight - 2.0 * own.B0 @ own.A0
    expected = F.linear(x, residual + 2.0 * own.B @ own.A, bias)
    torch.testing.assert_close(outputs(adapter, placed, x), expected, atol=1e-4, rtol=1e-4)


def test_a_saved_pissa_does_not_depend_on_the_decomposition(tmp_path, monkeypatch):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "pissa")
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    expected = model(**tiny_models.batch()).logits
    adapter.save(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter.safetensors")
    start = [name for name in saved if name.endswith(("pissa.A0", "pissa.B0"))]
    assert len(start) == 2 * len(adapter.placed)
    real = pissa.principal
    flipped = lambda *a: tuple(f.flip(0, 1) for f in real(*a))  # noqa: E731
    monkeypatch.setattr(pissa, "principal", flipped)
    again = tiny_models.model("bert")
    ah.load(again, tmp_path / "adapter")
    assert torch.equal(again(**tiny_models.batch()).logits, expected)


def test_pissa_cannot_take_more_components_than_there_are():
    with pytest.raises(SiteError, match="33 components"):
        ah.attach(tiny_models.model("bert"), "pissa(rank=33)")


@pytest.mark.parametrize("method", ["dora", "pissa"])
def test_a_sublayer_has_no_weight_to_read(method):
    with pytest.raises(SiteError, match="does not support these sites") as error:
        ah.attach(tiny_models.model("bert"), {method: {"sites": ["ffn", "attn.q"]}})
    assert error.value.offenders == ("ffn",)


@pytest.mark.parametrize("method", SIBLINGS)
def test_a_bfloat16_backbone(method):
    model = tiny_models.model("llama").bfloat16()
    adapter = ah.attach(model, method)
    model(**tiny_models.batch()).logits.float().sum().backward()
    for placed in adapter.placed:
        assert {p.dtype for p in placed.module.parameters()} == {torch.float32}
        assert placed.module.A.grad.isfinite().all()
