"""Bottleneck adapters pass the contract with every `source`: what the network reads."""

from __future__ import annotations

import copy

import pytest
import test_cells as contract
import test_compile as compiled
import torch

import adapterhub as ah
from adapterhub.errors import ConfigError, SiteError
from tests.kit import tiny_models
from tests.kit.data import train
from tests.kit.selection import long_table

SPECS = ("pfeiffer(source=block)", "parallel(source=residual)", "compacter(source=block)")
# Pre-norm, post-norm, norms on the outputs of sublayers, two stacks.
CORE = ("bert", "gpt2", "gemma3_text", "t5", "bart")
ARCHITECTURES = (
    [a for a in tiny_models.ARCHITECTURES if a not in ("bloom", "gptj", "falcon")]
    if tiny_models.FULL_MATRIX
    else CORE
)
CELLS = [(spec, architecture) for spec in SPECS for architecture in ARCHITECTURES]
spec = pytest.mark.parametrize("spec", SPECS)


def trains_saves_and_detaches(cell, folder):
    model, spec = cell.model, cell.method
    adapter = ah.attach(model, spec)
    losses = train(adapter, steps=6)
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for p in adapter.parameters())
    tiny_models.scramble(adapter)
    expected = contract.logits(copy.deepcopy(model))
    adapter.save(folder)
    adapter.detach()
    cell.check_bare()
    ah.load(model, folder)
    assert torch.equal(contract.logits(model), expected)


# By default each architecture with one of the methods, and each method with some of them.
@long_table(("spec", "architecture"), CELLS, 3)
def test_the_contract_holds(spec, architecture, subtests, tmp_path, monkeypatch):
    cell = contract.Cell(spec, architecture)
    # A spec with options is not in the registry, where the contract looks; a route of sources is
    # in tests/hooks/test_row_stacks.py.
    monkeypatch.setattr(contract, "is_routed", lambda cell: False)
    with subtests.test("trains, saves and detaches"), cell.checked():
        trains_saves_and_detaches(cell, tmp_path / "adapter")
    for check in (
        contract.padding_does_not_change_a_row,
        contract.gradient_checkpointing_gives_equal_gradients,
        contract.generation_is_independent_of_cache_padding_and_route,
    ):
        with subtests.test(check.__name__), cell.checked():
            check(cell)


@pytest.mark.parametrize(("spec", "architecture"), [(SPECS[0], "bert"), (SPECS[1], "llama")])
def test_compiles_as_one_graph(spec, architecture):
    torch._dynamo.reset()
    compiled.test_compiles_to_one_graph_with_equal_outputs(spec, architecture)


def test_on_a_post_norm_backbone_the_residual_is_the_input():
    """On a pre-norm backbone it is not."""
    for architecture, equal in (("bert", True), ("gpt2", False)):
        model = tiny_models.model(architecture)
        outputs = []
        for source in ("input", "residual"):
            torch.manual_seed(0)
            adapter = ah.attach(model, f"parallel(source={source})", name=source)
            tiny_models.scramble(adapter)
            outputs.append(contract.logits(model))
        assert torch.equal(*outputs) == equal


def test_each_adapter_of_a_site_has_its_own_source():
    """Adapters with different sources work together, and alone compute what they did before."""
    model = tiny_models.model("gpt2")
    alone = {}
    for source in ("houlsby", *SPECS[:2], "parallel"):
        tiny_models.scramble(ah.attach(model, source, name=source))
        alone[source] = contract.logits(model)
    ah.activate(model, *alone)
    together = contract.logits(model)
    for name, expected in alone.items():
        assert not torch.allclose(together, expected, atol=1e-3)
        ah.activate(model, name)
        assert torch.equal(contract.logits(model), expected)


def test_a_source_of_the_other_form_is_refused():
    with pytest.raises(ConfigError, match="source"):
        ah.attach(tiny_models.model("bert"), "houlsby(source=input)")
    with pytest.raises(ConfigError, match="source"):
        ah.attach(tiny_models.model("bert"), "parallel(source=block)")


@spec
def test_a_backbone_without_a_known_residual_stream_is_refused(spec):
    model = tiny_models.model("bloom")
    with pytest.raises(SiteError, match="residual stream") as error:
        ah.attach(model, spec)
    assert "ffn" in error.value.offenders
    ah.attach(model, spec.partition("(")[0])
