"""Sites of attention: the layout of a fused projection, and where keys and values are."""

import every_type
import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.anatomy import FAMILIES
from adapterhub.anatomy.discovery import discover
from adapterhub.anatomy.discovery import roles as discovery_roles
from adapterhub.anatomy.discovery.roles import attention_modules, attention_sites, fused_layout
from adapterhub.anatomy.projections import latent_sizes
from tests.kit.selection import long_table


def test_latent_keys_and_values_have_a_site_if_their_sizes_are_known(monkeypatch):
    monkeypatch.setattr(discovery_roles, "attends", lambda attention: "interface")
    latent = {"q_proj": (4, 4), "kv_a_proj_with_mqa": (4, 3), "kv_b_proj": (2, 8), "o_proj": (4, 4)}
    attention = nn.ModuleDict({name: nn.Linear(*sizes) for name, sizes in latent.items()})
    layer = nn.ModuleDict({"attn": attention})
    ((path, projections),) = attention_modules(layer)
    assert "attn.kv" not in attention_sites(layer, "attn", path, projections, 4)
    sizes = {"num_heads": 2, "qk_head_dim": 3, "v_head_dim": 2}
    for name, size in sizes.items():
        setattr(layer["attn"], name, size)
    assert attention_sites(layer, "attn", path, projections, 4)["attn.kv"] == "attn"
    assert latent_sizes(layer["attn"]) == (6, 4)


def test_a_layer_may_be_an_attention_itself():
    """The path of its keys and values is empty."""
    anatomy = ah.anatomy_of(every_type.build("xlm", "AutoModel", tiny=True))
    site = anatomy.sites["encoder.0.attn.kv"]
    assert site.host == anatomy.layers["encoder"][0]
    assert (site.d_out, site.d_values) == (site.d_in, None)


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


@pytest.mark.parametrize(
    ("attention", "layout"),
    [
        (Blocks, "blocks"), (Chunks, "blocks"), (Heads, "heads"), (WideHeads, "heads"),
        *((unknown, "whole") for unknown in (
            OtherOrder, Shape, Both, AfterAnotherProjection, Attention
        )),
    ],
)  # fmt: skip
def test_the_layout_is_read_where_the_output_is_split(attention, layout):
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


VISION = {"hidden_size": 32, "num_heads": 4, "depth": 2}
OF_QWEN = VISION | {"intermediate_size": 48, "out_hidden_size": 32}
PIXELS = {
    "qwen2_vl": (VISION | {"embed_dim": 32}, 1176),
    "qwen2_5_vl": (OF_QWEN, 1176),
    "qwen3_vl": (OF_QWEN | {"deepstack_visual_indexes": [0]}, 1536),
}


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
