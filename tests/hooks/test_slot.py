"""A slot: the modules of one host, in order, which input and output each reads, and its removal."""

from __future__ import annotations

import itertools

import torch

import adapterhub as ah
from adapterhub.anatomy.discovery.layer_sites import expert_blocks
from adapterhub.hooks.composition import AppliedModules
from adapterhub.hooks.slot import output_slot
from adapterhub.methods.common.site_module import InputModule
from tests.kit import tiny_models
from tests.kit.own_models import TYPES, expert_logits, expert_model, redraw
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import check_rows

# Experts that return scores or a state too, or that hold a matrix for each in several modules.
BLOCKS = (*TYPES, "lfm2_moe", "zaya", "jetmoe")


def test_changed_inputs_reach_all_modules_of_a_projection():
    model = tiny_models.model("bert")
    for seed, method in enumerate(("lora(sites=['ffn.down'])", "ia3", "ia3(sites=['ffn.down'])")):
        tiny_models.scramble(ah.attach(model, method, name=str(seed)), seed=seed)
    host = model.bert.encoder.layer[0].output.dense
    x = torch.randn(2, 3, host.in_features)
    low_rank, *scales = (module for _, module in host.adapterhub.named_children())
    for names, factor in (("0", 1), ("01", scales[0].scale),
                          ("012", scales[0].scale * scales[1].scale)):  # fmt: skip
        ah.activate(model, *names)
        y = torch.nn.functional.linear(factor * x, host.weight, host.bias)
        expected = y + low_rank.scale * factor * x @ low_rank.A.T @ low_rank.B.T
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


@long_table(
    ("model_type", "method"),
    list(itertools.product(BLOCKS, ("pfeiffer", "parallel"))),
    6,
    nightly=2,
)
def test_a_block_of_experts_is_a_sublayer_whatever_it_returns(model_type, method):
    """One tensor, or a tuple that its output comes first in; as the input is, or flat; by rows."""
    model = expert_model(model_type)
    adapter = ah.attach(model, f"{method}(sites=[ffn], activation=relu)")
    redraw(adapter)
    blocks = [p for p in adapter.placed if expert_hosts(model) & {p.site.host}]
    placed = blocks[0]
    host = model.get_submodule(placed.site.host)
    x = torch.randn(2, 3, placed.site.d_in)
    with torch.no_grad():
        alone, adapted = host.forward(x), host(x)
        assert type(alone) is type(adapted)
        alone, adapted = (y[0] if isinstance(y, tuple) else y for y in (alone, adapted))
        assert adapted.shape == alone.shape
        down, up = placed.module.down, placed.module.up
        source = x if method == "parallel" else alone.view(x.shape)
        change = up(torch.relu(down(source))) * placed.module.scale
        torch.testing.assert_close(adapted.view(x.shape), alone.view(x.shape) + change)
    expert_logits(model).square().sum().backward()
    assert all(p.module.up.weight.grad.abs().sum() > 0 for p in blocks)
    redraw(ah.attach(model, "pfeiffer(sites=[ffn])", name="other"), seed=1)
    check_rows(model, ["default", "other", None], lambda: expert_logits(model))
    ah.detach(model)


def expert_hosts(model):
    """Return the paths of the blocks of experts in the layers of a model."""
    layers = [path for paths in ah.anatomy_of(model).layers.values() for path in paths]
    return {
        f"{layer}.{block}"
        for layer in layers
        for block in expert_blocks(model.get_submodule(layer))
    }
