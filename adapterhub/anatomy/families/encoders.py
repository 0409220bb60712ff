"""Rows of encoders."""

from __future__ import annotations

from adapterhub.anatomy.family import Family, Stack

_BERT_SITES = {
    "attn.q": "attention.self.query",
    "attn.k": "attention.self.key",
    "attn.v": "attention.self.value",
    "attn.o": "attention.output.dense",
    "attn.kv": "attention.self",
    "attn.norm": "attention.output.LayerNorm",
    "ffn.up": "intermediate.dense",
    "ffn.down": "output.dense",
    "ffn.norm": "output.LayerNorm",
}

BERT = Family(
    ("bert",),
    stacks=(Stack("encoder", "encoder.layer", _BERT_SITES, body="encoder", norms="post"),),
    below=("embeddings",),
)

ROBERTA = Family(
    ("roberta", "xlm-roberta", "camembert"), BERT.stacks, BERT.below, positions_from_padding=True
)

ELECTRA = Family(
    ("electra",),
    stacks=(Stack("encoder", "encoder.layer", _BERT_SITES, norms="post"),),
    below=("embeddings", "embeddings_project"),
)

# A layer is one set of weights; ALBERT runs each group of layers several times per forward pass.
ALBERT = Family(
    ("albert",),
    stacks=(
        Stack(
            "encoder",
            "encoder.albert_layer_groups.*.albert_layers",
            {
                "attn.q": "attention.query",
                "attn.k": "attention.key",
                "attn.v": "attention.value",
                "attn.o": "attention.dense",
                "attn.kv": "attention",
                "attn.norm": "attention.LayerNorm",
                "ffn.up": "ffn",
                "ffn.down": "ffn_output",
                "ffn.norm": "full_layer_layer_norm",
            },
            body="encoder",
            norms="post",
        ),
    ),
    below=("embeddings", "encoder.embedding_hidden_mapping_in"),
)

DISTILBERT = Family(
    ("distilbert",),
    stacks=(
        Stack(
            "encoder",
            "transformer.layer",
            {
                "attn.q": "attention.q_lin",
                "attn.k": "attention.k_lin",
                "attn.v": "attention.v_lin",
                "attn.o": "attention.out_lin",
                "attn.kv": "attention",
                "attn.norm": "sa_layer_norm",
                "ffn.up": "ffn.lin1",
                "ffn.down": "ffn.lin2",
                "ffn.norm": "output_layer_norm",
            },
            norms="post",
        ),
    ),
    below=("embeddings",),
)

# With shared position projections, q and k are called twice: only the attention's input is x.
DEBERTA_V2 = Family(
    ("deberta-v2",),
    stacks=(
        Stack(
            "encoder",
            "encoder.layer",
            _BERT_SITES
            | {
                "attn": "attention.self>attention.output.dense",
                "attn.q": "attention.self.query_proj",
                "attn.k": "attention.self.key_proj",
                "attn.v": "attention.self.value_proj",
            },
            norms="post",
        ),
    ),
    below=("embeddings",),
)

_DEBERTA_SITES = {
    role: path for role, path in _BERT_SITES.items() if role not in ("attn.k", "attn.v")
}
_DEBERTA_SITES["attn.qkv"] = _DEBERTA_SITES.pop("attn.q").replace("query", "in_proj")

DEBERTA = Family(
    ("deberta",),
    stacks=(
        Stack(
            "encoder",
            "encoder.layer",
            _DEBERTA_SITES,
            fused={"attn.qkv": "heads"},
            norms="post",
        ),
    ),
    below=("embeddings",),
)

MPNET = Family(
    ("mpnet",),
    stacks=(
        Stack(
            "encoder",
            "encoder.layer",
            _BERT_SITES
            | {
                "attn.q": "attention.attn.q",
                "attn.k": "attention.attn.k",
                "attn.v": "attention.attn.v",
                "attn.o": "attention.attn.o",
                "attn.kv": "attention.attn",
                "attn.norm": "attention.LayerNorm",
            },
            body="encoder",
            norms="post",
        ),
    ),
    below=("embeddings",),
    positions_from_padding=True,
)

MODERNBERT = Family(
    ("modernbert",),
    stacks=(
        Stack(
            "encoder",
            "layers",
            {
                "attn.qkv": "attn.Wqkv",
                "attn.o": "attn.Wo",
                "attn.kv": "attn",
                "attn.norm": "attn_norm",
                "ffn.gate_up": "mlp.Wi",
                "ffn.down": "mlp.Wo",
                "ffn.norm": "mlp_norm",
            },
            norms="pre",
        ),
    ),
    below=("embeddings",),
)

# XLNet's attention projections are plain tensors, so they cannot have hooks. Its attention adds the
# residual before it returns.
XLNET = Family(
    ("xlnet",),
    stacks=(
        Stack(
            "encoder",
            "layer",
            {
                "attn.norm": "rel_attn.layer_norm",
                "ffn.up": "ff.layer_1",
                "ffn.down": "ff.layer_2",
                "ffn.norm": "ff.layer_norm",
            },
            norms="post",
        ),
    ),
    below=("word_embedding",),
    batch_dim=1,
    query_stream="output_g",
)
