"""The sites of one layer: attention, feed-forward networks, experts, all others, norms."""

import every_type
import pytest
from torch import nn

from adapterhub.anatomy import anatomy_of
from adapterhub.anatomy.discovery.layer_sites import sites_of_layer


class NewConvMixer(nn.ModuleDict):
    """A module whose class tells its kind, as the next two."""


class NewMLP(nn.ModuleDict):
    pass


class GatedDeltaNet(nn.ModuleDict):
    pass


class NewConvLayer(nn.ModuleDict):
    """A layer that shares a part of its name with its mixer."""


def built(parts, kind=nn.ModuleDict):
    """Build modules of named parts: (input size, output size) is a projection."""
    if isinstance(parts, tuple):
        return nn.Linear(*parts)
    return kind({n: p if isinstance(p, nn.Module) else built(p) for n, p in parts.items()})


SEPARATE = {"q_proj": (4, 4), "k_proj": (4, 2), "v_proj": (4, 2), "o_proj": (4, 4)}
PLAIN = {"query": (4, 4), "key": (4, 4), "value": (4, 4)}
IN_OUT = {"in_proj": (4, 8), "out_proj": (8, 4)}
EXPERTS = {"experts": nn.ModuleList([built(IN_OUT, NewMLP)]), "gate": (4, 2)}
# The modules of a layer with four features, and its sites.
LAYERS = {
    "attention": ({"a": SEPARATE}, {f"attn.{r}": f"a.{r}_proj" for r in "qkvo"}),
    "without an output": ({"a": PLAIN}, {f"attn.{n[0]}": f"a.{n}" for n in PLAIN}),
    "fused": ({"a": {"Wqkv": (4, 12), "Wo": (4, 4)}}, {"attn.qkv": "a.Wqkv", "attn.o": "a.Wo"}),
    "two key heads of half the size": (
        {"a": {"c_attn": (4, 8), "c_proj": (4, 4)}},
        {"attn.qkv": "a.c_attn", "attn.o": "a.c_proj"}),
    "keys of an earlier layer": (
        {"a": {"q_proj": (4, 4), "o_proj": (4, 4)}}, {"attn.q": "a.q_proj", "attn.o": "a.o_proj"}),
    "latent": (
        {"a": {"kv_a_proj_with_mqa": (4, 3), "kv_b_proj": (2, 8)}},
        {"attn.kv_a": "a.kv_a_proj_with_mqa", "attn.kv_b": "a.kv_b_proj"}),
    "no size of q, k and v": (
        {"a": {"qkv": (4, 7), "proj": (4, 4)}}, {"other.qkv": "a.qkv", "other.proj": "a.proj"}),
    "no values": (
        {"a": {"q_proj": (4, 4), "k_proj": (4, 4)}},
        {"ffn.down": "a.k_proj", "ffn.up": "a.q_proj"}),
    "linear attention": (
        {"a": built(SEPARATE, GatedDeltaNet)},
        {"mixer": "a", **{f"mixer.{r}_proj": f"a.{r}_proj" for r in "qkvo"}}),
    "cross-attention, by its path": (
        {"self_attn": SEPARATE, "encoder_attn": SEPARATE},
        {f"attn.{r}": f"self_attn.{r}_proj" for r in "qkvo"}
        | {f"cross.{r}": f"encoder_attn.{r}_proj" for r in "qkvo"}),
    "an output next to the attention": (
        {"attention": {"self": PLAIN, "output": {"dense": (4, 4)}}},
        {f"attn.{n[0]}": f"attention.self.{n}" for n in PLAIN}
        | {"attn.o": "attention.output.dense"}),
    "an output of another size": (
        {"attention": {"self": PLAIN, "output": {"dense": (4, 5)}}},
        {f"attn.{n[0]}": f"attention.self.{n}" for n in PLAIN}
        | {"attn.dense": "attention.output.dense"}),
    "wrapped projections": (
        {"a": {f"{r}_proj": {"linear": (4, 4)} for r in "qkv"}},
        {f"attn.{r}": f"a.{r}_proj.linear" for r in "qkv"}),
    "network": ({"fc1": (4, 8), "fc2": (8, 4)}, {"ffn.up": "fc1", "ffn.down": "fc2"}),
    "gated": (
        {"gate": (4, 8), "up": (4, 8), "down": (8, 4)},
        {"ffn.gate": "gate", "ffn.up": "up", "ffn.down": "down"}),
    "numbered": (
        {"w_0": (4, 8), "w_1": (4, 8), "down": (8, 4)},
        {"ffn.gate": "w_0", "ffn.up": "w_1", "ffn.down": "down"}),
    "fused gate": (
        {"gate_up": (4, 16), "down": (8, 4)}, {"ffn.gate_up": "gate_up", "ffn.down": "down"}),
    "double width": (
        {"wide": (4, 16), "down": (8, 4)}, {"ffn.gate_up": "wide", "ffn.down": "down"}),
    # Which of two is the gate, or of two of double width the network's, is unknown.
    "two of one width": (
        {"one": (4, 8), "two": (4, 8), "down": (8, 4)},
        {"ffn.down": "down", "other.one": "one", "other.two": "two"}),
    "two of double width": (
        {"wide": (4, 16), "other": (4, 16), "down": (8, 4)},
        {"ffn.down": "down", "other.wide": "wide", "other.other": "other"}),
    "sizes that do not fit": (
        {"fc1": (4, 8), "fc2": (6, 4)}, {"other.fc1": "fc1", "other.fc2": "fc2"}),
    "the larger of two networks": (
        {"a": (4, 8), "b": (8, 4), "c": (4, 6), "d": (6, 4)},
        {"ffn.up": "a", "ffn.down": "b", "other.c": "c", "other.d": "d"}),
    "experts, a mixer and a network": (
        {"conv": built(IN_OUT, NewConvMixer), "feed_forward": built(IN_OUT, NewMLP),
         "moe": EXPERTS, "side": (4, 4)},
        {"mixer": "conv", "mixer.in_proj": "conv.in_proj", "mixer.out_proj": "conv.out_proj",
         "ffn": "moe", "ffn.in_proj": "feed_forward.in_proj",
         "ffn.out_proj": "feed_forward.out_proj", "moe.gate": "moe.gate", "other.side": "side"}),
    "two mixers": (  # no module has all projections; equal names get longer
        {name: built({"in_proj": (4, 3)}, NewConvMixer) for name in "ab"},
        {"mixer.a_in_proj": "a.in_proj", "mixer.b_in_proj": "b.in_proj"}),
}  # fmt: skip
for pattern in ("projection_{}", "project_{}", "linear_{}", "{}_proj", "{}_lin"):
    names = {role: pattern.format(role) for role in "qkv"}
    LAYERS[pattern] = (
        {"a": dict.fromkeys(names.values(), (4, 4))},
        {f"attn.{role}": f"a.{name}" for role, name in names.items()},
    )


@pytest.mark.parametrize("case", LAYERS)
def test_projections_are_found_by_their_names_sizes_and_places(case):
    parts, sites = LAYERS[case]
    assert sites_of_layer(built(parts, NewConvLayer), 4) == sites


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
