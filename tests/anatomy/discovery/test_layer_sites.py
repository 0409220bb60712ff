"""The sites of one layer: attention, feed-forward networks, norms."""

from __future__ import annotations

import every_type
import pytest
import torch
import transformers
from torch import nn

import adapterhub as ah
from adapterhub.anatomy import anatomy_of
from adapterhub.anatomy.discovery.layer_sites import (
    expert_blocks,
    feed_forward_group,
    feed_forward_networks,
    inner_size,
    sites_of_layer,
)


@pytest.mark.parametrize(
    ("model_type", "layers", "sites"),
    [
        (
            "llama",
            "layers",
            {
                "attn.q": "self_attn.q_proj",
                "attn.k": "self_attn.k_proj",
                "attn.v": "self_attn.v_proj",
                "attn.o": "self_attn.o_proj",
                "attn.kv": "self_attn",
                "ffn.gate": "mlp.gate_proj",
                "ffn.up": "mlp.up_proj",
                "ffn.down": "mlp.down_proj",
                "attn.norm": "input_layernorm",
                "ffn.norm": "post_attention_layernorm",
            },
        ),
        (
            "mamba",
            "layers",
            {
                "mixer.in_proj": "mixer.in_proj",
                "mixer.x_proj": "mixer.x_proj",
                "mixer.dt_proj": "mixer.dt_proj",
                "mixer.out_proj": "mixer.out_proj",
                "mixer": "mixer",
            },
        ),
    ],
)
def test_the_sites_of_a_layer(model_type, layers, sites):
    model = every_type.build(model_type, "AutoModel")
    layer = model.get_submodule(layers)[0]
    assert sites_of_layer(layer, model.config.hidden_size) == sites


class Layer(nn.ModuleDict):
    """A layer of named projections, given as (input size, output size)."""

    def __init__(self, **projections):
        super().__init__({name: nn.Linear(*sizes) for name, sizes in projections.items()})


def test_a_network_is_found_by_its_sizes(subtests):
    cases = [
        ({"fc1": (4, 8), "fc2": (8, 4)}, {"ffn.up": "fc1", "ffn.down": "fc2"}),
        (
            {"gate": (4, 8), "up": (4, 8), "down": (8, 4)},
            {"ffn.gate": "gate", "ffn.up": "up", "ffn.down": "down"},
        ),
        ({"gate_up": (4, 16), "down": (8, 4)}, {"ffn.gate_up": "gate_up", "ffn.down": "down"}),
        (
            {"w_0": (4, 8), "w_1": (4, 8), "down": (8, 4)},
            {"ffn.gate": "w_0", "ffn.up": "w_1", "ffn.down": "down"},
        ),
        ({"wide": (4, 16), "down": (8, 4)}, {"ffn.gate_up": "wide", "ffn.down": "down"}),
        # Which of two is the gate, or of two of double width the network's, is unknown.
        ({"one": (4, 8), "two": (4, 8), "down": (8, 4)}, {"ffn.down": "down"}),
        ({"wide": (4, 16), "other": (4, 16), "down": (8, 4)}, {"ffn.down": "down"}),
    ]
    for projections, found in cases:
        with subtests.test(projections=projections):
            assert feed_forward_networks(Layer(**projections), [], 4)[0] == found


def test_sizes_that_do_not_fit_are_no_network():
    assert feed_forward_networks(Layer(fc1=(4, 8), fc2=(6, 4)), [], 4) == []


def test_networks_are_compared_by_their_inner_size():
    layer = Layer(a=(4, 8), b=(8, 4), c=(4, 6), d=(6, 4))
    networks = feed_forward_networks(layer, [], 4)
    assert [inner_size(layer, network) for network in networks] == [6, 8]
    assert inner_size(layer, {"ffn": "experts"}) == float("inf")


def test_a_block_of_experts_is_the_outermost_module_with_experts():
    inner = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])})
    assert expert_blocks(nn.ModuleDict({"mlp": inner, "other": nn.Linear(2, 2)})) == ["mlp"]


def test_the_group_of_a_network_has_no_attention():
    model = every_type.build("llama", "AutoModel")
    layer = model.layers[0]
    sites = {"ffn.down": "mlp.down_proj"}
    assert feed_forward_group(layer, {"attn": "self_attn"}, sites) == {"ffn": "mlp"}
    assert feed_forward_group(layer, {"attn": "mlp"}, sites) == {}


def test_a_mixture_of_experts_is_a_sublayer_as_a_whole():
    config = transformers.Qwen2MoeConfig(num_hidden_layers=2, mlp_only_layers=[0])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    sites = ah.anatomy_of(model).sites
    assert sites["decoder.1.ffn"].host == "model.layers.1.mlp"
    assert sites["decoder.1.ffn"].input_host is None
    assert sites["decoder.0.ffn"].host == "model.layers.0.mlp.down_proj"
    assert "decoder.1.ffn.up" not in sites
    assert sites["decoder.0.ffn.up"].host == "model.layers.0.mlp.up_proj"


# model type -> role -> the norm in a layer; None: its role is ambiguous.
NORMS = {
    "bitnet": {"attn.norm": "input_layernorm", "ffn.norm": "post_attention_layernorm"},
    "diffllama": {"attn.norm": "input_layernorm", "ffn.norm": "post_attention_layernorm"},
    "glm4": {
        "attn.norm": "input_layernorm", "attn.postnorm": "post_self_attn_layernorm",
        "ffn.norm": "post_attention_layernorm", "ffn.postnorm": "post_mlp_layernorm",
    },
    "gpt_oss": {"attn.norm": "input_layernorm", "attn.postnorm": None},
    "megatron-bert": {"attn.norm": "attention.ln", "ffn.norm": "ln"},
    "nllb-moe": {"attn.norm": "self_attn_layer_norm", "ffn.norm": "ff_layer_norm"},
    "olmoe": {"attn.norm": "input_layernorm", "ffn.norm": "post_attention_layernorm"},
    "pegasus_x": {"attn.norm": None, "ffn.norm": None},
    "t5gemma": {
        "attn.norm": "pre_self_attn_layernorm", "attn.postnorm": "post_self_attn_layernorm",
    },
}  # fmt: skip


def test_a_norm_belongs_to_the_sublayer_that_it_is_applied_to(subtests):
    for model_type in NORMS:
        with subtests.test(model_type=model_type):
            _, _, model = next(every_type.every_model((model_type,)))
            anatomy = anatomy_of(model)
            stack = next(iter(anatomy.stacks))
            for role, norm in NORMS[model_type].items():
                for number, layer in enumerate(anatomy.layers[stack]):
                    site = anatomy.sites.get(f"{stack}.{number}.{role}")
                    assert (site and site.host) == (norm and f"{layer}.{norm}"), role
