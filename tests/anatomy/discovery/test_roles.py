"""Attention modules: by the names and the sizes of their projections."""

from __future__ import annotations

import every_type
import pytest
from torch import nn

import adapterhub as ah
from adapterhub.anatomy.discovery import roles as discovery_roles
from adapterhub.anatomy.discovery.roles import (
    attention_group,
    attention_modules,
    attention_sites,
    attention_sublayers,
)
from adapterhub.anatomy.projections import latent_sizes


def module(**projections):
    return nn.ModuleDict({name: nn.Linear(*sizes) for name, sizes in projections.items()})


SEPARATE = {"q_proj": (4, 4), "k_proj": (4, 2), "v_proj": (4, 2), "o_proj": (4, 4)}


def test_attention_is_found_by_its_projections(subtests):
    cases = [
        (SEPARATE, {"q", "k", "v", "o"}),
        ({"query": (4, 4), "key": (4, 4), "value": (4, 4)}, {"q", "k", "v"}),
        ({"Wqkv": (4, 12), "Wo": (4, 4)}, {"qkv", "o"}),
        ({"c_attn": (4, 8), "c_proj": (4, 4)}, {"qkv", "o"}),  # two key heads of half the size
        ({"q_proj": (4, 4), "o_proj": (4, 4)}, {"q", "o"}),  # keys of an earlier layer
        ({"kv_a_proj_with_mqa": (4, 3), "kv_b_proj": (2, 8)}, {"kv_a", "kv_b"}),
    ]
    for projections, roles in cases:
        with subtests.test(projections=projections):
            ((path, found),) = attention_modules(nn.ModuleDict({"any": module(**projections)}))
            assert path == "any"
            assert set(found) == roles


@pytest.mark.parametrize(
    "projections",
    [
        {"qkv": (4, 7), "proj": (4, 4)},  # no size of q, k and v
        {"q_proj": (4, 4), "k_proj": (4, 4)},
        {"fc1": (4, 8), "fc2": (8, 4)},
    ],
)
def test_other_modules_are_no_attention(projections):
    assert not list(attention_modules(nn.ModuleDict({"any": module(**projections)})))


def test_linear_attention_is_none():
    class GatedDeltaNet(nn.ModuleDict):
        pass

    layer = nn.ModuleDict({"any": GatedDeltaNet(module(**SEPARATE))})
    assert not list(attention_modules(layer))


def test_cross_attention_is_known_by_its_path():
    layer = nn.ModuleDict({"self_attn": module(**SEPARATE), "encoder_attn": module(**SEPARATE)})
    found = attention_sublayers(layer)
    assert {name: list(paths) for name, paths in found.items()} == {
        "attn": ["self_attn"],
        "cross": ["encoder_attn"],
    }


def test_the_output_may_be_beside_the_attention():
    layer = nn.ModuleDict(
        {
            "attention": nn.ModuleDict(
                {
                    "self": module(query=(4, 4), key=(4, 4), value=(4, 4)),
                    "output": module(dense=(4, 4)),
                }
            )
        }
    )
    ((path, projections),) = attention_modules(layer)
    assert attention_group(path) == "attention"
    assert attention_sites(layer, "attn", path, projections, 4) == {
        "attn.q": "attention.self.query",
        "attn.k": "attention.self.key",
        "attn.v": "attention.self.value",
        "attn.o": "attention.output.dense",
    }
    assert "attn.o" not in attention_sites(layer, "attn", path, projections, 5)


def test_latent_keys_and_values_have_a_site_if_their_sizes_are_known(monkeypatch):
    monkeypatch.setattr(discovery_roles, "attends", lambda attention: "interface")
    latent = {"q_proj": (4, 4), "kv_a_proj_with_mqa": (4, 3), "kv_b_proj": (2, 8), "o_proj": (4, 4)}
    layer = nn.ModuleDict({"attn": module(**latent)})
    ((path, projections),) = attention_modules(layer)
    assert "attn.kv" not in attention_sites(layer, "attn", path, projections, 4)
    sizes = {"num_heads": 2, "qk_head_dim": 3, "v_head_dim": 2}
    for name, size in sizes.items():
        setattr(layer["attn"], name, size)
    assert attention_sites(layer, "attn", path, projections, 4)["attn.kv"] == "attn"
    assert latent_sizes(layer["attn"]) == (6, 4)


def test_a_projection_may_be_named_before_or_behind_its_role(subtests):
    for name in ["projection_{}", "project_{}", "linear_{}", "{}_proj", "{}_lin"]:
        with subtests.test(name=name):
            layer = nn.ModuleDict({"attn": module(**{name.format(r): (4, 4) for r in "qkv"})})
            ((_, projections),) = attention_modules(layer)
            assert projections == {role: name.format(role) for role in "qkv"}


def test_a_projection_may_be_wrapped():
    wrapped = {f"{role}_proj": nn.ModuleDict({"linear": nn.Linear(4, 4)}) for role in "qkv"}
    layer = nn.ModuleDict({"attn": nn.ModuleDict(wrapped)})
    ((_, projections),) = attention_modules(layer)
    assert projections == {role: f"{role}_proj.linear" for role in "qkv"}


def test_a_layer_may_be_an_attention_itself():
    """The path of its keys and values is empty."""
    anatomy = ah.anatomy_of(every_type.build("xlm", "AutoModel", tiny=True))
    site = anatomy.sites["encoder.0.attn.kv"]
    assert site.host == anatomy.layers["encoder"][0]
    assert (site.d_out, site.d_values) == (site.d_in, None)
