"""Norms of layers: by the order in which a forward uses them, and inside of a sublayer."""

from __future__ import annotations

import every_type

from adapterhub.anatomy import anatomy_of

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
