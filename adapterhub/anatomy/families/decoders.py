"""Rows of decoders."""

from __future__ import annotations

from adapterhub.anatomy.family import Family, Stack

_GPT2_SITES = {
    "attn.qkv": "attn.c_attn",
    "attn.o": "attn.c_proj",
    "attn.kv": "attn",
    "attn.norm": "ln_1",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
    "ffn.norm": "ln_2",
}
_OPT_SITES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.out_proj",
    "attn.kv": "self_attn",
    "attn.norm": "self_attn_layer_norm",
    "ffn.up": "fc1",
    "ffn.down": "fc2",
    "ffn.norm": "final_layer_norm",
}
_NEOX_SITES = {
    "attn.qkv": "attention.query_key_value",
    "attn.o": "attention.dense",
    "attn.kv": "attention",
    "attn.norm": "input_layernorm",
    "ffn.up": "mlp.dense_h_to_4h",
    "ffn.down": "mlp.dense_4h_to_h",
    "ffn.norm": "post_attention_layernorm",
}
_LLAMA_SITES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.kv": "self_attn",
    "attn.norm": "input_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "ffn.norm": "post_attention_layernorm",
}


def _without(sites: dict[str, str], *roles: str) -> dict[str, str]:
    return {role: path for role, path in sites.items() if role not in roles}


OPENAI_GPT = Family(
    ("openai-gpt",),
    stacks=(Stack("decoder", "h", _GPT2_SITES, norms="post"),),
    below=("tokens_embed", "positions_embed"),
)

GPT2 = Family(
    ("gpt2",),
    stacks=(Stack("decoder", "h", _GPT2_SITES, norms="pre"),),
    below=("wte", "wpe"),
)

# With one key-value head for all queries, "heads" is one run: q, k and v.
GPT_BIGCODE = Family(
    ("gpt_bigcode",),
    stacks=(Stack("decoder", "h", _GPT2_SITES, fused={"attn.qkv": "heads"}, norms="pre"),),
    below=("wte", "wpe"),
)

GPT_NEO = Family(
    ("gpt_neo",),
    stacks=(
        Stack(
            "decoder",
            "h",
            {
                "attn.q": "attn.attention.q_proj",
                "attn.k": "attn.attention.k_proj",
                "attn.v": "attn.attention.v_proj",
                "attn.o": "attn.attention.out_proj",
                "attn.kv": "attn.attention",
                "attn.norm": "ln_1",
                "ffn.up": "mlp.c_fc",
                "ffn.down": "mlp.c_proj",
                "ffn.norm": "ln_2",
            },
            norms="pre",
        ),
    ),
    below=("wte", "wpe"),
)

# Attention and the feed-forward network run in parallel after one norm.
GPTJ = Family(
    ("gptj",),
    stacks=(
        Stack(
            "decoder",
            "h",
            {
                "attn.q": "attn.q_proj",
                "attn.k": "attn.k_proj",
                "attn.v": "attn.v_proj",
                "attn.o": "attn.out_proj",
                "attn.kv": "attn",
                "attn.norm": "ln_1",
                "ffn.up": "mlp.fc_in",
                "ffn.down": "mlp.fc_out",
            },
            norms="pre",
        ),
    ),
    below=("wte",),
)

GPT_NEOX = Family(
    ("gpt_neox",),
    stacks=(Stack("decoder", "layers", _NEOX_SITES, fused={"attn.qkv": "heads"}, norms="pre"),),
    below=("embed_in",),
)

# A config option decides whether the residual is taken before or after the norm: norms is None.
BLOOM = Family(
    ("bloom",),
    stacks=(
        Stack(
            "decoder",
            "h",
            _NEOX_SITES
            | {
                "attn.qkv": "self_attention.query_key_value",
                "attn.o": "self_attention.dense",
                "attn.kv": "self_attention",
            },
            fused={"attn.qkv": "heads"},
        ),
    ),
    below=("word_embeddings", "word_embeddings_layernorm"),
    positions_follow_mask=True,
)

# Runs of q, k and v for each key-value head: one for all (falcon-7b), several (falcon-40b), or one
# for each query (falcon-rw). Without ln_mlp or post_attention_layernorm, one norm serves both
# sublayers.
FALCON = Family(
    ("falcon",),
    stacks=(
        Stack(
            "decoder",
            "h",
            {
                "attn.qkv": "self_attention.query_key_value",
                "attn.o": "self_attention.dense",
                "attn.kv": "self_attention",
                "attn.norm": "ln_attn|input_layernorm",
                "ffn.up": "mlp.dense_h_to_4h",
                "ffn.down": "mlp.dense_4h_to_h",
                "ffn.norm": "ln_mlp|post_attention_layernorm",
            },
            fused={"attn.qkv": "heads"},
            norms="pre",
        ),
    ),
    below=("word_embeddings",),
)

# Its biases depend only on the distance between positions, so positions need not be counted.
MPT = Family(
    ("mpt",),
    stacks=(
        Stack(
            "decoder",
            "blocks",
            {
                "attn.qkv": "attn.Wqkv",
                "attn.o": "attn.out_proj",
                "attn.kv": "attn",
                "attn.norm": "norm_1",
                "ffn.up": "ffn.up_proj",
                "ffn.down": "ffn.down_proj",
                "ffn.norm": "norm_2",
            },
            norms="pre",
        ),
    ),
    below=("wte",),
    positions_follow_mask=True,
)

OPT = Family(
    ("opt",),
    stacks=(
        Stack(
            "decoder", "decoder.layers", _OPT_SITES, root="decoder", norms="do_layer_norm_before"
        ),
    ),
    below=("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in"),
    positions_follow_mask=True,
)

XGLM = Family(
    ("xglm",),
    stacks=(Stack("decoder", "layers", _OPT_SITES, norms="pre"),),
    below=("embed_tokens",),
)

LLAMA = Family(
    ("llama", "mistral", "qwen2", "qwen3", "olmo"),
    stacks=(Stack("decoder", "layers", _LLAMA_SITES, norms="pre"),),
    below=("embed_tokens",),
)

OLMO2 = Family(
    ("olmo2",),
    stacks=(
        Stack(
            "decoder",
            "layers",
            _without(_LLAMA_SITES, "attn.norm", "ffn.norm")
            | {
                "attn.postnorm": "post_attention_layernorm",
                "ffn.postnorm": "post_feedforward_layernorm",
            },
            norms="pre",
        ),
    ),
    below=("embed_tokens",),
)

GEMMA3 = Family(
    ("gemma3_text",),
    stacks=(
        Stack(
            "decoder",
            "layers",
            _LLAMA_SITES
            | {
                "attn.postnorm": "post_attention_layernorm",
                "ffn.norm": "pre_feedforward_layernorm",
                "ffn.postnorm": "post_feedforward_layernorm",
            },
            norms="pre",
        ),
    ),
    below=("embed_tokens",),
)

PHI3 = Family(
    ("phi3",),
    stacks=(
        Stack(
            "decoder",
            "layers",
            _without(_LLAMA_SITES, "attn.q", "attn.k", "attn.v", "ffn.gate", "ffn.up")
            | {"attn.qkv": "self_attn.qkv_proj", "ffn.gate_up": "mlp.gate_up_proj"},
            norms="pre",
        ),
    ),
    below=("embed_tokens",),
)

# The experts' weights are tensors of one module, so the network is a sublayer as a whole.
MIXTRAL = Family(
    ("mixtral",),
    stacks=(
        Stack(
            "decoder",
            "layers",
            _without(_LLAMA_SITES, "ffn.gate", "ffn.up", "ffn.down")
            | {"ffn": "mlp", "ffn.experts": "mlp.experts", "ffn.router": "mlp.gate"},
            norms="pre",
        ),
    ),
    below=("embed_tokens",),
)
