"""Methods of projections at the weights of routed experts: an update for each, or one for all."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import adapterhub as ah
from adapterhub.errors import AdapterhubError, MismatchError, SiteError
from adapterhub.methods import METHODS
from adapterhub.methods.common.experts import AtExperts, ExpertsUpdate
from adapterhub.methods.common.projections import ProjectionMethod
from tests.kit.own_models import IMPLEMENTATIONS, expert_logits, expert_model, redraw
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import EQUATIONS

ABLE = [n for n, cls in METHODS.items() if issubclass(cls, AtExperts) and "weight" in cls.kinds]
OPTIONS = {name: dict(EQUATIONS[name][1]) for name in ABLE if name in EQUATIONS}
OPTIONS["lora"] = {"rank": 3, "dropout": 0.0}
REFUSING = sorted(n for n in METHODS if n not in ABLE and issubclass(METHODS[n], ProjectionMethod))
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "experts.md"
SITES = ["ffn.experts.*"]


@pytest.fixture
def model():
    model = expert_model("mixtral")
    yield model
    if ah.adapters(model):
        ah.detach(model)


def attach(model, method, name="default", **options):
    adapter = ah.attach(model, {method: {"sites": SITES, **OPTIONS[method], **options}}, name=name)
    redraw(adapter)
    return adapter


@contextlib.contextmanager
def merged(model):
    """Merge the adapters into the model, in a block."""
    ah.merge(model, tolerance=1e-2)
    yield
    ah.unmerge(model)


def test_the_guide_lists_the_methods_that_have_updates_of_experts():
    text = " ".join(GUIDE.read_text(encoding="utf-8").split())
    (listed,) = re.findall("have the same option: (.*?)[.] ", text)
    assert re.findall("`(.*?)`", listed) == sorted(ABLE)
    assert set(ABLE) - set(OPTIONS) == {"rslora", "lora-plus"}  # which compute what lora does


@pytest.mark.parametrize("experts", ["each", "shared"])
@long_table("method", sorted(set(OPTIONS) - {"lora"}), 4)
def test_the_weight_of_each_expert_is_that_of_the_equation(model, method, experts):
    equation, options = EQUATIONS[method]
    adapter = attach(model, method, experts=experts, layers="0..0")
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)
    for placed in adapter.placed:
        held = placed.site.held
        host = model.get_submodule(placed.site.host)
        before = host.get_parameter(held.parameter).clone()
        with torch.no_grad(), merged(model):
            after = host.get_parameter(held.parameter).clone()
        for number in (0, held.experts - 1):
            module = placed.module.module_of(number)
            for name, own in module.named_parameters():
                whole = placed.module.get_parameter(name)
                assert torch.equal(own, whole if experts == "shared" else whole[number])
            if method == "randlora":
                module.fixed = module.shared[0]
            with torch.no_grad():
                expected = equation(before[number], module, **options)
            torch.testing.assert_close(after[number], expected, atol=2e-4, rtol=2e-4)


@long_table("method", sorted(OPTIONS), 4)
def test_all_ways_to_multiply_compute_what_the_merged_weights_do(method):
    for experts in ("each", "shared"):
        gradients = []
        for way in IMPLEMENTATIONS:
            model = expert_model("mixtral", way)
            torch.manual_seed(0)
            adapter = attach(model, method, experts=experts)
            output = expert_logits(model)
            output.square().sum().backward()
            gradients.append([p.grad.clone() for p in adapter.parameters()])
            with torch.no_grad(), merged(model):
                torch.testing.assert_close(expert_logits(model), output, atol=2e-4, rtol=2e-3)
            adapter.detach()
        for other in gradients[1:]:
            for one, same in zip(gradients[0], other, strict=True):
                torch.testing.assert_close(one, same, atol=2e-3, rtol=2e-3)
                assert one.any()


@pytest.mark.parametrize("method", ["loha", "lokr", "miss"])
def test_experts_that_are_computed_at_once(method):
    model = expert_model("llama4_text")
    with torch.no_grad():
        bare = expert_logits(model)
        adapter = attach(model, method)
        output = expert_logits(model)
        assert not torch.equal(output, bare)
        with merged(model):
            torch.testing.assert_close(expert_logits(model), output, atol=2e-4, rtol=2e-3)
    adapter.detach()


@long_table("method", sorted(OPTIONS), 4)
def test_files_have_the_stacked_tensors_and_copies_compute_the_same(model, method, tmp_path):
    with torch.no_grad():
        bare = expert_logits(model)
        torch.manual_seed(0)
        adapter = ah.attach(model, {method: {"sites": SITES, **OPTIONS[method]}})
        assert torch.equal(expert_logits(model), bare)  # the start is that of the method
        redraw(adapter)
        expected = expert_logits(model)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(expert_logits(copied), expected)
        adapter.save(tmp_path / "a")
        tensors = load_file(tmp_path / "a" / "adapter.safetensors")
        numbers = sum(tensor.numel() for tensor in tensors.values())
        assert numbers == adapter.count()
        for placed in adapter.placed:
            for name, parameter in placed.module.named_parameters():
                stored = tensors[f"{placed.site.id}.{method}.{name}"]
                assert torch.equal(stored, parameter)
                assert len(stored) == placed.site.held.experts
        ah.detach(model)
        ah.load(model, tmp_path / "a")
        assert torch.equal(expert_logits(model), expected)


def test_each_expert_has_initial_values_of_its_own(model):
    adapter = ah.attach(model, {"loha": {"sites": SITES}})
    drawn = adapter.placed[0].module.A1
    assert not torch.equal(drawn[0], drawn[1])


def test_fixed_numbers_of_an_import_are_stored_once(model, tmp_path):
    adapter = attach(model, "vera", stored=True)
    with torch.no_grad():
        expected = expert_logits(model)
    adapter.save(tmp_path / "a")
    names = load_file(tmp_path / "a" / "adapter.safetensors").keys()
    assert sum(name.endswith(".fixed.A") for name in names) == 1
    ah.detach(model)
    ah.load(model, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(expert_logits(model), expected)


def test_dropout_is_that_of_the_method(model):
    adapter = attach(model, "lora", dropout=0.5)
    assert isinstance(adapter.placed[0].module, ExpertsUpdate)
    for way in IMPLEMENTATIONS:
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = way
        assert torch.equal(expert_logits(model), expert_logits(model))
        for placed in adapter.placed:
            placed.module.train()
        assert not torch.equal(expert_logits(model), expert_logits(model))
        model.eval()


@pytest.mark.parametrize("method", REFUSING)
def test_others_refuse_the_weights_of_experts_by_name(model, method):
    with pytest.raises(SiteError, match=f"{method} does not support these sites"):
        ah.attach(model, {method: {"sites": SITES}})


def test_they_are_neither_exported_nor_combined(model, tmp_path):
    attach(model, "loha", name="a")
    with pytest.raises(MismatchError, match="cannot be exported"):
        ah.adapters(model)["a"].export(tmp_path / "peft")
    attach(model, "loha", name="b")
    with pytest.raises(AdapterhubError, match="cannot be combined"):
        ah.combine(model, ["a", "b"])
    ah.detach(model)
