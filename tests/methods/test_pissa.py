"""PiSSA: its start, its equation, its size, and files that fix the decomposition."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import adapterhub as ah
from adapterhub.errors import ConfigError, SiteError
from adapterhub.methods import pissa
from tests.kit import tiny_models
from tests.kit.tiny_adapters import PROJECTIONS, attach_at


@pytest.mark.parametrize("iterations", [0, 8])
@pytest.mark.parametrize("architecture", PROJECTIONS)
def test_it_trains_the_principal_components(architecture, iterations):
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


def test_a_saved_adapter_does_not_depend_on_the_decomposition(tmp_path, monkeypatch):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "pissa")
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    expected = model(**tiny_models.batch()).logits
    adapter.save(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter.safetensors")
    start = [name for name in saved if name.endswith(("pissa.A0", "pissa.B0"))]
    assert len(start) == 2 * len(adapter.placed)
    principal = pissa.principal
    flipped = lambda *a: tuple(f.flip(0, 1) for f in principal(*a))  # noqa: E731
    monkeypatch.setattr(pissa, "principal", flipped)
    again = tiny_models.model("bert")
    ah.load(again, tmp_path / "adapter")
    assert torch.equal(again(**tiny_models.batch()).logits, expected)


def test_the_count_is_that_of_lora():
    """A0 and B0 are saved but do not train."""
    adapter = ah.attach(tiny_models.model("bert"), "pissa(rank=3)")
    assert adapter.count() == 2 * 2 * 3 * (32 + 32)
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)


def test_a_rank_above_the_number_of_components_is_refused():
    with pytest.raises(SiteError, match="33 components"):
        ah.attach(tiny_models.model("bert"), "pissa(rank=33)")


def test_an_alpha_of_zero_is_refused():
    with pytest.raises(ConfigError) as error:
        ah.attach(tiny_models.model("bert"), "pissa(alpha=0)")
    assert "alpha" in str(error.value)
