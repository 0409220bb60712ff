"""Site modules at one projection: their order, and which input and output each one reads."""

from __future__ import annotations

import tiny_models
import torch

import adapterhub as ah
from adapterhub.hooks.forward_pass import AppliedModules
from adapterhub.hooks.projection import output_slot
from adapterhub.methods._site_module import InputModule


def down_projection(*methods):
    model = tiny_models.model("bert")
    adapters = [ah.attach(model, m, name=str(i)) for i, m in enumerate(methods)]
    for number, adapter in enumerate(adapters):
        tiny_models.scramble(adapter, seed=number)
    ah.activate(model, *(a.name for a in adapters))
    modules = [
        next(p.module for p in a.placed if p.site.id == "encoder.0.ffn.down") for a in adapters
    ]
    return model, model.bert.encoder.layer[0].output.dense, modules


def test_a_changed_input_reaches_the_other_modules():
    model, host, (low_rank, scale) = down_projection("lora(sites=['ffn.down'])", "ia3")
    x = torch.randn(2, 3, host.in_features)
    scaled = x * scale.scale
    y = torch.nn.functional.linear(scaled, host.weight, host.bias)
    expected = y + low_rank.scale * scaled @ low_rank.A.T @ low_rank.B.T
    torch.testing.assert_close(host(x), expected)
    ah.activate(model, "0")
    y = torch.nn.functional.linear(x, host.weight, host.bias)
    torch.testing.assert_close(host(x), y + low_rank.scale * x @ low_rank.A.T @ low_rank.B.T)


def test_two_modules_can_change_one_input():
    _, host, (first, second) = down_projection("ia3", "ia3(sites=['ffn.down'])")
    x = torch.randn(2, 3, host.in_features)
    expected = torch.nn.functional.linear(x * first.scale * second.scale, host.weight, host.bias)
    torch.testing.assert_close(host(x), expected)
    assert len(host._forward_pre_hooks) == 1


def test_a_parallel_adapter_reads_the_unchanged_input():
    """Its x is the sublayer's input, even if a module changes the projection's input."""

    class Double(InputModule):
        def forward(self, x):
            return 2 * x

    for parallel_first in (True, False):
        model = tiny_models.model("bert")
        if parallel_first:
            tiny_models.scramble(ah.attach(model, "parallel"))
        site = ah.anatomy_of(model).sites["encoder.0.ffn.up"]
        slot = output_slot(model, site, double := Double())
        slot.add("x-2", site, double)
        slot.active = AppliedModules(("x-2",))
        if not parallel_first:
            tiny_models.scramble(ah.attach(model, "parallel"))
        layer = model.bert.encoder.layer[0]
        x = torch.randn(1, 2, 32)
        layer.intermediate(x)
        assert torch.equal(layer.output.dense.adapterhub.kept("sublayer_input"), x)
