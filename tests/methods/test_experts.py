"""Methods at the weights of routed experts and of routers: sizes, options, refusals."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import adapterhub as ah
from adapterhub.errors import AdapterhubError, SiteError
from adapterhub.methods import METHODS
from tests.kit.own_models import TYPES, expert_logits, expert_model, redraw
from tests.kit.selection import long_table

EXPERTS = "[ffn.experts.*]"


@pytest.fixture(params=["mixtral", "gpt_oss", "nemotron_h"])
def model(request):
    model = expert_model(request.param)
    yield model
    if ah.adapters(model):
        ah.detach(model)


def sizes(model, role="ffn.experts."):
    return [
        (site.d_in, site.d_out, site.held.experts)
        for site in ah.anatomy_of(model).sites.values()
        if site.role.startswith(role)
    ]


def test_numbers_of_parameters(model):
    each = [(d_in + d_out, experts) for d_in, d_out, experts in sizes(model)]
    assert len(each) > 1
    cases = {
        f"lora(sites={EXPERTS}, rank=3)": sum(3 * d * e for d, e in each),
        f"lora(sites={EXPERTS}, rank=3, experts=shared)": sum(3 * d for d, _ in each),
        "ia3(sites=[ffn.experts.down])": sum(
            d_in * e for d_in, _, e in sizes(model, "ffn.experts.down")
        ),
        "ia3(sites=[ffn.experts.down], experts=shared)": sum(
            d_in for d_in, _, _ in sizes(model, "ffn.experts.down")
        ),
    }
    for spec, expected in cases.items():
        adapter = ah.attach(model, spec)
        assert adapter.count() == expected == adapter.methods[0].count(adapter.anatomy), spec
        adapter.detach()


def test_tensors_have_the_names_of_their_sites(model, tmp_path):
    adapter = ah.attach(model, f"lora(sites={EXPERTS}, rank=3)")
    redraw(adapter)
    with torch.no_grad():
        expected = expert_logits(model)
    adapter.save(tmp_path / "a")
    site = next(s for s in adapter.anatomy.sites.values() if s.held and s.held.experts)
    ah.detach(model)
    tensors = load_file(tmp_path / "a" / "adapter.safetensors")
    assert tensors[f"{site.id}.lora.A"].shape == (site.held.experts, 3, site.d_in)
    assert tensors[f"{site.id}.lora.B"].shape == (site.held.experts, site.d_out, 3)
    ah.load(model, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(expert_logits(model), expected)


def test_experts_are_no_default_sites_of_any_method():
    """Peers adapt experts only where they are named."""
    anatomy = ah.anatomy_of(expert_model("mixtral"))
    tried = 0
    for method in METHODS.values():
        try:
            steps = list(method.example().plan(anatomy))
        except (AdapterhubError, NotImplementedError):
            continue
        tried += 1
        placed = [step.site for step in steps if hasattr(step, "site")]
        assert not [site.id for site in placed if site.kind == "weight"], method.name
    assert tried > 10


def test_wildcards_beside_other_sites(model):
    """`ffn.experts.*` means experts, also beside patterns that select projections."""
    adapter = ah.attach(model, "lora(sites=[attn.q, ffn.experts.*])")
    roles = {placed.site.role for placed in adapter.placed}
    assert "attn.q" in roles
    assert {r for r in roles if r.startswith("ffn.experts.")} == {
        s.role for s in adapter.anatomy.sites.values() if s.held and s.held.experts
    }
    adapter.detach()


def test_ranks_of_experts(model):
    adapter = ah.attach(
        model, {"lora": {"sites": ["ffn.experts.*"], "ranks": {"ffn.experts.down": 2}}}
    )
    ranks = {placed.site.role: placed.module.A.shape[-2] for placed in adapter.placed}
    assert ranks.pop("ffn.experts.down") == 2
    assert set(ranks.values()) == {8}
    adapter.detach()


def test_shared_without_experts_is_refused(model):
    for spec in ("lora(experts=shared, sites=[attn.q])", "ia3(experts=shared, sites=[attn.v])"):
        with pytest.raises(SiteError, match="none of its sites is a weight of experts"):
            ah.attach(model, spec)


def test_methods_that_cannot_adapt_held_weights_say_so(model):
    for method in ("dora", "pissa", "pfeiffer", "compacter"):
        with pytest.raises(SiteError, match=f"{method} does not support these sites") as error:
            ah.attach(model, f"{method}(sites={EXPERTS})")
        assert any(role.startswith("ffn.experts.") for role in error.value.offenders), method
        assert not ah.adapters(model)


@long_table("model_type", TYPES, 3)
def test_the_router_learns_and_nothing_else(model_type):
    model = expert_model(model_type)
    adapter = ah.attach(model, "lora(sites=[ffn.router], rank=2)")
    redraw(adapter)
    expert_logits(model).square().sum().backward()
    gradients = [p.grad for p in adapter.parameters()]
    routers = [s for s in ah.anatomy_of(model).sites.values() if s.role == "ffn.router"]
    assert len(gradients) == 2 * len(routers) > 0
    assert any(g is not None and g.any() for g in gradients)
    others = set(model.parameters()) - set(adapter.parameters())
    assert others
    assert all(p.grad is None for p in others)
    adapter.detach()


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_the_own_weight_of_a_router_can_train(model_type):
    model = expert_model(model_type)
    anatomy = ah.anatomy_of(model)
    path = next(f"{s.host}.weight" for s in anatomy.sites.values() if s.role == "ffn.router")
    adapter = ah.attach(model, {"chosen": {"names": [anatomy.key(path)]}})
    assert adapter.count() == model.get_parameter(path).numel()
    expert_logits(model).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in adapter.parameters())
    adapter.detach()
