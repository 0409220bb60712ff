"""The weights of routed experts and of routers: where they are, and their sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.anatomy.projections import (
    HeldWeight,
    expert_modules,
    expert_weights,
    router_path,
    router_weight,
)
from adapterhub.anatomy.sites import names_a_role
from tests.kit.own_models import TRANSPOSED, TYPES, expert_model, holders


class Stacked(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


def test_experts_and_routers_are_sites(subtests):
    for model_type in TYPES:
        with subtests.test(model_type=model_type):
            model = expert_model(model_type)
            anatomy = ah.anatomy_of(model)
            held = [site for site in anatomy.sites.values() if site.kind == "weight"]
            experts = [site for site in held if site.held.experts]
            modules = list(holders(model))
            assert len(experts) == 2 * len(modules) > 0
            assert {site.role for site in experts} <= {
                f"ffn.experts.{n}" for n in ("gate_up", "up", "down")
            }
            for site in experts:
                parameter = model.get_submodule(site.host).get_parameter(site.held.parameter)
                assert site.held.transposed == (model_type in TRANSPOSED)
                sizes = (site.d_in, site.d_out) if site.held.transposed else (site.d_out, site.d_in)
                assert parameter.shape == (site.held.experts, *sizes)
                width = site.d_out if site.role.endswith("down") else site.d_in
                assert width == model.config.hidden_size
            routers = [site for site in anatomy.sites.values() if site.role == "ffn.router"]
            assert len(routers) == len(modules)
            assert {(s.d_in, s.d_out) for s in routers} == {
                (model.config.hidden_size, experts[0].held.experts)
            }


def test_there_are_twelve_types_of_all_forms():
    assert len(set(TYPES)) == 12
    assert set(TRANSPOSED) < set(TYPES)


def test_sizes_tell_whether_matrices_are_transposed():
    plain = Stacked(gate_up_proj=(4, 12, 8), down_proj=(4, 8, 6))
    turned = Stacked(gate_up_proj=(4, 8, 12), down_proj=(4, 6, 8))
    for module, transposed in ((plain, False), (turned, True)):
        weights = expert_weights(module)
        assert weights == {
            "gate_up": HeldWeight("gate_up_proj", 4, transposed),
            "down": HeldWeight("down_proj", 4, transposed),
        }
        assert weights["gate_up"].sizes(module) == (8, 12)
        assert weights["down"].sizes(module) == (6, 8)


@pytest.mark.parametrize(
    "shapes",
    [
        {"gate_up_proj": (4, 12, 8)},  # no output
        {"gate_up_proj": (4, 12, 8), "down_proj": (3, 8, 6)},
        {"gate_up_proj": (12, 8), "down_proj": (8, 6)},
        {"weight": (4, 8, 6)},
    ],
)
def test_other_modules_hold_no_experts(shapes):
    assert expert_weights(Stacked(**shapes)) == {}


def test_codes_of_a_quantization_are_no_experts():
    module = Stacked()
    for name, shape in (("gate_up_proj", (4, 12, 8)), ("down_proj", (4, 8, 6))):
        codes = torch.zeros(shape, dtype=torch.uint8)
        setattr(module, name, nn.Parameter(codes, requires_grad=False))
    assert expert_weights(module) == {}


def test_a_router_is_beside_the_experts_and_has_an_output_for_each():
    layer = nn.Module()
    layer.mlp = nn.Module()
    layer.mlp.experts = Stacked(gate_up_proj=(4, 12, 8), down_proj=(4, 8, 6))
    layer.mlp.shared_expert_gate = nn.Linear(8, 4)
    assert expert_modules(layer) == ["mlp.experts"]
    assert router_path(layer, "mlp.experts") is None
    layer.mlp.gate = Stacked(weight=(5, 8))
    assert router_path(layer, "mlp.experts") is None
    layer.mlp.gate = Stacked(weight=(4, 8))
    assert router_path(layer, "mlp.experts") == "mlp.gate"
    assert router_weight(layer.mlp.gate) == HeldWeight("weight")
    assert router_weight(nn.Linear(8, 4)) is None  # a projection: hooks change its output


def test_roles_of_experts_are_roles_elsewhere_too():
    assert names_a_role("ffn.experts.down")
    assert names_a_role("decoder.3.ffn.router")
    assert not names_a_role("ffn.experts.side")
