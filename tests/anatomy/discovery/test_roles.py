"""Roles of projections: attention by names and sizes, layouts of fused ones, and all others."""

from __future__ import annotations

import every_type
import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.anatomy import FAMILIES
from adapterhub.anatomy.discovery import discover
from adapterhub.anatomy.discovery import roles as discovery_roles
from adapterhub.anatomy.discovery.roles import (
    attention_group,
    attention_modules,
    attention_sites,
    attention_sublayers,
    further_sites,
    fused_layout,
    kind_of,
    mixer_of,
    own_name,
)
from adapterhub.anatomy.projections import latent_sizes
from tests.kit.selection import long_table


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


class NewConvMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.out_proj(self.in_proj(x))


class NewMLP(NewConvMixer):
    pass


class NewConvLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.feed_forward = NewConvMixer(), NewMLP()
        self.moe = nn.ModuleDict({"experts": nn.ModuleList([NewMLP()]), "gate": nn.Linear(4, 2)})
        self.side = nn.Linear(4, 4)


PATHS = (
    "conv.in_proj",
    "conv.out_proj",
    "feed_forward.in_proj",
    "moe.experts.0.in_proj",
    "moe.gate",
    "side",
)


def test_each_projection_has_a_role_by_the_module_around_it_but_those_of_experts():
    assert further_sites(NewConvLayer(), PATHS, {"attn.o": "conv.out_proj"}) == {
        "mixer.in_proj": "conv.in_proj",
        "ffn.in_proj": "feed_forward.in_proj",
        "moe.gate": "moe.gate",
        "other.side": "side",
    }


def test_equal_names_and_names_that_are_taken_get_longer():
    layer = nn.ModuleDict({"a": NewMLP(), "b": NewMLP()})
    paths = ("a.in_proj", "b.in_proj")
    found = further_sites(nn.ModuleDict({"mlp": layer}), [f"mlp.{p}" for p in paths], {})
    assert found == {"ffn.a_in_proj": "mlp.a.in_proj", "ffn.b_in_proj": "mlp.b.in_proj"}
    one = further_sites(nn.ModuleDict({"mlp": NewMLP()}), ["mlp.in_proj"], {"ffn.in_proj": "x"})
    assert one == {"ffn.mlp_in_proj": "mlp.in_proj"}


def test_the_innermost_module_decides(subtests):
    for path, kind in list(
        zip(PATHS, ("mixer", "mixer", "ffn", "ffn", "moe", "other"), strict=True)
    ):
        with subtests.test(path=path):
            assert kind_of(NewConvLayer(), path) == kind


def test_what_a_class_shares_with_its_layer_says_nothing():
    assert own_name(NewMLP(), NewConvLayer()) == "MLP"
    assert own_name(NewConvMixer(), NewConvLayer()) == "Mixer"
    assert own_name(NewMLP(), NewMLP()) == "NewMLP"


def test_a_mixer_is_the_module_that_has_all_its_projections():
    layer = NewConvLayer()
    assert mixer_of(layer, {"mixer.in": "conv.in_proj", "mixer.out": "conv.out_proj"}) == "conv"
    assert mixer_of(layer, {"mixer.in": "conv.in_proj", "mixer.out": "side"}) is None
    assert mixer_of(layer, {"ffn.up": "feed_forward.in_proj"}) is None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.heads = nn.Linear(4, 12), 2


class Blocks(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 3, self.heads, -1).permute(1, 0, 2, 3).unbind(0)
        return q, k, v


class Chunks(Attention):
    def forward(self, x):
        mixed = self.qkv(x)
        if self.heads:
            mixed = mixed.clamp(min=-1)
        query, key, value = mixed.chunk(3, dim=2)
        return query, key, value


class Heads(Attention):
    def forward(self, x):
        mixed = self.qkv(x).view(2, self.heads, 3, -1)
        query, key, value = mixed.unbind(-2)
        return query, key, value


class WideHeads(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).view(2, self.heads, 3 * 2).transpose(1, 2).split(2, dim=-1)
        return q, k, v


class OtherOrder(Attention):
    def forward(self, x):
        query, value, key = self.qkv(x).chunk(3, dim=-1)
        return query, key, value


class Shape(Attention):
    def forward(self, x):
        shape = (2, self.heads, 3, -1)
        query, key, value = self.qkv(x).view(shape).unbind(-2)
        return query, key, value


class Both(Attention):
    def forward(self, x):
        if self.heads:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        else:
            q, k, v = self.qkv(x).view(2, self.heads, 3, -1).unbind(-2)
        return q, k, v


class AfterAnotherProjection(Attention):
    def forward(self, x):
        q, k, v = nn.functional.relu(self.qkv(x)[::2]).chunk(3, dim=-1)
        return q, k, v


def test_the_layout_is_read_where_the_output_is_split(subtests):
    cases = [
        (Blocks, "blocks"),
        (Chunks, "blocks"),
        (Heads, "heads"),
        (WideHeads, "heads"),
        (OtherOrder, "whole"),
        (Shape, "whole"),
        (Both, "whole"),
        (AfterAnotherProjection, "whole"),
        (Attention, "whole"),
    ]
    for attention, layout in cases:
        with subtests.test(attention=attention):
            assert fused_layout(attention(), "qkv") == layout
            assert fused_layout(attention(), "other") == "whole"


FUSED = [a for a, row in FAMILIES.items() if "attn.qkv" in row.stacks[0].sites]


def test_what_is_read_is_what_the_row_says(subtests):
    for architecture in FUSED:
        with subtests.test(architecture=architecture):
            model = every_type.build(architecture, every_type.autos(architecture)[0])
            (stack,) = discover(model).stacks
            said = FAMILIES[architecture].stacks[0].fused.get("attn.qkv", "blocks")
            assert stack.fused["attn.qkv"] in (said, "whole")


TOWERS = (
    "blip", "blip-2", "exaone4_5", "florence2", "glm4v", "glm_ocr", "got_ocr2", "instructblip",
    "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "sam", "unlimited_ocr",
)  # fmt: skip


@long_table("model_type", TOWERS, 3)
def test_the_parts_of_a_vision_tower_are_sites(model_type):
    model = every_type.build(model_type, every_type.autos(model_type, every_type.ADAPTED)[0])
    sites = ah.anatomy_of(model).sites
    assert {"vision.0.attn.q", "vision.0.attn.k", "vision.0.attn.v"} <= sites.keys()


PIXELS = {
    "qwen2_vl": ({"embed_dim": 32, "hidden_size": 32, "num_heads": 4, "depth": 2}, 1176),
    "qwen2_5_vl": (
        {
            "hidden_size": 32, "num_heads": 4, "depth": 2, "intermediate_size": 48,
            "out_hidden_size": 32,
        },
        1176,
    ),
    "qwen3_vl": (
        {
            "hidden_size": 32, "num_heads": 4, "depth": 2, "intermediate_size": 48,
            "out_hidden_size": 32, "deepstack_visual_indexes": [0],
        },
        1536,
    ),
}  # fmt: skip


def tower(model_type):
    """Build a tiny vision tower and the pixels of two pictures for it."""
    sizes, pixels = PIXELS[model_type]
    whole = every_type.build(model_type, "AutoModel")
    config = type(whole.config.vision_config)(**sizes)
    torch.manual_seed(0)
    model = type(whole.visual)._from_config(config).eval()
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    return model, {"hidden_states": torch.randn(24, pixels), "grid_thw": grid}


@pytest.mark.parametrize("model_type", PIXELS)
def test_value_features_are_those_attention_uses(model_type):
    model, inputs = tower(model_type)
    site = next(s for i, s in ah.anatomy_of(model).sites.items() if i.endswith("0.attn.v"))
    output = site.host.replace("qkv", "proj")
    seen = []
    model.get_submodule(site.host).register_forward_hook(
        lambda _, args, y: site.part.write(y, torch.zeros_like(site.part.read(y)))
    )
    model.get_submodule(output).register_forward_hook(lambda _, args, y: seen.append(args[0]))
    with torch.no_grad():
        model(**inputs)
    assert seen[0].abs().max() == 0


@pytest.mark.parametrize("method", ["lora", "prefix", "ia3"])
@pytest.mark.parametrize("model_type", PIXELS)
def test_a_method_of_parts_works_on_a_vision_tower(model_type, method):
    model, inputs = tower(model_type)
    with torch.no_grad():
        before = model(**inputs)[0]
    adapter = ah.attach(model, method)
    for parameter in adapter.parameters():
        nn.init.normal_(parameter, std=0.2)
    output = model(**inputs)[0]
    assert not torch.allclose(output, before, atol=1e-4)
    output.pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in adapter.parameters())
    adapter.detach()
    assert torch.equal(model(**inputs)[0], before)
